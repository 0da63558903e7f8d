"""`agent-flow eval`: every task of a configuration, measured; nothing is trained and nothing is sent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from agent_flow.commands.ending import Commands
from agent_flow.commands.running import carry_out, exit_code, short
from agent_flow.config import ConfigFile, SamplingConfig, load_config
from agent_flow.decoding import decode
from agent_flow.progress import JsonLines, pipe_console

if TYPE_CHECKING:
    from agent_flow.evaluation import EvalSummary


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "eval", help="measure every task: mean reward and pass@k; needs no trainer", parents=[debug]
    )
    parser.add_argument("config", type=Path, help="a run.toml; its [eval] says what is other than in a run")
    parser.add_argument(
        "--dump", action="store_true", help="keep what the engine gave, so that the run can be replayed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")
    parser.set_defaults(command=_eval)


def _eval(options: argparse.Namespace) -> int:
    from agent_flow.evaluation import summarise

    file = eval_file(load_config(options.config))
    console = pipe_console()
    result = carry_out(console, file, as_json=options.json, mode="eval", dump=options.dump)
    summary = summarise(
        list(result.summary.rewards),
        result.rows,
        rollouts_per_task=file.run.tasks.rollouts_per_task,
        pass_reward=file.run.eval.pass_reward,
        seconds=result.summary.seconds,
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
    return exit_code(result)


def eval_file(file: ConfigFile) -> ConfigFile:
    """The configuration with `[eval]` applied.

    Raises:
        ConfigError: a key of `eval.sampling` is unknown or its value does not fit.
    """
    run, own = file.run, file.run.eval
    sampling = {**msgspec.structs.asdict(run.sampling), **own.sampling}
    decode(own.sampling, SamplingConfig, where=file.where, section=("eval", "sampling"))
    other = own.agent.get("provider", run.agent.get("provider")) != run.agent.get("provider")
    tasks = msgspec.structs.replace(
        run.tasks,
        path=own.path or run.tasks.path,
        rollouts_per_task=own.rollouts_per_task or run.tasks.rollouts_per_task,
    )
    changed = msgspec.structs.replace(
        run,
        name=f"{run.name[:94]}-eval",
        tasks=tasks,
        agent=dict(own.agent) if other else {**run.agent, **own.agent},
        sampling=msgspec.convert(sampling, SamplingConfig),
    )
    return msgspec.structs.replace(file, run=changed)


def _print(console: Console, summary: EvalSummary) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    for name in ("graded", "passed", "mean reward", "no reward"):
        table.add_column(name, justify="right")
    for score in summary.per_task:
        mean = "-" if score.mean_reward is None else f"{score.mean_reward:.4g}"
        table.add_row(score.task, str(score.graded), str(score.passed), mean, str(score.not_graded or "-"))
    console.print()
    console.print(table)
    mean = "-" if summary.mean_reward is None else f"{summary.mean_reward:.4g}"
    measured = sum(score.graded > 0 for score in summary.per_task)
    lines = [
        "",
        f"mean reward {mean} (graded: {measured} of {summary.tasks} tasks, {summary.graded} rollouts)",
    ]
    for k, tasks in summary.pass_at_tasks.items():
        value = f"{summary.pass_at[k]:.4g}" if k in summary.pass_at else "-"
        over = "" if tasks == summary.tasks else f" (tasks with {k} graded rollouts: {tasks})"
        lines.append(f"pass@{k} {value}{over}")
    lines += [f"no reward, not counted above: {n} x {why}" for why, n in summary.not_graded.items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
