"""What a run shows: a live table in a terminal, plain lines elsewhere, JSON lines for scripts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent_flow.events import Event, RolloutRow, Summary


class Progress(Protocol):
    """Takes events as they happen."""

    def event(self, event: Event) -> None:
        """Show one event."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class JsonLines:
    """One JSON object per line on stdout, flushed at once."""

    def event(self, event: Event) -> None:
        """Print the event's set fields."""
        self.line(event)

    def line(self, value: object) -> None:
        """Print one value."""
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing to do."""


class PlainLines:
    """One line per start and end of a rollout; for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def event(self, event: Event) -> None:
        """Print the events that a reader of a log wants."""
        row = event.row
        if event.event == "rollout_started":
            self._print(f"started    {event.task}")
        elif event.event == "rollout_delivered" and row is not None:
            self._print(
                f"delivered  {row.task}: {row.exit_status}, reward {row.reward_text}, {row.turns} turns, "
                f"{row.prompt_tokens} prompt + {row.sampled_tokens} sampled tokens, {row.seconds:.1f} s"
            )
        elif event.event == "rollout_dropped" and row is not None:
            self._print(f"dropped    {row.task}: {row.dropped}: {row.note}")
        elif event.text and event.event != "turn":
            self._print(event.text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to do."""


class LiveTable:
    """The table of rollouts, redrawn in place while they run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, RolloutRow | str] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def event(self, event: Event) -> None:
        """Take the event into the table, or print it above."""
        if event.event == "rollout_started":
            self._rows[event.rollout_id] = event.task
        elif event.row is not None:
            self._rows[event.rollout_id] = event.row
        elif event.text:
            self._console.print(event.text, markup=False, highlight=False)
        live = [row for row in self._rows.values() if isinstance(row, RolloutRow)]
        table = rollout_table(live, live=True)
        for row in self._rows.values():
            if isinstance(row, str):
                table.add_row(row, Text("starting", style="dim"), *[""] * 5)
        self._live.update(table)

    def close(self) -> None:
        """Leave the screen to the final table."""
        self._live.stop()


_SENDER = "trainer_bridge.sender"
"""What is pending at its end is said once, by the run's own last lines."""


class PipeConsole(Console):
    """A console that raises when its reader is gone, instead of ending the process as rich does."""

    def on_broken_pipe(self) -> None:
        """Let the caller decide."""
        raise BrokenPipeError


def pipe_console() -> PipeConsole:
    """Tables in a pipe or a file keep their columns, whatever the terminal's width."""
    return PipeConsole(highlight=False, width=None if sys.stdout.isatty() else 140)


class Unbroken:
    """Keeps a run going when nobody reads what it shows: `| head` must not cut rollouts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.broken = False

    def event(self, event: Event) -> None:
        """Show an event, until showing fails."""
        if self.broken:
            return
        try:
            self._progress.event(event)
        except (OSError, ValueError):  # a pipe without a reader, a closed terminal
            self.broken = True

    def close(self) -> None:
        """Close, unless that is what failed."""
        if not self.broken:
            self._progress.close()


class WarningLog(logging.Handler):
    """Shows what libraries warn of, each text once; a warning in the middle of a live table would tear it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Turn a record into a warning event."""
        if record.name == _SENDER:
            return
        text = record.getMessage()
        if text not in self._seen:
            self._seen.add(text)
            self._progress.event(Event(event="warning", text=f"warning: {text}"))


def rollout_table(rows: Sequence[RolloutRow], *, live: bool = False) -> Table:
    """The table that a run ends with."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("exit status", no_wrap=True)
    for name in ("reward", "turns", "prompt tokens", "sampled tokens", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.task,
            _exit_text(row, live=live),
            _reward_cell(row),
            str(row.turns),
            f"{row.prompt_tokens:,}",
            f"{row.sampled_tokens:,}",
            f"{row.seconds:.1f}",
        )
    return table


def _exit_text(row: RolloutRow, *, live: bool) -> Text:
    if row.dropped:
        return Text(f"dropped: {row.dropped}", style="red")
    if not row.exit_status:
        return Text("running" if live else "-", style="cyan")
    return Text(row.exit_status)


def _reward_cell(row: RolloutRow) -> Text:
    if row.reward is None:
        return Text("-", style="dim")
    return Text(row.reward_text, style="green" if row.reward > 0 else "yellow")


def notes_of(rows: Sequence[RolloutRow]) -> list[str]:
    """What rollouts have to say, a line for each reason: a thousand times the same is one line."""
    groups: dict[str, list[RolloutRow]] = {}
    for row in rows:
        if row.note:
            groups.setdefault(row.dropped or row.note.partition(":")[0], []).append(row)
    return [
        f"note: {group[0].task}: {group[0].note}"
        if len(group) == 1
        else f"note: {len(group)} x {reason}, the first is {group[0].task}: {group[0].note}"
        for reason, group in groups.items()
    ]


def engine_line(counted: Mapping[str, int]) -> str:
    """What an engine counted, without what did not happen. Empty: nothing did."""
    said = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counted.items() if count)
    return f"engine: {said}" if said else ""


def print_ending(
    console: Console, rows: Sequence[RolloutRow], summary: Summary, *, law: str, folder: str, problem: str
) -> None:
    """The final table, the counts, and what to do next."""
    if rows:
        console.print()
        console.print(rollout_table(rows))
        console.print()
    lines = [
        f"{law}  (rollouts)",
        f"trainer received {summary.received_by_trainer} of {summary.delivered} rollouts "
        f"({summary.samples} samples were sent), in {summary.seconds:.1f} s",
        f"run folder: {folder}",
    ]
    if counted := engine_line(summary.engine):
        lines.insert(2, counted)
    for line in [*notes_of(rows), *lines]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if problem:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
