"""`trainer-bridge tail`."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from token_tracking.sample import Sample

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
from trainer_bridge.observer import SampleObserver, Seen

POLL_S = 0.5
ROWS_BESIDE_SAMPLES = 6

Show = Callable[[Seen, Sample], None]


def tail(address: str, *, as_json: bool, count: int | None, timeout_s: float, insecure: bool) -> int:
    """Show what arrives at a receiver, live. Takes no sample and acknowledges none; Ctrl-C ends it."""
    samples = rollouts = 0
    ended: str | None = None
    with interruptible():
        try:
            with (
                SampleObserver(address, connect_timeout_s=timeout_s, insecure=insecure) as observer,
                _display(address, as_json=as_json) as show,
            ):
                while ended is None and (count is None or samples < count):
                    seen = observer.next(POLL_S)
                    if seen is None:
                        ended = observer.ended
                        continue
                    rollouts += 1
                    for sample in seen.samples:
                        if count is None or samples < count:
                            samples += 1
                            show(seen, sample)
        except KeyboardInterrupt:
            ended = "stopped"
    if as_json:
        write_json({"event": "end", "rollouts": rollouts, "samples": samples, "reason": ended or "count"})
    else:
        write_line(f"saw {samples} samples of {rollouts} rollouts{f' ({ended})' if ended else ''}")
    return 0


@contextmanager
def _display(address: str, *, as_json: bool) -> Generator[Show]:
    if as_json:
        yield _show_json
        return
    if sys.stdout.isatty():
        with _live_table(address) as show:
            yield show
        return
    write_line(row(COLUMNS))
    yield _show_line


def _show_json(seen: Seen, sample: Sample) -> None:
    write_json(
        sample_event(sample, producer=seen.producer[:8], sequence=seen.sequence, created_ns=seen.created_ns)
    )


def _show_line(seen: Seen, sample: Sample) -> None:
    write_line(row(sample_cells(sample, producer=seen.producer[:8], created_ns=seen.created_ns)))


@contextmanager
def _live_table(address: str) -> Generator[Show]:
    try:
        # Only this view needs rich; it is an extra, trainer-bridge[cli].
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        sys.stderr.write(
            "trainer-bridge: install trainer-bridge[cli] for a live table; plain lines instead\n"
        )
        write_line(row(COLUMNS))
        yield _show_line
        return
    console = Console()
    kept: deque[tuple[str, ...]] = deque(maxlen=max(console.height - ROWS_BESIDE_SAMPLES, 3))
    count = 0

    def table() -> Table:
        view = Table(title=f"{address}: {count} samples seen", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        shown = shown_columns()
        for column in (COLUMNS[i] for i in shown):
            numeric = column in ("tokens", "trained", "reward")
            view.add_column(column, justify="right" if numeric else "left", no_wrap=True, min_width=5)
        for cells in kept:
            view.add_row(*(Text(cells[i]) for i in shown))
        return view

    with Live(table(), console=console, refresh_per_second=8) as live:

        def show(seen: Seen, sample: Sample) -> None:
            nonlocal count
            count += 1
            kept.append(sample_cells(sample, producer=seen.producer[:8], created_ns=seen.created_ns))
            live.update(table())

        yield show
