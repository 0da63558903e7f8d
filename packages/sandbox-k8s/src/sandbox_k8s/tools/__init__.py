"""The tree that runs the launcher in any image: a Python with its own loader and libraries, and the launcher.

A tree is for one processor architecture. It needs nothing of the image: no Python, no C library, no shell.
`build` makes one from the Python that runs it, `write_archive` packs one as an OCI image, and `pod` has the
words that a pod's specification needs.
"""

from .build import build
from .image import ImageArchive, check_archive, write_archive
from .layout import ToolsRecord, read_record
from .pod import (
    CONTAINER_REQUIREMENTS,
    container_environment,
    install_command,
    launcher_command,
    node_requirements,
    pip_install_command,
)

__all__ = [
    "CONTAINER_REQUIREMENTS",
    "ImageArchive",
    "ToolsRecord",
    "build",
    "check_archive",
    "container_environment",
    "install_command",
    "launcher_command",
    "node_requirements",
    "pip_install_command",
    "read_record",
    "write_archive",
]
