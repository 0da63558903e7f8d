"""The `agent-flow` command."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from rich.console import Console
from rich.table import Table

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile, load_config
from agent_flow.errors import AgentFlowError, ProviderError, UsageError
from agent_flow.events import pasteable
from agent_flow.outcome import OUTCOMES
from agent_flow.progress import (
    JsonLines,
    LiveTable,
    PipeConsole,
    PlainLines,
    Progress,
    Unbroken,
    WarningLog,
    print_ending,
)

if TYPE_CHECKING:
    from agent_flow.run import RunResult

EXIT_OK, EXIT_INCOMPLETE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: every rollout was delivered and the trainer has it. 1: not all were. 2: what was given cannot work.
    130: interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        sys.stderr.write("agent-flow: interrupted\n")
        return EXIT_INTERRUPTED
    except AgentFlowError as error:
        if options.debug:
            raise
        sys.stderr.write(f"agent-flow: {error}\n")
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_INCOMPLETE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent-flow", description="From tasks to token-exact training samples in any trainer."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run_parser = commands.add_parser("run", help="run every task of a configuration file")
    run_parser.add_argument("config", type=Path, help="a run.toml")
    run_parser.add_argument(
        "--trainer",
        metavar="ADDRESS",
        help="send samples to this running receiver, such as tcp://127.0.0.1:5555",
    )
    run_parser.add_argument("--json", action="store_true", help="print one JSON object per event")
    run_parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    run_parser.set_defaults(command=_run)
    table = commands.add_parser("outcomes", help="print what each exit status means for reward and training")
    table.set_defaults(command=_outcomes, debug=False)
    return parser


def _run(options: argparse.Namespace) -> int:
    _require_bridge()
    file = load_config(options.config)
    if options.trainer:
        file = _with_trainer(file, options.trainer)
    console = _console()
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
        # Nobody reads stdout any more; let neither the summary nor the interpreter's last flush fail over it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def _console() -> PipeConsole:
    """Tables in a pipe or a file keep their columns, whatever the terminal's width."""
    return PipeConsole(highlight=False, width=None if sys.stdout.isatty() else 140)


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


def _outcomes(_: argparse.Namespace) -> int:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("exit status", "grade", "reward", "in loss", "in baseline", "status", "why"):
        table.add_column(name, no_wrap=name == "exit status")
    for row in OUTCOMES:
        reward = "the grader's" if row.evaluate else ("none" if row.reward is None else f"{row.reward:g}")
        flags = [("yes" if flag else "no") for flag in (row.evaluate, row.in_loss, row.in_baseline)]
        table.add_row(row.exit_status, flags[0], reward, flags[1], flags[2], row.status, row.why)
    _console().print(table)
    return EXIT_OK
