"""`agent-flow run`: every task of a configuration, to its end."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from rich.console import Console

from agent_flow.clock import Clock
from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_OK, Commands, close_stdout
from agent_flow.config import ConfigFile, load_config
from agent_flow.errors import ProviderError
from agent_flow.events import pasteable
from agent_flow.progress import (
    JsonLines,
    LiveTable,
    PlainLines,
    Progress,
    Unbroken,
    WarningLog,
    pipe_console,
    print_ending,
)

if TYPE_CHECKING:
    from agent_flow.run import RunResult


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("run", help="run every task of a configuration file", parents=[debug])
    parser.add_argument("config", type=Path, help="a run.toml")
    parser.add_argument(
        "--trainer",
        metavar="ADDRESS",
        help="send samples to this running receiver, such as tcp://127.0.0.1:5555",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    _require_bridge()
    file = load_config(options.config)
    if options.trainer:
        file = _with_trainer(file, options.trainer)
    console = pipe_console()
    progress = _progress(console, as_json=options.json)
    progress = Unbroken(progress)
    warnings = WarningLog(progress)
    logging.getLogger().addHandler(warnings)
    try:
        result = anyio.run(_run_async, file, progress)
    finally:
        logging.getLogger().removeHandler(warnings)
        progress.close()
    if progress.broken:
        close_stdout()
    if options.json:
        JsonLines().line(result.summary)
        if result.problem:
            sys.stderr.write(f"agent-flow: {result.problem}\n")
    else:
        print_ending(
            console,
            result.rows,
            result.summary,
            law=result.ledger.line(),
            folder="none: interrupted before the first rollout"
            if result.folder is None
            else _short(result.folder),
            problem=result.problem,
        )
        _print_next_steps(console, result)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if result.complete else EXIT_INCOMPLETE


def _require_bridge() -> None:
    if importlib.util.find_spec("trainer_bridge") is None:
        raise ProviderError(
            "a run delivers its samples through the package trainer-bridge, which is not installed",
            fix="pip install 'agent-flow[bridge]'",
        )


async def _run_async(file: ConfigFile, progress: Progress) -> RunResult:
    from agent_flow.run import run  # loads trainer_bridge and tokenizers, which other commands do without

    return await run(file, clock=Clock(), listener=progress.event)


def _with_trainer(file: ConfigFile, address: str) -> ConfigFile:
    trainer = msgspec.structs.replace(file.run.trainer, address=address)
    return msgspec.structs.replace(file, run=msgspec.structs.replace(file.run, trainer=trainer))


def _progress(console: Console, *, as_json: bool) -> Progress:
    if as_json:
        return JsonLines()
    return LiveTable(console) if console.is_terminal else PlainLines(console)


def _print_next_steps(console: Console, result: RunResult) -> None:
    if result.folder is None:
        return
    steps = [("every rollout, token by token", _short(result.folder / "index.html"))]
    if result.summary.samples:
        steps.append(
            ("check the samples that were sent", pasteable(f"trainer-bridge audit {_short(result.folder)}"))
        )
    if result.ledger.dropped:
        steps.append(("why rollouts were dropped", _short(result.folder / "journal" / "worker-0.jsonl")))
    steps.append(("what each exit status means", pasteable("agent-flow outcomes")))
    text = "\n".join(f"  {what}:\n    {command}" for what, command in steps)
    console.print(f"what to try next:\n{text}", markup=False, highlight=False, soft_wrap=True)


def _short(path: Path) -> str:
    """Relative to where the command was started, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
