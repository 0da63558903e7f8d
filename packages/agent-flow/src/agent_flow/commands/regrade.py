"""`agent-flow regrade`: the stored patches of a run, graded again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from agent_flow.clock import Clock
from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_OK, Commands
from agent_flow.config import ConfigFile, load_filled_config
from agent_flow.progress import JsonLines, pipe_console

if TYPE_CHECKING:
    from agent_flow.regrade import Regraded


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "regrade", help="grade the stored patches of a run again; changes nothing in it", parents=[debug]
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--config", type=Path, metavar="FILE", help="grade with this one, not the run's own")
    parser.add_argument(
        "--task", action="append", default=[], metavar="ID", help="this task only; may be given several times"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per rollout")
    parser.set_defaults(command=_regrade)


def _regrade(options: argparse.Namespace) -> int:
    from agent_flow.regrade import require_run  # loads tokenizers, which other commands do without

    run: Path = options.run
    require_run(run)  # first: without a run there is no run.toml either
    file = load_filled_config(options.config or run / "run.toml")
    console = pipe_console()
    lines = JsonLines()

    def tell(row: Regraded) -> None:
        if options.json:
            lines.line(row)
            return
        mark = "CHANGED" if row.changed else row.state
        rewards = f"{_reward(row.old)} -> {_reward(row.new)}"
        text = f"{mark:9} {row.task_id} {row.rollout_id[:12]}  {rewards}" + (
            f"  {row.why}" if row.why else ""
        )
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    rows, path = anyio.run(_run, run, file, options.task, tell)
    states = [row.state for row in rows]
    counts = {state: states.count(state) for state in ("graded", "ungraded", "error", "skipped")}
    changed = sum(row.changed for row in rows)
    if options.json:
        lines.line({**counts, "changed": changed, "out": str(path)})
    else:
        said = ", ".join(f"{count} {state}" for state, count in counts.items())
        console.print(f"{said}; {changed} changed; written to {path}", markup=False, soft_wrap=True)
    return EXIT_INCOMPLETE if counts["error"] else EXIT_OK


async def _run(
    run: Path, file: ConfigFile, tasks: list[str], tell: Callable[[Regraded], None]
) -> tuple[tuple[Regraded, ...], Path]:
    from agent_flow.regrade import regrade  # loads tokenizers, which other commands do without

    return await regrade(run, file, tasks=tasks, clock=Clock(), listener=tell)


def _reward(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
