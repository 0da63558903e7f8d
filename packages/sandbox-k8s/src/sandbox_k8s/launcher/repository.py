"""A git repository: what of it is remembered, and how its tracked files come back.

The command and the settings that are trusted are those of the time when the state was marked.
"""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH112, PTH114, PTH118

import os
import stat
import subprocess
from collections.abc import Mapping, Sequence

from . import survey
from .kept import Kept, Tracked, content, keep, quietly, reshape

_GIT_S = 300.0
_GIT = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"]


class GitError(Exception):
    """git does not work there."""


def tracked_files(repo: str, env: Mapping[str, str]) -> list[str]:
    """Paths of files and links that are in the index and in the working tree.

    Raises:
        GitError: git does not work.
    """
    out = _git(repo, env, "ls-files", "-z", "--cached")
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
    for folder in survey.walk([own]):
        if isinstance(folder, survey.Closed):
            raise GitError(f"{folder.path} cannot be read: {folder.why}")
        names = [name for name, found in folder.files if stat.S_ISREG(found.st_mode)]
        if f"{folder.path}/".startswith((f"{own}/objects/", f"{own}/lfs/")):
            objects += [os.path.join(folder.path, name) for name in names]
        else:
            kept |= keep(folder.path, names)
    return kept, objects


def changed_in(tracked: Mapping[str, Tracked], instant_ns: int) -> list[str]:
    """Files of the repository that are not as they were.

    A later change time is no proof here: git touches objects that it was about to write again.
    """
    changed: list[str] = []
    for path, was in tracked.items():
        try:
            found = os.lstat(path)
            # A file that was moved here with its folder has its old change time.
            untouched = found.st_ctime_ns <= instant_ns and found.st_ino == was.inode
        except OSError:
            untouched = False
        if not untouched and content(path) != was:
            changed.append(path)
    return changed


def check_out(
    repo: str, changed: Sequence[str], tracked: Mapping[str, Tracked], env: Mapping[str, str]
) -> None:
    """Bring tracked files back, from objects and by an index that are what they were.

    Raises:
        GitError: Not all of them came back.
    """
    own = os.path.join(repo, ".git", "")
    wanted = [path for path in changed if not path.startswith(own)]
    if not wanted:
        return
    for path in wanted:
        quietly(os.unlink, path)
    names = b"\0".join(os.fsencode(os.path.relpath(path, repo)) for path in wanted)
    _git(repo, env, "checkout-index", "--force", "-z", "--stdin", given=names)
    for path in wanted:  # git knows one bit of the mode, and no owner
        if not os.path.islink(path):
            reshape(path, tracked[path].shape)


def _git(repo: str, env: Mapping[str, str], *words: str, given: bytes = b"") -> bytes:
    apart = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent"}
    try:
        ended = subprocess.run(
            [*_GIT, *words], cwd=repo, env={**env, **apart}, input=given, capture_output=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise GitError(f"git does not work in {repo}: {problem}") from problem
    if ended.returncode != 0:
        said = ended.stderr.decode("utf-8", "replace").strip()
        raise GitError(f"git {words[0]} in {repo} ended with {ended.returncode}: {said}")
    return ended.stdout
