"""Where built files are kept between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/token-tracking`, or `~/.cache/token-tracking`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "token-tracking"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
