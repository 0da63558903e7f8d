"""A clean state of a sandbox: remembered while it is fresh, brought back later, and proven, or refused.

What is remembered is in this process's memory alone, which commands cannot read or change.
"""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH112, PTH114, PTH118, PTH208

import os
import select
import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from . import archive, survey
from .clock import monotonic_s
from .kept import Kept, Tracked, content, is_kept, keep, put_back, quietly, reshape
from .repository import GitError, changed_in, check_out, git_files, tracked_files

_MOST_COPIED = 32 << 20
_LARGEST_OF_HOME = 256 << 10
_MOST_SAID = 20
_END_S = 10.0
_BETWEEN_ROUNDS_S = 0.002


class CannotMarkError(Exception):
    """The sandbox is in no state to come back to."""


@dataclass(frozen=True)
class CleanState:
    """What was there.

    Attributes:
        repo: The working tree whose tracked files git brings back; None for none.
        exempt: A path of the launcher's own.
        instant_ns: What was changed later has a later change time.
        closed: Folders of other users, which this one can neither read nor write.
        shapes: Mode, owner and group of each other folder.
        digests: What each folder holds beside the files that are kept or tracked.
        kept: Small files by path: git's own beside its objects, and those directly in the home.
        tracked: Files that git brings back, and git's objects, by path.
        memory: What was there of System V IPC.
        mounts: Where something was mounted.
    """

    repo: str | None
    exempt: str
    instant_ns: int
    closed: Set[str]
    shapes: Mapping[str, tuple[int, int, int]]
    digests: Mapping[str, bytes]
    kept: Mapping[str, Kept]
    tracked: Mapping[str, Tracked]
    memory: Sequence[str]
    mounts: Sequence[str]

    @property
    def apart(self) -> set[str]:
        """Paths whose content is compared, and not their times."""
        return {*self.kept, *self.tracked, self.exempt}


def mark(repo: str | None, home: str | None, pipes: Path, env: Mapping[str, str]) -> CleanState:
    """Remember the state of now.

    Args:
        repo: The folder of a git working tree; None remembers none.
        home: Its files are kept, if they are small.
        pipes: The launcher's own folder.
        env: For git.

    Raises:
        CannotMarkError: Something runs, git does not work, or there is too much to keep.
    """
    if os.getpid() != 1:
        raise CannotMarkError("only a sandbox with a PID namespace of its own can be brought back")
    if others := _others():
        raise CannotMarkError(f"{len(others)} processes are running: end them and close all sessions first")
    kept = _small_files(home)
    tracked: dict[str, Tracked] = {}
    if repo is not None:
        try:
            own, objects = git_files(repo)
            known = (*tracked_files(repo, env), *objects)
        except GitError as problem:
            raise CannotMarkError(str(problem)) from problem
        kept |= own
        tracked = {path: one for path in known if (one := content(path)).kind}
    if (size := sum(len(one.data) for one in kept.values())) > _MOST_COPIED:
        raise CannotMarkError(f"git's own files beside its objects have {size} bytes, {_MOST_COPIED} at most")
    exempt = str(pipes.parent / "epoch")
    apart = {*kept, *tracked, exempt}
    instant_ns = _tick(pipes, after_ns=0)
    shapes: dict[str, tuple[int, int, int]] = {}
    few: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    closed: set[str] = set()
    digests: dict[str, bytes] = {}
    for folder in survey.walk(survey.roots()):
        if isinstance(folder, survey.Closed):
            if folder.writable:
                raise CannotMarkError(f"{folder.path} can be written to and not be read: {folder.why}")
            closed.add(folder.path)
            continue
        shapes[folder.path] = few.setdefault(folder.shape, folder.shape)
        digests[folder.path] = folder.digest(instant_ns, apart)
    _tick(pipes, after_ns=instant_ns)
    return CleanState(
        repo=repo,
        exempt=exempt,
        instant_ns=instant_ns,
        closed=closed,
        shapes=shapes,
        digests=digests,
        kept=kept,
        tracked=tracked,
        memory=survey.left_in_memory(),
        mounts=survey.mount_points(),
    )


def restore(clean: CleanState, env: Mapping[str, str]) -> list[str]:
    """Bring the state back; what still differs then, at most 20 lines. Nothing is the only good answer."""
    if not kill_others():
        return ["processes survive SIGKILL"]
    _make_missing_folders(clean)
    _remove_new(clean)
    for path, one in clean.kept.items():
        put_back(path, one)
    said: list[str] = []
    if clean.repo is not None:
        changed = changed_in(clean.tracked, clean.instant_ns)
        try:
            check_out(clean.repo, changed, clean.tracked, env)
        except GitError as problem:
            said.append(str(problem))
    # Filters of the repository are programs too: what they did is compared, what they left running ends.
    if not kill_others():
        return ["processes survive SIGKILL"]
    return [*said, *differences(clean)][:_MOST_SAID]


def differences(clean: CleanState) -> list[str]:
    """How the state of now differs."""
    said = [f"new {one}" for one in survey.left_in_memory() if one not in clean.memory]
    said += [f"new mount {one}" for one in survey.mount_points() if one not in clean.mounts]
    apart = clean.apart
    missing = set(clean.digests)
    for folder in survey.walk(survey.roots()):
        if isinstance(folder, survey.Closed):
            if folder.path not in clean.closed:
                said.append(f"cannot be looked into: {folder.path}: {folder.why}")
            continue
        missing.discard(folder.path)
        if folder.path not in clean.digests:
            said.append(f"new folder {folder.path}")
            continue
        new = [name for name, found in folder.files if found.st_ctime_ns > clean.instant_ns]
        paths = [os.path.join(folder.path, name) for name in new]
        said += [f"new or changed {path}" for path in paths if path not in apart]
        if folder.digest(clean.instant_ns, apart) != clean.digests[folder.path]:
            said.append(f"changed or missing in {folder.path}")
    said += [f"missing folder {path}" for path in missing]
    said += [f"not as it was: {path}" for path, one in clean.kept.items() if not is_kept(path, one)]
    return said + [f"not as it was: {path}" for path in changed_in(clean.tracked, clean.instant_ns)]


def kill_others() -> bool:
    """Kill everybody else in here; False when somebody survives."""
    give_up_s = monotonic_s() + _END_S
    while others := _others():
        if monotonic_s() > give_up_s:
            return False
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        select.select([], [], [], _BETWEEN_ROUNDS_S)  # the dead are collected by another thread
    return True


def _others() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _remove_new(clean: CleanState) -> None:
    """Remove what came or was changed later; what resists is seen by the comparison."""
    apart = clean.apart
    for one in survey.walk(survey.roots()):
        if one.path not in clean.digests and one.path not in clean.closed:
            quietly(_remove_tree, one.path)
        if isinstance(one, survey.Closed) or one.path not in clean.digests:
            continue
        reshape(one.path, clean.shapes[one.path])
        for name, found in one.files:
            path = os.path.join(one.path, name)
            if found.st_ctime_ns > clean.instant_ns and path not in apart:
                quietly(os.unlink, path)


def _remove_tree(path: str) -> None:
    archive.remove_tree(Path(path))


def _make_missing_folders(clean: CleanState) -> None:
    for path in sorted(clean.shapes):
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
