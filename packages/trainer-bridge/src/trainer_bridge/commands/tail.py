"""`trainer-bridge tail`."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from trainer_bridge.clock import SystemClock
from trainer_bridge.commands.gauge import PRODUCER_COLUMNS, Gauge
from trainer_bridge.commands.output import (
    COLUMNS,
    interruptible,
    row,
    sample_cells,
    sample_event,
    shown_columns,
    write_json,
    write_line,
)
from trainer_bridge.keys import CurveKeys
from trainer_bridge.observer import SampleObserver, Seen

POLL_S = 0.5
STATUS_S = 5.0
"""Without a live table, a line of rates comes so often."""
PRODUCERS_SHOWN = 8
ROWS_BESIDE_SAMPLES = 12


class View(Protocol):
    """Where things are shown."""

    def copy(self, seen: Seen, most: int | None) -> int:
        """Show the samples of a rollout, at most so many; returns how many."""
        ...

    def status(self) -> None:
        """The receiver has said how it stands."""
        ...


def tail(
    address: str,
    *,
    as_json: bool,
    count: int | None,
    timeout_s: float,
    insecure: bool,
    keys: CurveKeys | None,
) -> int:
    """Show what arrives at a receiver, live: samples, rates, lags, credits and drops.

    Takes no sample and acknowledges none; Ctrl-C ends it.
    """
    samples = rollouts = 0
    ended: str | None = None
    clock = SystemClock()
    gauge = Gauge()
    with interruptible():
        try:
            with (
                SampleObserver(
                    address, connect_timeout_s=timeout_s, insecure=insecure, keys=keys
                ) as observer,
                _view(address, gauge, as_json=as_json) as view,
            ):
                while ended is None and (count is None or samples < count):
                    seen = observer.next(POLL_S)
                    status = observer.status
                    if status is not None and gauge.take_status(status, clock.monotonic_s()):
                        view.status()
                    if seen is None:
                        ended = observer.ended
                        continue
                    gauge.take_copy(seen, clock.now_ns())
                    rollouts += 1
                    samples += view.copy(seen, None if count is None else count - samples)
        except KeyboardInterrupt:
            ended = "stopped"
    if as_json:
        write_json({"event": "end", "rollouts": rollouts, "samples": samples, "reason": ended or "count"})
    else:
        write_line(f"saw {samples} samples of {rollouts} rollouts{f' ({ended})' if ended else ''}")
    return 0


@contextmanager
def _view(address: str, gauge: Gauge, *, as_json: bool) -> Generator[View]:
    if not as_json and sys.stdout.isatty():
        with _live_table(address, gauge) as view:
            yield view
        return
    if not as_json:
        write_line(row(COLUMNS))
    yield _Lines(gauge, as_json=as_json)


class _Lines:
    def __init__(self, gauge: Gauge, *, as_json: bool) -> None:
        self._gauge = gauge
        self._as_json = as_json
        self._clock = SystemClock()
        self._told_s = self._clock.monotonic_s()

    def copy(self, seen: Seen, most: int | None) -> int:
        shown = seen.samples[:most]
        for sample in shown:
            if self._as_json:
                write_json(
                    sample_event(
                        sample,
                        producer=seen.producer[:8],
                        producer_id=seen.producer,
                        sequence=seen.sequence,
                        created_ns=seen.created_ns,
                    )
                )
            else:
                write_line(row(sample_cells(sample, producer=seen.producer[:8], created_ns=seen.created_ns)))
        return len(shown)

    def status(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s < STATUS_S:
            return
        self._told_s = now_s
        if self._as_json:
            write_json(self._gauge.event())
            return
        for line in self._gauge.lines():
            write_line(f"-- {line}")
        for cells in self._gauge.producer_rows()[:PRODUCERS_SHOWN]:
            told = zip(PRODUCER_COLUMNS, cells, strict=True)
            write_line("-- " + ", ".join(f"{name} {cell}" for name, cell in told))


@contextmanager
def _live_table(address: str, gauge: Gauge) -> Generator[View]:
    try:
        # Only this view needs rich; it is an extra, trainer-bridge[cli].
        from rich.box import SIMPLE_HEAD
        from rich.console import Console, Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        sys.stderr.write(
            "trainer-bridge: install trainer-bridge[cli] for a live table; plain lines instead\n"
        )
        write_line(row(COLUMNS))
        yield _Lines(gauge, as_json=False)
        return
    console = Console()
    kept: deque[tuple[str, ...]] = deque()
    count = 0

    def samples() -> Table:
        table = Table(title=f"{address}: {count} samples seen", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        shown = shown_columns()
        for column in (COLUMNS[i] for i in shown):
            numeric = column in ("tokens", "trained", "reward")
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True, min_width=5)
        for cells in kept:
            table.add_row(*(Text(cells[i]) for i in shown))
        return table

    def producers() -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in PRODUCER_COLUMNS:
            table.add_column(
                column, justify="left" if column in ("producer", "id", "state") else "right", no_wrap=True
            )
        for cells in gauge.producer_rows()[:PRODUCERS_SHOWN]:
            table.add_row(*map(Text, cells))
        return table

    def screen() -> Group:
        room = max(console.height - ROWS_BESIDE_SAMPLES - len(gauge.producer_rows()[:PRODUCERS_SHOWN]), 3)
        while len(kept) > room:
            kept.popleft()
        return Group(*map(Text, gauge.lines()), producers(), samples())

    class Screen:
        def copy(self, seen: Seen, most: int | None) -> int:
            nonlocal count
            shown = seen.samples[:most]
            count += len(shown)
            kept.extend(
                sample_cells(sample, producer=seen.producer[:8], created_ns=seen.created_ns)
                for sample in shown
            )
            live.update(screen())
            return len(shown)

        def status(self) -> None:
            live.update(screen())

    with Live(screen(), console=console, refresh_per_second=8) as live:
        yield Screen()
