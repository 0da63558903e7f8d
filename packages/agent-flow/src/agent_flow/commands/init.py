"""`agent-flow init`: a commented run.toml."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent_flow.commands.ending import EXIT_OK, Commands
from agent_flow.config import load_config
from agent_flow.errors import ConfigError
from agent_flow.events import pasteable
from agent_flow.providers import BUILTIN_PROVIDERS, Kind
from agent_flow.starter import starter

_NAME = "run.toml"
_USUAL: dict[Kind, tuple[str, ...]] = {
    "engine": ("sglang", "replay"),
    "flow": ("swe",),
    "agent": ("minisweagent",),
    "environment": ("local",),
    "runtime": ("command",),
}
"""What is written without an option: the first of these that this version has."""


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("init", help="write a commented run.toml", parents=[debug])
    parser.description = "Writes FOLDER/run.toml with every key, its meaning and its default."
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="made if needed (default: here)")
    for kind, usual in _USUAL.items():
        known = ", ".join(sorted(BUILTIN_PROVIDERS[kind]))
        parser.add_argument(
            f"--{kind}",
            metavar="PROVIDER",
            default=next(name for name in usual if name in BUILTIN_PROVIDERS[kind]),
            help=f"{known}, or module:Class (default: %(default)s)",
        )
    parser.set_defaults(command=_init)


def _init(options: argparse.Namespace) -> int:
    chosen: dict[Kind, str] = {kind: str(vars(options)[kind]) for kind in _USUAL}
    text = starter(chosen, name=_NAME)
    path = Path(options.folder) / _NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"no such folder can be made: {error.strerror}", where=str(path.parent)) from error
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(
            "there is something of that name already, and it is left as it is",
            where=str(path),
            fix="another folder: agent-flow init FOLDER",
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path)) from error
    load_config(path)
    check, start = pasteable(f"agent-flow doctor {path}"), pasteable(f"agent-flow run {path}")
    sys.stdout.write(
        f"wrote {path}\nwhat to do next:\n"
        f"  fill in what is marked FILL IN, then look at every part:\n    {check}\n  run it:\n    {start}\n"
    )
    return EXIT_OK
