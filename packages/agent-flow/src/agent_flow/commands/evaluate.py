"""`agent-flow eval`: every task of a configuration, measured; nothing is trained and nothing is sent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_OK, Commands
from agent_flow.commands.running import carry_out, exit_code, short
from agent_flow.config import load_filled_config
from agent_flow.eval_section import check_eval, eval_file
from agent_flow.progress import JsonLines, engine_line, pipe_console

if TYPE_CHECKING:
    from agent_flow.evaluation import EvalSummary


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "eval", help="measure every task: mean reward and pass@k; needs no trainer", parents=[debug]
    )
    parser.description = (
        "Measures every task; nothing is trained or sent. Exit code 0: every rollout that was asked for has "
        "a reward, or failed for the agent's own fault. 1: some were not measured, or were dropped. 2: the "
        "configuration cannot work. 130: interrupted."
    )
    parser.add_argument("config", type=Path, help="a run.toml; its [eval] says what is other than in a run")
    parser.add_argument(
        "--dump", action="store_true", help="keep what the engine gave, so that the run can be replayed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")
    parser.set_defaults(command=_eval)


def _eval(options: argparse.Namespace) -> int:
    from agent_flow.evaluation import summarise

    given = load_filled_config(options.config)
    check_eval(given)
    file = eval_file(given)
    console = pipe_console()
    result = carry_out(console, file, as_json=options.json, mode="eval", dump=options.dump)
    summary = summarise(
        list(result.summary.rewards),
        result.rows,
        rollouts_per_task=file.run.tasks.rollouts_per_task,
        pass_reward=file.run.eval.pass_reward,
        seconds=result.summary.seconds,
        engine=result.summary.engine,
    )
    if result.folder is not None:
        document = {"kind": "agent-flow-eval", "version": 1, **msgspec.structs.asdict(summary)}
        text = msgspec.json.format(msgspec.json.encode(document), indent=1)
        (result.folder / "eval.json").write_bytes(text + b"\n")
    if options.json:
        JsonLines().line(summary)
        if result.problem:
            sys.stderr.write(f"agent-flow: {result.problem}\n")
    else:
        _print(console, summary)
        folder = "none: interrupted before the first rollout"
        shown = folder if result.folder is None else short(result.folder)
        console.print(f"run folder: {shown}", markup=False, highlight=False, soft_wrap=True)
        if result.problem:
            console.print(result.problem, style="red", markup=False, highlight=False, soft_wrap=True)
    code = exit_code(result)
    return EXIT_INCOMPLETE if code == EXIT_OK and summary.missing else code


def _print(console: Console, summary: EvalSummary) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    for name in ("graded", "failed", "passed", "mean reward", "no reward"):
        table.add_column(name, justify="right")
    for score in summary.per_task:
        mean = "-" if score.mean_reward is None else f"{score.mean_reward:.4g}"
        counts = (str(score.graded), str(score.failed or "-"), str(score.passed))
        table.add_row(score.task, *counts, mean, str(score.not_graded or "-"))
    console.print()
    console.print(table)
    mean = "-" if summary.mean_reward is None else f"{summary.mean_reward:.4g}"
    measured = sum(score.mean_reward is not None for score in summary.per_task)
    rollouts = f"{summary.graded} rollouts"
    if summary.failed:
        rollouts += f", {sum(summary.failed.values())} failed"
    lines = [
        "",
        f"mean reward {mean} (graded: {measured} of {summary.tasks} tasks, {rollouts})",
    ]
    for k, tasks in summary.pass_at_tasks.items():
        value = f"{summary.pass_at[k]:.4g}" if k in summary.pass_at else "-"
        over = "" if tasks == summary.tasks else f" (tasks with {k} graded rollouts: {tasks})"
        lines.append(f"pass@{k} {value}{over}")
    if counted := engine_line(summary.engine):
        lines.append(counted)
    lines += [f"failed, counted above as a reward of 0: {n} x {why}" for why, n in summary.failed.items()]
    lines += [f"no reward, not counted above: {n} x {why}" for why, n in summary.not_graded.items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
