"""`agent-flow outcomes`: the outcome table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table

from agent_flow.commands.ending import EXIT_OK, Commands
from agent_flow.outcome import ERRORS, EXITS, Outcome
from agent_flow.progress import pipe_console


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "outcomes", help="print what the end of a rollout means for reward and training", parents=[debug]
    )
    parser.set_defaults(command=_outcomes)


def _outcomes(_: argparse.Namespace) -> int:
    console = pipe_console()
    for title, rows in (
        ("train: an agent's exit status", [row for row in EXITS if row.mode == "train"]),
        ("eval: an agent's exit status", [row for row in EXITS if row.mode == "eval"]),
        ("train and eval: an error, by its boundary and whose fault it is", ERRORS),
    ):
        console.print(_outcome_table(title, rows))
    return EXIT_OK


def _outcome_table(title: str, rows: Sequence[Outcome]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    names = ("ends with", "grade", "reward", "mask", "in loss", "in baseline", "status", "retry", "refill")
    for name in (*names, "why"):
        table.add_column(name, no_wrap=name != "why")
    for row in rows:
        reward = "the grader's" if row.evaluate else ("none" if row.reward is None else f"{row.reward:g}")
        flags = [
            ("yes" if flag else "no")
            for flag in (row.evaluate, row.in_loss, row.in_baseline, row.retry, row.refill)
        ]
        ends = row.ends if row.fault is None else f"{row.ends}, {row.fault}"
        status = row.status if row.sample else "dropped"
        table.add_row(ends, flags[0], reward, row.mask, *flags[1:3], status, *flags[3:], row.why)
    return table
