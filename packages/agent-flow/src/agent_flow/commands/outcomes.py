"""`agent-flow outcomes`: the outcome table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec
from rich.table import Table

from agent_flow.commands.ending import EXIT_OK, Commands
from agent_flow.errors import UsageError
from agent_flow.outcome import ERRORS, EXITS, Outcome, about_unknown
from agent_flow.progress import JsonLines, pipe_console

_TABLE_WIDTH = 120


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "outcomes", help="print what the end of a rollout means for reward and training", parents=[debug]
    )
    parser.add_argument("ends_with", nargs="?", default="", help="show this exit status or boundary alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.set_defaults(command=_outcomes)


def _outcomes(options: argparse.Namespace) -> int:
    wanted: str = options.ends_with
    if wanted and not any(row.ends == wanted for row in (*EXITS, *ERRORS)):
        raise UsageError(about_unknown(wanted))
    if options.json:
        lines = JsonLines()
        for row in (*EXITS, *ERRORS):
            if wanted in ("", row.ends):
                printed = {"mask": row.mask, "status": _status(row)}
                lines.line({**msgspec.structs.asdict(row), **printed})
        return EXIT_OK
    console = pipe_console()
    for title, rows in (
        ("train: an agent's exit status", [row for row in EXITS if row.mode == "train"]),
        ("eval: an agent's exit status", [row for row in EXITS if row.mode == "eval"]),
        ("train and eval: an error, by its boundary and whose fault it is", ERRORS),
    ):
        shown = [row for row in rows if wanted in ("", row.ends)]
        if not shown:
            continue
        if console.width < _TABLE_WIDTH:
            console.print(f"[bold]{title}[/bold]")
            for row in shown:
                console.print(_sentence(row), markup=False, highlight=False)
        else:
            console.print(_table(title, shown))
        console.print()
    return EXIT_OK


def _reward(row: Outcome) -> str:
    return "the grader's" if row.evaluate else ("none" if row.reward is None else f"{row.reward:g}")


def _status(row: Outcome) -> str:
    return row.status if row.sample else "dropped"


def _ends(row: Outcome) -> str:
    return row.ends if row.fault is None else f"{row.ends}, {row.fault}"


def _sentence(row: Outcome) -> str:
    """A row for a terminal that is too narrow for the table."""
    if not row.sample:
        again = "".join(f", {word}" for word, flag in (("retry", row.retry), ("refill", row.refill)) if flag)
        facts = f"dropped, no sample{again}"
    else:
        out = [name for name, flag in (("loss", row.in_loss), ("baseline", row.in_baseline)) if not flag]
        counts = f"out of {' and '.join(out)}" if out else "in loss and baseline"
        facts = f"reward {_reward(row)}, {counts}, {row.status}"
    return f"  {_ends(row)}: {facts}\n    {row.why}"


def _table(title: str, rows: Sequence[Outcome]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    names = ("ends with", "grade", "reward", "mask", "in loss", "in baseline", "status", "retry", "refill")
    for name in (*names, "why"):
        table.add_column(name, no_wrap=name != "why")
    for row in rows:
        flags = [
            ("yes" if flag else "no")
            for flag in (row.evaluate, row.in_loss, row.in_baseline, row.retry, row.refill)
        ]
        facts = (_reward(row), row.mask, *flags[1:3], _status(row), *flags[3:])
        table.add_row(_ends(row), flags[0], *facts, row.why)
    return table
