"""The run's temporary folder: gone at the end, and swept by a later run if this one was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "af-"
_LONGEST_PARENT = 50
"""Bytes. A unix socket's path may have 104, and a sandbox's own part of it takes the rest."""


@contextmanager
def scratch_folder() -> Generator[Path]:
    """A new folder that no other run touches while this process lives."""
    parent = _parent()
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        lock = os.open(Path(name) / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(lock)


def _parent() -> Path:
    """The temporary folder, or `/tmp` where its path leaves no room for the sandboxes' unix sockets."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST_PARENT else "/tmp")


def _sweep(parent: Path) -> None:
    """Remove what killed runs left: our folders whose lock nobody holds and whose sandboxes have ended."""
    for lock in parent.glob(f"{_PREFIX}*/lock"):
        folder = lock.parent
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just swept by another run
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a live run's
            continue
        else:
            if not any(
                folder.glob("s/sandboxes/*")
            ):  # a sandbox outlives a killed run until its lease is over
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
