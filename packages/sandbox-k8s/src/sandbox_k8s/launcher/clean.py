"""A clean state of a sandbox: remembered while it is fresh, brought back later, and proven, or refused.

What is remembered is in this process's memory alone, which commands cannot read or change. Whatever cannot be
shown to be as it was is a difference, and a sandbox with one is not handed out: rather too many are refused.
"""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH112, PTH114, PTH118, PTH208

import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from . import archive, inherited, survey
from .clock import monotonic_s
from .execute import Wake
from .kept import Kept, Tracked, content, keep, put_back, quietly, reshape, untouched
from .repository import Git, GitError, bring_back, git_files, tracked_files

_MOST_COPIED = 32 << 20
_LARGEST_OF_HOME = 256 << 10
_MOST_SAID = 20
_END_S = 10.0
_BETWEEN_ROUNDS_S = 0.002


class CannotMarkError(Exception):
    """The sandbox is in no state to come back to."""


@dataclass(frozen=True)
class Bench:
    """What marking and restoring work with.

    Attributes:
        home: The home of commands, whose small files are kept; None for none.
        pipes: The launcher's own folder.
        epoch_file: The launcher's own file, which it writes at each fence; None for none.
        git: Of the request.
        wake: Of the request; looked at all the time, since a new owner waits for our end.
        keep_epoch: Writes that file again, and says what it holds then.
    """

    home: str | None
    pipes: Path
    epoch_file: Path | None
    git: Git
    wake: Wake
    keep_epoch: Callable[[Wake], bytes]


@dataclass(frozen=True)
class CleanState:
    """What was there.

    Attributes:
        repo: The working tree whose tracked files git brings back; None for none.
        instant_ns: What was changed later has a later change time.
        closed: Folders of other users, which this one can neither read nor write.
        shapes: Mode, owner and group of each other folder.
        times: Change and modification time of each.
        digests: What each folder holds beside the files that are kept or tracked.
        kept: Small files by path: git's own beside its objects, and those directly in the home.
        tracked: Files that git brings back, and git's objects, by path.
        mounts: Where something was mounted.
        limits: What commands inherit.
    """

    repo: str | None
    instant_ns: int
    closed: Set[str]
    shapes: Mapping[str, tuple[int, int, int]]
    times: Mapping[str, tuple[int, int]]
    digests: Mapping[str, bytes]
    kept: Mapping[str, Kept]
    tracked: Mapping[str, Tracked]
    mounts: Sequence[str]
    limits: inherited.Inherited

    def apart(self, bench: Bench) -> set[str]:
        """Paths that are not compared with their folders: see `kept`, `tracked` and `Bench.epoch_file`."""
        own = () if bench.epoch_file is None else (str(bench.epoch_file),)
        return {*self.kept, *self.tracked, *own}


def mark(bench: Bench, repo: str | None) -> CleanState:
    """Remember the state of now. Nothing else may be under way.

    Args:
        bench: What to work with.
        repo: The folder of a git working tree; None remembers none.

    Raises:
        CutOffError: A new owner came.
        CannotMarkError: Something runs, git does not work, there is too much to keep, or something is there
            whose changes could not be seen later.
    """
    if os.getpid() != 1:
        raise CannotMarkError("only a sandbox with a PID namespace of its own can be brought back")
    if others := _others():
        raise CannotMarkError(f"{len(others)} processes are running: end them and close all sessions first")
    if survey.queues_are_hidden():
        raise CannotMarkError("message queues cannot be looked at: no mqueue is mounted, at /dev/mqueue say")
    if memory := [*survey.left_in_memory(), *survey.queues()]:
        raise CannotMarkError(f"{memory[0]} is there, whose content cannot be compared: remove it first")
    kept = _small_files(bench.home)
    tracked: dict[str, Tracked] = {}
    if repo is not None:
        bench.wake.go_on()
        try:
            own, objects = git_files(repo)
            known = (*tracked_files(repo, bench.git), *objects)
        except GitError as problem:
            raise CannotMarkError(str(problem)) from problem
        if others := _others():
            raise CannotMarkError(f"git left {len(others)} processes running")
        kept |= own
        tracked = _look_at(known, bench.wake)
    if (size := sum(len(one.data) for one in kept.values())) > _MOST_COPIED:
        raise CannotMarkError(f"git's own files beside its objects have {size} bytes, {_MOST_COPIED} at most")
    try:
        found = inherited.look()
    except inherited.UnknownMachineError as problem:
        raise CannotMarkError(str(problem)) from problem
    if len(found.threads) != 1:
        raise CannotMarkError("threads of the launcher are scheduled differently: somebody changed that")
    instant_ns = _tick(bench.pipes, after_ns=0)
    empty = CleanState(repo, instant_ns, set(), {}, {}, {}, kept, tracked, survey.mount_points(), found)
    marked = _survey(bench, empty)
    _tick(bench.pipes, after_ns=instant_ns)
    return marked


