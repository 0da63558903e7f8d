"""``sandbox-k8s build-tools``: make what pods run the launcher from."""

import argparse
from pathlib import Path
from typing import Any

from sandbox_k8s.errors import ConfigError

from .text import say


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser("build-tools", help="make the tree that runs the launcher in any image")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="missing or empty")
    command.add_argument("--archive", type=Path, metavar="FILE.tar", help="its OCI image archive as well")
    command.add_argument("--name", metavar="REPOSITORY:TAG", help="what the archive's image is called")
    command.set_defaults(action=_build_tools)


def _build_tools(options: argparse.Namespace) -> int:
    from sandbox_k8s import tools

    if options.archive is not None:
        tools.check_archive(options.archive, options.name)  # before the work, not after it
    elif options.name is not None:
        raise ConfigError("--name is the name of the archive's image: give --archive FILE.tar, too")
    record = tools.build(options.out)
    say("tree", f"{options.out}, {record.size / 1e6:.1f} MB")
    say("runs on", f"{record.os}/{record.architecture}")
    say("python", f"{record.python}, {record.libc}")
    say("content", record.content)
    if options.archive is not None:
        archive = tools.write_archive(options.out, options.archive, name=options.name)
        say("image", f"{archive.name} in {archive.path}, {archive.size / 1e6:.1f} MB")
        say("digest", archive.digest)
    return 0
