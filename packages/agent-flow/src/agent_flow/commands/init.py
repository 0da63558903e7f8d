"""`agent-flow init`: a commented run.toml."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from agent_flow.commands.ending import EXIT_OK, Commands
from agent_flow.config import load_config
from agent_flow.errors import ConfigError, UsageError
from agent_flow.eval_section import evaluation_only
from agent_flow.events import pasteable
from agent_flow.providers import BUILTIN_PROVIDERS, Kind, provider_class
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
_USUAL_PLAIN: tuple[Kind, ...] = ("engine", "flow", "runtime")
"""What a flow of conversations has; its runtime is `plain`, which judges them."""


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("init", help="write a commented run.toml", parents=[debug])
    parser.description = (
        "Writes FOLDER/run.toml with every key, its meaning and its default. The flow plain, and flows that "
        "are made from it, go with the runtime plain, and have neither agent nor environment."
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="made if needed (default: here)")
    for kind in _USUAL:
        known = ", ".join(sorted(BUILTIN_PROVIDERS[kind]))
        parser.add_argument(
            f"--{kind}",
            metavar="PROVIDER",
            help=f"{known}, or module:Class (default: {_usual(kind)})",
        )
    parser.add_argument(
        "--python-path",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="where the modules of module:Class and of reward functions lie; may be given several times",
    )
    parser.set_defaults(command=_init)


def _init(options: argparse.Namespace) -> int:
    path = Path(options.folder) / _NAME
    folders = _folders(options.python_path, path.parent)
    given: dict[Kind, str] = {kind: vars(options)[kind] for kind in _USUAL if vars(options)[kind]}
    text = starter(_chosen(given, tuple(folders.values())), name=_NAME, python_path=folders)
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
    command = "eval" if evaluation_only(load_config(path)) else "run"
    check, start = pasteable(f"agent-flow doctor {path}"), pasteable(f"agent-flow {command} {path}")
    sys.stdout.write(
        f"wrote {path}\nwhat to do next:\n"
        f"  fill in what is marked FILL IN, then look at every part:\n    {check}\n  run it:\n    {start}\n"
    )
    return EXIT_OK


def _usual(kind: Kind) -> str:
    return next(name for name in _USUAL[kind] if name in BUILTIN_PROVIDERS[kind])


def _chosen(given: Mapping[Kind, str], folders: tuple[Path, ...]) -> dict[Kind, str]:
    """What was asked for, and beside it what goes with that."""
    from agent_flow.plain_flow import Judge, PlainFlow  # loads what other commands do without

    flow = given.get("flow") or ("plain" if given.get("runtime") == "plain" else _usual("flow"))
    if not issubclass(provider_class("flow", flow, python_path=folders), PlainFlow):
        if flow == "swe" and given.get("runtime") == "plain":
            raise UsageError("flow 'swe' grades patches, which runtime 'plain' does not", fix="--flow plain")
        return {**{kind: _usual(kind) for kind in _USUAL}, **given, "flow": flow}
    runtime = given.get("runtime", "plain")
    if not issubclass(provider_class("runtime", runtime, python_path=folders), Judge):
        raise UsageError(
            f"flow {flow!r} needs a runtime that judges whole rollouts, and {runtime!r} judges patches",
            fix="--runtime plain",
        )
    return {**{kind: _usual(kind) for kind in _USUAL_PLAIN}, **given, "flow": flow, "runtime": runtime}


def _folders(given: list[Path], home: Path) -> dict[str, Path]:
    """Folders by what the file says of each: it is read from its own folder."""
    for folder in given:
        if not folder.is_dir():
            raise UsageError(f"no such folder: {folder}", where="--python-path")
    return {os.path.relpath(folder.resolve(), home.resolve()): folder.resolve() for folder in given}