def _look_at(paths: Sequence[str], wake: Wake) -> dict[str, Tracked]:
    found: dict[str, Tracked] = {}
    for path in paths:
        wake.go_on()
        one = content(path)
        if one.kind:
            found[path] = one
    return found


def _survey(bench: Bench, state: CleanState) -> CleanState:
    """With all folders, and what is in them."""
    apart = state.apart(bench)
    closed: set[str] = set()
    shapes: dict[str, tuple[int, int, int]] = {}
    few: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    times: dict[str, tuple[int, int]] = {}
    digests: dict[str, bytes] = {}
    for folder in survey.walk(survey.roots()):
        bench.wake.go_on()
        if isinstance(folder, survey.Closed):
            if folder.writable:
                raise CannotMarkError(f"{folder.path} can be written to and not be read: {folder.why}")
            closed.add(folder.path)
            continue
        for path in _later(folder, state.instant_ns, apart):
            raise CannotMarkError(f"the clock of {path} is ahead: what changes there could not be seen")
        shapes[folder.path] = few.setdefault(folder.shape, folder.shape)
        times[folder.path] = folder.times
        digests[folder.path] = folder.digest(state.instant_ns, apart)
    return replace(state, closed=closed, shapes=shapes, times=times, digests=digests)


def _later(folder: survey.Folder, instant_ns: int, apart: Set[str]) -> list[str]:
    """Files that came or were changed after an instant."""
    names = [name for name, found in folder.files if found.st_ctime_ns > instant_ns]
    return [path for name in names if (path := os.path.join(folder.path, name)) not in apart]


def restore(bench: Bench, clean: CleanState) -> tuple[CleanState, list[str]]:
    """Bring the state back. Nothing else may be under way.

    Returns:
        What to remember from now on: files that were replaced have other times. And what still differs, at
        most 20 lines: nothing is the only good answer.

    Raises:
        CutOffError: A new owner came.
    """
    if not kill_others(bench.wake):
        return clean, ["processes survive SIGKILL"]
    _make_missing_folders(clean, bench.wake)
    _remove_new(bench, clean)
    said: list[str] = []
    kept: dict[str, Kept] = {}
    for path, one in clean.kept.items():
        bench.wake.go_on()
        kept[path] = put_back(path, one)
    tracked = clean.tracked
    if clean.repo is not None:
        changed = [path for path, was in tracked.items() if not untouched(path, was)]
        try:
            fresh, index = bring_back(clean.repo, changed, tracked, kept, bench.git)
            tracked, kept = {**tracked, **fresh}, {**kept, **index}
        except GitError as problem:
            said.append(str(problem))
    # Filters of the repository are programs too: what they did is compared, what they left running ends.
    if not kill_others(bench.wake):
        return clean, ["processes survive SIGKILL"]
    said += _own_file(bench)
    again = replace(clean, kept=kept, tracked=tracked)
    theirs = _put_times_back(again, bench.wake)
    return again, [*said, *differences(bench, again, theirs)][:_MOST_SAID]


def _own_file(bench: Bench) -> list[str]:
    """Write the launcher's own file as a new one; why it is not what it must be."""
    path = bench.epoch_file
    if path is None:
        return []
    bench.wake.go_on()
    before = content(str(path))
    wanted = bench.keep_epoch(bench.wake)
    after = content(str(path))
    if after.kind and after.seen != before.seen and path.read_bytes() == wanted:
        return []
    return [f"not as the launcher writes it: {path}"]


