"""Trees as tar streams in constant memory: modes, links and empty folders kept, nothing written outside.

Packing runs on either side; unpacking treats its input as hostile, since a sandbox can send anything.
"""

import errno
import io
import os
import select
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

CHUNK = 1 << 20
ROOT_NAME = "root"
_BLOCK = tarfile.BLOCKSIZE
_LOOK_EVERY_S = 0.2


def always() -> None:
    """For work that nobody cuts off."""


class ArchiveError(Exception):
    """An archive holds something that will not be written: a name outside, a device, a broken link."""


def pack(source: Path) -> Iterator[bytes]:
    """Stream one file, link or folder as a tar archive whose top entry is named ``root``.

    Owners are not sent: they mean nothing on the other side. Sockets, pipes and devices are left out.

    Raises:
        OSError: Something could not be read, or a file shrank while it was read.
    """
    # TarFile only describes the entries (and remembers inodes, for hard links): its own writing of a file
    # cannot be interrupted to hand on a chunk.
    with tarfile.open(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT) as describer:
        for path, name in _walk(source):
            info = describer.gettarinfo(str(path), arcname=name)
            if not (info.isfile() or info.isdir() or info.issym() or info.islnk()):
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isfile():
                yield from _content(path, info.size)
    yield bytes(2 * _BLOCK)


def _walk(source: Path) -> Iterator[tuple[Path, str]]:
    yield source, ROOT_NAME
    if source.is_symlink() or not source.is_dir():
        return
    for folder, folders, files in os.walk(source, onerror=_raise):
        folders.sort()
        for entry in sorted([*folders, *files]):
            path = Path(folder) / entry
            # gettarinfo names hard links after the first entry's name, so names are given in full.
            yield path, str(PurePosixPath(ROOT_NAME) / path.relative_to(source).as_posix())


def _raise(problem: OSError) -> None:
    raise problem


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with open_to_read(path) as file:
        while left:
            data = file.read(min(CHUNK, left))
            if not data:
                raise OSError(f"{path} shrank while it was read ({left} of {size} bytes are missing)")
            left -= len(data)
            yield data
    if size % _BLOCK:
        yield bytes(_BLOCK - size % _BLOCK)


@contextmanager
def open_to_read(path: Path) -> Generator[IO[bytes]]:
    """Open a file without waiting for anybody: a named pipe has no bytes of its own, and is refused.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb", opener=_at_once) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.ESPIPE, "is a pipe; read it with a command", str(path))
        yield file


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def unpack(stream: IO[bytes], target: Path, go_on: Callable[[], object] = always) -> None:
    """Write an archive of `pack` to ``target``: aside first, then moved into place.

    A file or link replaces what is there; a folder is merged into a folder, as ``cp -a`` would do.
    ``go_on`` is called before each entry and before the move; when it raises, nothing has been moved.

    Raises:
        ArchiveError: An entry points outside, goes through a link, or is neither file, folder nor link.
        OSError: Something could not be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # A folder that is there may be a mount point, or its parent read-only: only inside is surely a place to
    # write, and to rename from.
    base = target if _is_folder(target) else target.parent
    aside = base / f".incoming-{os.getpid()}-{id(stream):x}"
    aside.mkdir(mode=0o700)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            _extract(archive, aside, go_on)
        root = aside / ROOT_NAME
        if not os.path.lexists(root):
            raise ArchiveError("the archive is empty")
        go_on()
        _place(root, target)
    except tarfile.TarError as problem:
        raise ArchiveError(f"not a tar archive: {problem}") from problem
    finally:
        remove_tree(aside)


def _extract(archive: tarfile.TarFile, base: Path, go_on: Callable[[], object]) -> None:
    folders: list[tuple[Path, int]] = []
    for info in archive:
        go_on()
        path = _inside(base, info.name)
        if info.isdir():
            path.mkdir(mode=0o700, exist_ok=True)
            folders.append((path, info.mode & 0o7777))
        elif info.issym():
            path.symlink_to(info.linkname)
        elif info.islnk():
            original = _inside(base, info.linkname)
            if not stat.S_ISREG(original.lstat().st_mode):
                raise ArchiveError(f"{info.name!r} is a hard link to something that is not a file")
            os.link(original, path, follow_symlinks=False)
        elif info.isreg():
            _write_file(archive, info, path)
        else:
            raise ArchiveError(f"{info.name!r} is neither a file, a folder nor a link")
    # Last, and innermost first: a folder without write permission could not be filled.
    for path, mode in reversed(folders):
        path.chmod(mode)


