"""Single files: remembered by their content, compared, put back."""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH101, PTH112, PTH114, PTH115, PTH118

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from . import survey


@dataclass(frozen=True)
class Kept:
    """A file that is brought back by its content."""

    data: bytes
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Tracked:
    """A file or link of a repository.

    Attributes:
        kind: Its type and mode; 0 for what is neither a file nor a link.
        content: A digest, or the link's target.
        inode: Of this very file; another one may have the same content.
    """

    kind: int
    shape: tuple[int, int, int]
    content: bytes
    inode: int = field(default=0, compare=False)


def keep(folder: str, names: Sequence[str]) -> dict[str, Kept]:
    """Remember files of a folder; those that cannot be read, or have other names, are left out."""
    kept: dict[str, Kept] = {}
    for name in names:
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
            if found.st_nlink == 1:
                kept[path] = Kept(Path(path).read_bytes(), survey.shape_of(found))
        except PermissionError:
            continue  # whoever cannot read it is compared by its times
    return kept


def is_kept(path: str, one: Kept) -> bool:
    """Whether a file is as it was."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size != len(one.data):
            return False
        return survey.shape_of(found) == one.shape and Path(path).read_bytes() == one.data
    except OSError:
        return False


def put_back(path: str, one: Kept) -> None:
    """Make a file what it was, if that can be done."""
    if is_kept(path, one):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        quietly(os.unlink, path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(one.data)
    except OSError:
        return  # the comparison says so
    reshape(path, one.shape)


def content(path: str) -> Tracked:
    """A file as it is; one that is missing or has other names is of kind 0."""
    none = Tracked(0, (0, 0, 0), b"")
    try:
        found = os.lstat(path)
        shape = survey.shape_of(found)
        if stat.S_ISLNK(found.st_mode):
            return Tracked(found.st_mode, shape, os.fsencode(os.readlink(path)), found.st_ino)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return none
        whole = sha256()
        with open(path, "rb", opener=_without_links) as file:
            while data := file.read(1 << 20):
                whole.update(data)
    except OSError:
        return none
    return Tracked(found.st_mode, shape, whole.digest(), found.st_ino)


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
