"""Folders as tar files for container programs: modes and links kept, nothing written outside the target."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from agent_flow.errors import EnvError


def pack_tree(source: Path, out: IO[bytes], *, name: str, owner: tuple[int, int]) -> None:
    """Write a file or folder as a tar file whose top entry has a name, everything owned by one user.

    Sockets, pipes and devices are left out.

    Raises:
        OSError: something could not be read.
    """

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (info.isfile() or info.isdir() or info.issym() or info.islnk()):
            return None
        info.uid, info.gid = owner
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname=name, filter=owned)


def unpack_tree(archive: IO[bytes], target: Path) -> None:
    """Write what a sandbox sent to a path: its top entry becomes the target. The content is not trusted.

    Raises:
        EnvError: a name leads outside, or the archive is broken.
    """
    links: list[tuple[Path, str]] = []
    folders: list[tuple[Path, int]] = []
    try:
        with tarfile.open(fileobj=archive, mode="r:") as opened:
            for info in opened:
                path = _place(info.name, target)
                if info.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    folders.append((path, stat.S_IMODE(info.mode)))
                elif info.issym():
                    # Made last, so that nothing is written through a link.
                    links.append((path, info.linkname))
                elif info.islnk():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.link(_place(info.linkname, target), path, follow_symlinks=False)
                elif info.isfile():
                    _write(opened, info, path)
    except tarfile.TarError as error:
        raise EnvError("download", f"not a tar file: {error}", retryable=True) from error
    for path, to in links:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(to)
    for path, mode in reversed(folders):
        path.chmod(mode)


def _write(opened: tarfile.TarFile, info: tarfile.TarInfo, path: Path) -> None:
    content = opened.extractfile(info)
    if content is None:
        raise EnvError("download", f"{info.name!r} has no content")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(stat.S_IMODE(info.mode) & 0o777)


def _place(name: str, target: Path) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise EnvError("download", f"the sandbox sent a name that leads outside: {name!r}", fault="agent")
    return target.joinpath(*parts[1:])