def _inside(base: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or parts[0] != ROOT_NAME:
        raise ArchiveError(f"{name!r} lies outside the archive")
    path = base
    for part in parts[:-1]:
        path = path / part
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise ArchiveError(f"{name!r} goes through a link or a file")
    return path / parts[-1]


def _write_file(archive: tarfile.TarFile, info: tarfile.TarInfo, path: Path) -> None:
    content = archive.extractfile(info)
    if content is None:
        raise ArchiveError(f"{info.name!r} has no content")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        shutil.copyfileobj(content, file, CHUNK)
    path.chmod(info.mode & 0o7777)
    os.utime(path, (info.mtime, info.mtime))


def _place(source: Path, target: Path) -> None:
    source_is_folder = stat.S_ISDIR(source.lstat().st_mode)
    if not (source_is_folder and _is_folder(target)):
        source.rename(target)
        return
    mode = stat.S_IMODE(source.stat().st_mode)
    source.chmod(0o700)
    for entry in list(source.iterdir()):
        _place(entry, target / entry.name)
    target.chmod(mode)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def remove_tree(path: Path) -> None:
    """Remove a folder whatever the modes inside it are.

    Raises:
        OSError: Something could not be removed all the same.
    """
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)  # or the walk ends before it begins
    for folder, folders, _ in os.walk(path):
        for name in [".", *folders]:
            entry = Path(folder) / name
            if not entry.is_symlink():
                with suppress(FileNotFoundError):
                    entry.chmod(0o700)
    shutil.rmtree(path)


def write_atomically(
    target: Path, chunks: Iterable[bytes], mode: int | None, go_on: Callable[[], object] = always
) -> None:
    """Write a whole file: aside, then renamed, so that nobody reads half of it.

    Args:
        target: Where; its folders are made.
        chunks: The content.
        mode: Permission bits; None keeps those of an existing file, else 0644 less the umask.
        go_on: Called again and again; when it raises, the file is as it was.

    Raises:
        OSError: The folder is missing or not writable.
    """
    target = target.resolve()  # a link keeps pointing at its file
    if target.exists() and not target.is_file():
        if target.is_dir():
            raise IsADirectoryError(21, "is a folder", str(target))
        _write_into(target, chunks, go_on)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name[:64]}.incoming-{os.getpid()}-{id(chunks):x}"
    permissions = mode if mode is not None else (target.stat().st_mode & 0o7777 if target.exists() else None)
    try:
        with aside.open("xb") as sink:
            for chunk in chunks:
                go_on()
                sink.write(chunk)
        go_on()
        if permissions is not None:
            aside.chmod(permissions)
        aside.rename(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _write_into(target: Path, chunks: Iterable[bytes], go_on: Callable[[], object]) -> None:
    """Write to what cannot be replaced by renaming: a device, or a pipe, whose reader may never read."""
    descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
    try:
        for chunk in chunks:
            left = memoryview(chunk)
            while left:
                go_on()
                if select.select([], [descriptor], [], _LOOK_EVERY_S)[1]:
                    left = left[os.write(descriptor, left[:_BLOCK]) :]
    finally:
        os.close(descriptor)


def unpack_checked(chunks: Iterator[bytes], target: Path, go_on: Callable[[], object] = always) -> None:
    """Unpack a stream only after all of it came and proved whole: it is kept on disk until then.

    Raises:
        ArchiveError, OSError: As `unpack`.
    """
    with tempfile.TemporaryFile() as spool:
        for chunk in chunks:
            go_on()
            spool.write(chunk)
        spool.seek(0)
        unpack(spool, target, go_on)


def open_spool() -> IO[bytes]:
    """An unnamed file on disk to keep a stream in until it proved whole."""
    return tempfile.TemporaryFile()
