"""A launcher tree that uses this machine's own Python: made in a moment, for pods of the fake cluster."""

import shlex
import shutil
import sys
from pathlib import Path

from sandbox_k8s.launcher.install import content_hash
from sandbox_k8s.local import LAUNCHER, PYTHON_PREFIX, base_python
from sandbox_k8s.tools import layout

_WORDS_OF_THE_LOADER = 4
_MODE = 0o755


def host_tree(folder: Path) -> Path:
    """Make such a tree in a new folder.

    In the place of the loader stands a script that drops the loader's words and runs this machine's Python,
    which must be visible at its own path (`python_mount`).

    Returns:
        The folder.
    """
    for path in (layout.LOADER, layout.INTERPRETER):
        script = folder / path
        script.parent.mkdir(parents=True, exist_ok=True)
        python = shlex.quote(str(base_python()))
        script.write_text(f'#!/bin/sh\nshift {_WORDS_OF_THE_LOADER}\nexec {python} "$@"\n')
        script.chmod(_MODE)
    shutil.copytree(LAUNCHER, folder / layout.LAUNCHER, ignore=shutil.ignore_patterns("__pycache__"))
    record = layout.ToolsRecord(
        architecture=layout.this_architecture(),
        python=".".join(str(part) for part in sys.version_info[:3]),
        libc="this machine's",
        release="testing",
        content=content_hash(folder),
        size=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )
    layout.write_record(folder, record)
    return folder


def python_mount() -> tuple[Path, str, bool]:
    """How a container sees the Python that such a tree runs."""
    return PYTHON_PREFIX.resolve(), str(PYTHON_PREFIX), False
