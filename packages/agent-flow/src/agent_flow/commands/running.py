"""What `run`, `run --replay` and `eval` share: to carry a run out while its progress is shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console

from agent_flow.clock import Clock
from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_OK, close_stdout
from agent_flow.config import ConfigFile
from agent_flow.progress import JsonLines, LiveTable, PlainLines, Progress, Unbroken, WarningLog
from agent_flow.rollout import Mode

if TYPE_CHECKING:
    from agent_flow.replay_run import Replay
    from agent_flow.run import RunResult


def carry_out(
    console: Console,
    file: ConfigFile,
    *,
    as_json: bool,
    mode: Mode = "train",
    dump: bool = False,
    replay: Replay | None = None,
) -> RunResult:
    """Run a configuration; see `agent_flow.run.run`."""
    progress = Unbroken(_progress(console, as_json=as_json))
    warnings = WarningLog(progress)
    logging.getLogger().addHandler(warnings)

    async def run() -> RunResult:
        from agent_flow.run import run  # loads tokenizers, which other commands do without

        return await run(file, clock=Clock(), listener=progress.event, mode=mode, dump=dump, replay=replay)

    try:
        result = anyio.run(run)
    finally:
        logging.getLogger().removeHandler(warnings)
        progress.close()
    if progress.broken:
        close_stdout()
    return result


def exit_code(result: RunResult) -> int:
    """0 where every rollout came to its end and is where it belongs."""
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if result.complete else EXIT_INCOMPLETE


def short(path: Path) -> str:
    """Relative to where the command was started, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _progress(console: Console, *, as_json: bool) -> Progress:
    if as_json:
        return JsonLines()
    return LiveTable(console) if console.is_terminal else PlainLines(console)
