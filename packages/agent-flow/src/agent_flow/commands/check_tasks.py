"""`agent-flow check-tasks`: are the tasks of a configuration worth training on?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import anyio
from rich.table import Table
from rich.text import Text

from agent_flow.clock import Clock
from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_OK, Commands
from agent_flow.config import ConfigFile, load_filled_config
from agent_flow.errors import UsageError
from agent_flow.progress import JsonLines, pipe_console
from agent_flow.runtimes.rules import Rules, TaskRule, write_rules
from agent_flow.task import Task


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "check-tasks",
        help="run each task's tests without a patch and with its reference patch, several times",
        parents=[debug],
    )
    parser.add_argument("config", type=Path, help="a run.toml")
    parser.add_argument("--runs", type=_count, default=3, metavar="K", help="runs of each kind (default 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rules that `tasks.rules` reads")
    parser.add_argument("--json", action="store_true", help="print one JSON object per task")
    parser.set_defaults(command=_check)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _check(options: argparse.Namespace) -> int:
    file = load_filled_config(options.config)
    _require_patches(file)
    out: Path | None = options.out
    if out is not None and not out.parent.is_dir():
        raise UsageError("no such folder", where=str(out.parent), fix="make it first")
    console = pipe_console()
    lines = JsonLines()

    def tell(task: Task, rule: TaskRule) -> None:
        if options.json:
            lines.line({"task": task.instance_id, "rule": rule})
        else:
            text = f"{rule.verdict:10} {task.instance_id}" + (f": {rule.reason}" if rule.reason else "")
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    rules = anyio.run(_run, file, options.runs, tell)
    found = [rule.verdict for rule in rules.tasks.values()]
    counts = {verdict: found.count(verdict) for verdict in ("accepted", "rejected", "undecided")}
    if out is not None:
        write_rules(out, rules)
    if options.json:
        lines.line({**counts, "runs": rules.runs, "out": None if out is None else str(out)})
    else:
        console.print(_table(rules))
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        step = (
            f'rules = "{out.resolve()}" in [tasks] makes a run use them'
            if out
            else "--out FILE writes the rules that a run can use"
        )
        console.print(f"{said}, {rules.runs} runs of each kind; {step}", markup=False, soft_wrap=True)
    return EXIT_OK if counts["accepted"] == len(found) else EXIT_INCOMPLETE


def _require_patches(file: ConfigFile) -> None:
    """A configuration without repositories has no tests: said before an environment is asked for."""
    flow, runtime = (section.get("provider") for section in (file.run.flow, file.run.runtime))
    if flow != "swe" and (runtime == "plain" or not file.run.environment):
        raise UsageError(
            f"flow {flow!r} keeps no patches, so there are no tests to check and nothing to grade again",
            where=file.where(("flow", "provider")),
            fix="`agent-flow run`; `run --replay RUN` of a run with --dump asks the reward function again",
        )


async def _run(file: ConfigFile, runs: int, tell: Callable[[Task, TaskRule], None]) -> Rules:
    from agent_flow.check_tasks import check_tasks  # loads tokenizers, which other commands do without

    return await check_tasks(file, runs, clock=Clock(), listener=tell)


def _table(rules: Rules) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "verdict", "fail to pass", "pass to pass", "flaky", "hanging"):
        table.add_column(name, overflow="fold")
    for name, rule in rules.tasks.items():
        flaky, hanging = "\n".join(rule.flaky), "\n".join(rule.hanging)
        counted = (str(len(rule.FAIL_TO_PASS)), str(len(rule.PASS_TO_PASS)))
        table.add_row(name, rule.verdict, *counted, Text(flaky), Text(hanging))
    return table
