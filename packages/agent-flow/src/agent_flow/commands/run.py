"""`agent-flow run`: every task of a configuration, to its end."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from agent_flow.commands.ending import Commands
from agent_flow.commands.replay import replay_command
from agent_flow.commands.running import carry_out, exit_code, short
from agent_flow.config import ConfigFile, load_filled_config
from agent_flow.errors import ProviderError, UsageError
from agent_flow.events import pasteable
from agent_flow.progress import JsonLines, pipe_console, print_ending

if TYPE_CHECKING:
    from agent_flow.run import RunResult


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("run", help="run every task of a configuration file", parents=[debug])
    parser.add_argument("config", type=Path, nargs="?", help="a run.toml; not with --replay")
    parser.add_argument(
        "--trainer",
        metavar="ADDRESS",
        help="send samples to this running receiver, such as tcp://127.0.0.1:5555",
    )
    parser.add_argument(
        "--dump", action="store_true", help="keep what the engine gave, so that the run can be replayed"
    )
    parser.add_argument(
        "--replay",
        metavar="RUN",
        type=Path,
        help="run a folder made with --dump again, without its engine, and compare; nothing is sent",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if options.replay is not None:
        if options.config is not None or options.trainer or options.dump:
            raise UsageError("--replay takes the configuration of its run and sends nothing", where="run")
        return replay_command(options.replay, as_json=options.json)
    if options.config is None:
        raise UsageError("no configuration", where="run", fix="agent-flow run run.toml")
    _require_bridge()
    file = load_filled_config(options.config)
    if options.trainer:
        file = _with_trainer(file, options.trainer)
    console = pipe_console()
    result = carry_out(console, file, as_json=options.json, dump=options.dump)
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
            else short(result.folder),
            problem=result.problem,
        )
        _print_next_steps(console, result, dump=options.dump)
    return exit_code(result)


def _require_bridge() -> None:
    if importlib.util.find_spec("trainer_bridge") is None:
        raise ProviderError(
            "a run delivers its samples through the package trainer-bridge, which is not installed",
            fix="pip install 'agent-flow[bridge]'",
        )


def _with_trainer(file: ConfigFile, address: str) -> ConfigFile:
    trainer = msgspec.structs.replace(file.run.trainer, address=address)
    return msgspec.structs.replace(file, run=msgspec.structs.replace(file.run, trainer=trainer))


def _print_next_steps(console: Console, result: RunResult, *, dump: bool) -> None:
    if result.folder is None:
        return
    steps = [("every rollout, token by token", short(result.folder / "index.html"))]
    if result.summary.samples:
        steps.append(
            ("check the samples that were sent", pasteable(f"trainer-bridge audit {short(result.folder)}"))
        )
    if dump:
        steps.append(("run it again", pasteable(f"agent-flow run --replay {short(result.folder)}")))
    if result.ledger.dropped:
        steps.append(("why rollouts were dropped", short(result.folder / "journal" / "worker-0.jsonl")))
    steps.append(("what each exit status means", pasteable("agent-flow outcomes")))
    text = "\n".join(f"  {what}:\n    {command}" for what, command in steps)
    console.print(f"what to try next:\n{text}", markup=False, highlight=False, soft_wrap=True)
