"""A git repository: what of it is remembered, and how its tracked files come back.

The command and the settings that are trusted are those of the time when the state was marked.
"""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH112, PTH114, PTH118, PTH120

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import survey
from .children import Children
from .execute import CommandRequest, Run, Wake
from .kept import Kept, Tracked, dress, keep, quietly, write_anew

_GIT_S = 300.0
_GRACE_S = 1.0
_MOST_SAID = 256 << 20
_GIT = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"]
_APART = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent"}


class GitError(Exception):
    """git does not work there."""


@dataclass(frozen=True)
class Git:
    """git for a request.

    Attributes:
        children: They collect git, and what its filters leave.
        env: For git.
        wake: Of the request, whose end ends git.
    """

    children: Children
    env: Mapping[str, str]
    wake: Wake

    def __call__(self, repo: str, *words: str, given: bytes = b"") -> bytes:
        """Its standard output.

        Raises:
            CutOffError: A new owner came.
            GitError: It does not work.
        """
        self.wake.go_on()
        request = CommandRequest(
            [*_GIT, *words], repo, {**self.env, **_APART}, given, _GIT_S, _GRACE_S, output_limit=_MOST_SAID
        )
        try:
            ended = Run(self.children, request, self.wake, None)()
        except OSError as problem:
            raise GitError(f"git does not work in {repo}: {problem}") from problem
        self.wake.go_on()
        if ended.exit_code != 0:
            how = f"took more than {_GIT_S:.0f} s" if ended.timed_out else f"ended with {ended.exit_code}"
            said = b"".join(ended.stderr.parts()).decode("utf-8", "replace").strip()
            raise GitError(f"git {words[0]} in {repo} {how}: {said or ended.infra_error}")
        if ended.stdout.total > _MOST_SAID:
            raise GitError(f"git {words[0]} in {repo} said {ended.stdout.total} bytes, {_MOST_SAID} at most")
        return b"".join(ended.stdout.parts())


def tracked_files(repo: str, git: Git) -> list[str]:
    """Paths of files and links that are in the index and in the working tree.

    Raises:
        CutOffError: A new owner came.
        GitError: git does not work.
    """
    out = git(repo, "ls-files", "-z", "--cached")
    paths = [os.path.join(repo, os.fsdecode(name)) for name in out.split(b"\0") if name]
    return [path for path in paths if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode)]


def git_files(repo: str) -> tuple[dict[str, Kept], list[str]]:
    """Everything of git but its objects, which never change; and the paths of those.

    Raises:
        GitError: It is no whole repository, or not readable.
    """
    own = os.path.join(repo, ".git")
    if not os.path.isdir(own) or os.path.islink(own):
        raise GitError(f"{own} is no folder: only a whole repository can be brought back")
    kept: dict[str, Kept] = {}
    objects: list[str] = []
    stores: list[str] = []
    for folder in survey.walk([own]):
        if isinstance(folder, survey.Closed):
            raise GitError(f"{folder.path} cannot be read: {folder.why}")
        names = [name for name, found in folder.files if stat.S_ISREG(found.st_mode)]
        if "HEAD" in names:  # this repository, or one of a submodule
            stores += [os.path.join(folder.path, name, "") for name in ("objects", "lfs")]
        if f"{folder.path}/".startswith(tuple(stores)):
            objects += [os.path.join(folder.path, name) for name in names]
        else:
            kept |= keep(folder.path, names)
    return kept, objects


def bring_back(
    repo: str, changed: Sequence[str], tracked: Mapping[str, Tracked], kept: Mapping[str, Kept], git: Git
) -> tuple[dict[str, Tracked], dict[str, Kept]]:
    """Replace files of the repository: tracked ones from objects, by an index that is what it was.

    Args:
        repo: The working tree.
        changed: To which something was done.
        tracked: What they were.
        kept: Git's own files, put back already.
        git: Of the request.

    Returns:
        What is remembered of those files, and of the index, from now on.

    Raises:
        CutOffError: A new owner came.
        GitError: Not all of them came back.
    """
    own = os.path.join(repo, ".git", "")
    fresh: dict[str, Tracked] = {}
    for path in changed:
        git.wake.go_on()
        if path.startswith(own):
            fresh[path] = write_anew(path, tracked[path])
    wanted = [path for path in changed if path not in fresh]
    if not wanted:
        return fresh, {}
    for path in wanted:
        git.wake.go_on()
        quietly(os.unlink, path)
    names = b"\0".join(os.fsencode(os.path.relpath(path, repo)) for path in wanted)
    git(repo, "checkout-index", "--force", "-z", "--stdin", given=names)
    for path in wanted:  # git knows one bit of the mode, and no owner
        git.wake.go_on()
        fresh[path] = dress(path, tracked[path])
    return fresh, _refreshed(repo, kept, git)


def _refreshed(repo: str, kept: Mapping[str, Kept], git: Git) -> dict[str, Kept]:
    """The index once it knows the new files' times: without that git takes them for modified."""
    index = os.path.join(repo, ".git", "index")
    if index not in kept:
        return {}
    entries = git(repo, "ls-files", "-z", "--stage", "-v")
    git(repo, "update-index", "-q", "--refresh")
    if git(repo, "ls-files", "-z", "--stage", "-v") != entries:
        raise GitError(f"{index} has other entries than it had")
    again = keep(os.path.dirname(index), ["index"])
    return again if index in again and again[index].file.shape == kept[index].file.shape else {}
