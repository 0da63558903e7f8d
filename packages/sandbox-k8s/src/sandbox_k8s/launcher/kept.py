"""Single files: remembered by their content, compared, put back.

A file to which anything was done since is never looked through and believed: a new one takes its place.
"""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH101, PTH105, PTH112, PTH114, PTH115, PTH118

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from . import survey

_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Tracked:
    """A file or link that can be brought back.

    Attributes:
        kind: Its type and mode; 0 for what is neither a file nor a link.
        shape: Mode, owner and group.
        content: A digest, or the link's target.
        mtime_ns: Git's index and ``make`` go by it.
        marks: See `survey.marks_of`.
        seen: Change time and inode when it was looked at: while they are the same, so is all else.
    """

    kind: int
    shape: tuple[int, int, int]
    content: bytes
    mtime_ns: int
    marks: survey.Marks
    seen: tuple[int, int]

    def is_like(self, other: "Tracked") -> bool:
        """Whether nothing but `seen` differs."""
        return replace(other, seen=self.seen) == self


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that is brought back by its bytes."""

    data: bytes
    file: Tracked


NOTHING = Tracked(0, (0, 0, 0), b"", 0, (0, ()), (0, 0))


def keep(folder: str, names: Sequence[str]) -> dict[str, Kept]:
    """Remember files of a folder; those that cannot be read, or have other names, are left out."""
    kept: dict[str, Kept] = {}
    for name in names:
        path = os.path.join(folder, name)
        try:
            data = Path(path).read_bytes()
        except PermissionError:
            continue  # whoever cannot read it is compared by its times
        file = content(path)
        if stat.S_ISREG(file.kind) and file.content == sha256(data).digest():
            kept[path] = Kept(data, file)
    return kept


def untouched(path: str, was: Tracked) -> bool:
    """Whether nothing at all was done to a file."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    # A file that was moved here with its folder has its old change time, and another inode.
    return (found.st_ctime_ns, found.st_ino) == was.seen


def put_back(path: str, one: Kept) -> Kept:
    """Make a file what it was, if that can be done; what is remembered of it from now on."""
    if untouched(path, one.file):
        return one
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        quietly(os.unlink, path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(one.data)
    except OSError:
        return one  # the comparison says so
    return replace(one, file=dress(path, one.file))


def write_anew(path: str, was: Tracked) -> Tracked:
    """Put a new file with the same bytes in the place of one; what is remembered of it from now on."""
    aside = f"{path}.sandbox-k8s"
    try:
        with open(path, "rb", opener=_without_links) as source, Path(aside).open("xb") as target:
            shutil.copyfileobj(source, target, _READ)
        os.replace(aside, path)
    except OSError:
        quietly(os.unlink, aside)
        return was  # the comparison says so
    return dress(path, was)


def dress(path: str, was: Tracked) -> Tracked:
    """Give a new file what the old one had beside its content; ``was`` itself if it is not the same then."""
    if not stat.S_ISLNK(was.kind):
        reshape(path, was.shape)
    for name, value in was.marks[1]:  # a new owner takes capabilities away
        quietly(partial(os.setxattr, attribute=name, value=value, follow_symlinks=False), path)
    quietly(partial(os.utime, ns=(was.mtime_ns, was.mtime_ns), follow_symlinks=False), path)
    now = content(path)
    return now if was.is_like(now) else was


def content(path: str) -> Tracked:
    """A file as it is; one that is missing or has other names is of kind 0."""
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            return _tracked(found, os.fsencode(os.readlink(path)), (0, ()))
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return NOTHING
        whole = sha256()
        with open(path, "rb", opener=_without_links) as file:
            before = os.fstat(file.fileno())
            while data := file.read(_READ):
                whole.update(data)
            return _tracked(before, whole.digest(), survey.marks_of(file.fileno()))
    except OSError:
        return NOTHING


def _tracked(found: os.stat_result, data: bytes, marks: survey.Marks) -> Tracked:
    seen = (found.st_ctime_ns, found.st_ino)
    return Tracked(found.st_mode, survey.shape_of(found), data, found.st_mtime_ns, marks, seen)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def reshape(path: str, shape: tuple[int, int, int]) -> None:
    """Give back mode, owner and group, if that can be done."""
    try:
        if survey.shape_of(os.lstat(path)) == shape:
            return
        if os.geteuid() == 0:
            os.chown(path, shape[1], shape[2], follow_symlinks=False)
        os.chmod(path, shape[0])
    except OSError:
        return  # the comparison says so


def quietly(work: Callable[[str], object], path: str) -> None:
    """Do something to a path, if that can be done; a comparison follows."""
    try:
        work(path)
    except OSError:
        return  # the comparison says so