def _put_times_back(clean: CleanState, wake: Wake) -> set[str]:
    """Put the times of folders back; those whose times no command here can set either."""
    theirs: set[str] = set()
    for folder in survey.walk(survey.roots()):
        wake.go_on()
        was = clean.times.get(folder.path)
        if isinstance(folder, survey.Closed) or was is None or folder.times == was:
            continue
        try:
            os.utime(folder.path, ns=(was[1], was[1]), follow_symlinks=False)
        except PermissionError:
            theirs.add(folder.path)
        except OSError:
            continue  # the comparison says so
    return theirs


def differences(bench: Bench, clean: CleanState, theirs: Set[str]) -> list[str]:
    """How the state of now differs; times of the folders ``theirs`` are left out."""
    said = [f"new {one}" for one in (*survey.left_in_memory(), *survey.queues())]
    said += [f"not as it was: the launcher's {name}" for name in clean.limits.other_than(inherited.look())]
    said += [f"new mount {one}" for one in survey.mount_points() if one not in clean.mounts]
    apart = clean.apart(bench)
    missing = set(clean.digests)
    for folder in survey.walk(survey.roots()):
        bench.wake.go_on()
        if isinstance(folder, survey.Closed):
            if folder.path not in clean.closed:
                said.append(f"cannot be looked into: {folder.path}: {folder.why}")
            continue
        missing.discard(folder.path)
        if folder.path not in clean.digests:
            said.append(f"new folder {folder.path}")
            continue
        said += [f"new or changed {path}" for path in _later(folder, clean.instant_ns, apart)]
        if folder.digest(clean.instant_ns, apart) != clean.digests[folder.path]:
            said.append(f"changed or missing in {folder.path}")
        elif folder.times[1] != clean.times[folder.path][1] and folder.path not in theirs:
            said.append(f"not of the time that it was: {folder.path}")
    said += [f"missing folder {path}" for path in missing]
    files = [*((path, one.file) for path, one in clean.kept.items()), *clean.tracked.items()]
    for path, file in files:
        bench.wake.go_on()
        if not untouched(path, file):
            said.append(f"not as it was: {path}")
    return said


def kill_others(wake: Wake) -> bool:
    """Kill everybody else in here; False when somebody survives.

    Raises:
        CutOffError: A new owner came.
    """
    give_up_s = monotonic_s() + _END_S
    while others := _others():
        wake.go_on()
        if monotonic_s() > give_up_s:
            return False
        for pid in others:
            wake.go_on()
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        select.select([], [], [], _BETWEEN_ROUNDS_S)  # the dead are collected by another thread
    return True


def _others() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _remove_new(bench: Bench, clean: CleanState) -> None:
    """Remove what came or was changed later; what resists is seen by the comparison."""
    for queue in survey.queues():
        bench.wake.go_on()
        quietly(os.unlink, queue)
    apart = clean.apart(bench)
    for one in survey.walk(survey.roots()):
        bench.wake.go_on()
        if one.path not in clean.digests and one.path not in clean.closed:
            quietly(_remove_tree, one.path)
        if isinstance(one, survey.Closed) or one.path not in clean.digests:
            continue
        reshape(one.path, clean.shapes[one.path])
        for path in _later(one, clean.instant_ns, apart):
            bench.wake.go_on()
            quietly(os.unlink, path)


def _remove_tree(path: str) -> None:
    archive.remove_tree(Path(path))


def _make_missing_folders(clean: CleanState, wake: Wake) -> None:
    for path in sorted(clean.shapes):
        wake.go_on()
        if not os.path.isdir(path) or os.path.islink(path):
            quietly(os.unlink, path)
            quietly(os.mkdir, path)
        reshape(path, clean.shapes[path])


def _small_files(home: str | None) -> dict[str, Kept]:
    if home is None or home == "/" or not os.path.isdir(home):
        return {}
    with os.scandir(home) as entries:
        files = [one for one in entries if one.is_file(follow_symlinks=False)]
        small = [one.name for one in files if one.stat(follow_symlinks=False).st_size <= _LARGEST_OF_HOME]
    return keep(home, small)


def _tick(folder: Path, after_ns: int) -> int:
    """The file system's time of now, once it is later than that."""
    probe = folder / "now"
    while True:
        probe.touch()
        now_ns = probe.stat().st_ctime_ns
        probe.unlink()
        if now_ns > after_ns:
            return now_ns
