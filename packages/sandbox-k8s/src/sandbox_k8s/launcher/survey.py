"""What can be changed in a sandbox: which folders there are, and what is in them.

A file's change time is the proof: whatever a command does to a file, its content, mode, owner, links or
attributes, sets it to now, and no command can set it back. It is compared for being the same, not for being
early: clocks are set back.
"""

# A path object for each file of a whole root folder would cost more than the look at it.
# ruff: noqa: PTH112, PTH115, PTH118, PTH208

import errno
import fcntl
import os
import re
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

_OF_THE_KERNEL = frozenset(
    {
        *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "debugfs", "tracefs", "bpf", "nsfs"),
        *("binfmt_misc", "configfs", "efivarfs"),
    }
)
_QUEUES = "mqueue"
_HAS_QUEUES = Path("/proc/sys/fs/mqueue")
# FS_IOC_GETFLAGS and the flags that a caller can set: others, as for an index, are the file system's own.
_GET_FLAGS = 0x8008_6601 if struct.calcsize("l") == 8 else 0x8004_6601
_SETTABLE = 0x6283_80FF
_NO_SUCH_THING = frozenset({errno.ENOTTY, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
_MOUNTS = Path("/proc/self/mountinfo")
_IPC = Path("/proc/sysvipc")


Marks = tuple[int, tuple[tuple[str, bytes], ...]]
"""Inode flags, and extended attributes by name."""


@dataclass(frozen=True)
class Folder:
    """A folder and what is in it.

    Attributes:
        shape: Its own mode, owner and group.
        times: Its own change and modification time.
        marks: See `marks_of`.
        files: Each file (or link, pipe, socket, device) with its stat.
        folders: Names of the folders.
    """

    path: str
    shape: tuple[int, int, int]
    times: tuple[int, int]
    marks: Marks
    files: Sequence[tuple[str, os.stat_result]]
    folders: Sequence[str]

    def digest(self, instant_ns: int, apart: "frozenset[str] | set[str]") -> bytes:
        """What it holds, leaving out what was changed after that instant, and the paths of ``apart``."""
        whole = sha256(repr((self.shape, self.marks)).encode())
        for name, found in self.files:
            path = os.path.join(self.path, name)
            if found.st_ctime_ns > instant_ns or path in apart:
                continue
            whole.update(repr((name, _facts(found))).encode())
            if stat.S_ISLNK(found.st_mode):
                whole.update(os.fsencode(os.readlink(path)))
        for name in self.folders:
            whole.update(repr(name).encode())
        return whole.digest()[:16]


def roots() -> list[str]:
    """Mount points of folders that can be written to."""
    mounts = [one for one in _mounts() if one.kind not in _OF_THE_KERNEL]
    # A queue is made by a system call, however its folder is mounted.
    found = {one.path for one in mounts if one.writable or one.kind == _QUEUES}
    return sorted(path for path in found if os.path.isdir(path))


def mount_points() -> list[str]:
    """Where something is mounted."""
    return [one.path for one in _mounts()]


def queues_are_hidden() -> bool:
    """Whether there may be POSIX message queues and no folder that shows them."""
    return _HAS_QUEUES.exists() and not any(one.kind == _QUEUES for one in _mounts())


def queues() -> list[str]:
    """Paths of all POSIX message queues: their times are in whole seconds and prove nothing."""
    folders = [one.path for one in _mounts() if one.kind == _QUEUES]
    return [os.path.join(folder, name) for folder in folders for name in sorted(os.listdir(folder))]


class Closed(NamedTuple):
    """A folder that this user cannot look into."""

    path: str
    why: str

    @property
    def writable(self) -> bool:
        """Whether something can be put into it all the same."""
        return os.access(self.path, os.W_OK | os.X_OK)


def walk(tops: Sequence[str]) -> Iterator[Folder | Closed]:
    """Each folder, parents first, and those that cannot be looked into.

    Mounts below are not entered. What the caller removes from a folder is not looked at afterwards.
    """
    edges = set(mount_points())
    for top in tops:
        waiting = [top]
        while waiting:
            path = waiting.pop()
            try:
                folder = _look(path)
            except OSError as problem:
                yield Closed(path, problem.strerror or "")
                continue
            yield folder
            below = (os.path.join(path, name) for name in folder.folders)
            waiting += [one for one in below if one not in edges]


class _Mount(NamedTuple):
    path: str
    writable: bool
    kind: str


def _mounts() -> list[_Mount]:
    found: list[_Mount] = []
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        words, _, rest = line.partition(" - ")
        path, options = words.split(" ")[4:6]
        kind, _, more = rest.split(" ", 2)
        path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
        writable = "rw" in options.split(",") and "rw" in more.rpartition(" ")[2].split(",")
        found.append(_Mount(path, writable, kind))
    return found


def left_in_memory() -> list[str]:
    """System V shared memory, queues and semaphores: they outlive their processes."""
    left: list[str] = []
    for kind in ("shm", "msg", "sem"):
        try:
            lines = (_IPC / kind).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without them
        left += [f"System V {kind} {line.split()[1]}" for line in lines]
    return left


def _look(path: str) -> Folder:
    files: list[tuple[str, os.stat_result]] = []
    folders: list[str] = []
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        own, marks = os.fstat(folder), marks_of(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    files.append((entry.name, entry.stat(follow_symlinks=False)))
    finally:
        os.close(folder)
    files.sort(key=lambda one: one[0])
    return Folder(path, shape_of(own), (own.st_ctime_ns, own.st_mtime_ns), marks, files, sorted(folders))


def shape_of(found: os.stat_result) -> tuple[int, int, int]:
    """Mode, owner and group."""
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def _facts(found: os.stat_result) -> tuple[int, ...]:
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_ino, found.st_rdev, *times)


def marks_of(descriptor: int) -> Marks:
    """What else is set on an open file or folder: extended attributes, access lists, capabilities, flags."""
    flags = bytearray(8)
    attributes: tuple[tuple[str, bytes], ...] = ()
    try:
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
    except OSError as problem:
        if problem.errno not in _NO_SUCH_THING:
            raise
    try:
        names = sorted(os.listxattr(descriptor))
        attributes = tuple((name, os.getxattr(descriptor, name)) for name in names)
    except OSError as problem:
        if problem.errno not in _NO_SUCH_THING:
            raise
    return int.from_bytes(flags[:4], sys.byteorder) & _SETTABLE, attributes
