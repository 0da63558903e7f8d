"""Lines for people and for scripts, and the signals that end a command."""

from __future__ import annotations

import json
import math
import select
import shutil
import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

from token_tracking.sample import Sample

from trainer_bridge.errors import BridgeError

Value = object

COLUMNS = ("time", "producer", "task", "rollout", "part", "tokens", "trained", "reward", "status", "source")
_WIDTHS = (8, 8, 28, 12, 5, 8, 8, 7, 9, 8)
_LESS_TELLING = ("source", "producer", "rollout", "status", "part")
"""Columns that go first where there is no room for all."""


class OutputError(BridgeError, OSError):
    """Stdout does not take what is to be said."""


def write_line(text: str) -> None:
    """One line to stdout, out at once, so that a reader at the other end of a pipe sees it.

    Raises:
        BrokenPipeError: the reader is gone.
        OutputError: what stdout leads to takes no more, as a full disk.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror or error}") from error


def write_json(event: Mapping[str, Value]) -> None:
    """One JSON object as a line."""
    write_line(json.dumps(event, separators=(",", ":"), allow_nan=False))


def reader_is_gone() -> bool:
    """True: stdout is a pipe or a terminal whose other end was closed."""
    poller = select.poll()
    poller.register(sys.stdout, 0)
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poller.poll(0))


def sample_event(
    sample: Sample, *, producer: str, producer_id: str, sequence: int, created_ns: int
) -> dict[str, Value]:
    """A sample as a JSON object: what it is, not its tokens."""
    return {
        "event": "sample",
        "time_ns": created_ns,
        "producer": producer,
        "producer_id": producer_id,
        "sequence": sequence,
        "rollout_id": sample.rollout_id,
        "group_id": sample.group_id,
        "attempt": sample.attempt,
        "part": sample.part,
        "parts": sample.parts,
        "task_id": sample.task_id,
        "tokens": len(sample),
        "prompt_tokens": sample.prompt_length,
        "trained_tokens": sample.trained_tokens,
        "turns": len(sample.turns),
        "reward": sample.reward,
        "status": sample.status,
        "source": sample.source,
        "in_loss": sample.in_loss,
        "in_baseline": sample.in_baseline,
    }


def sample_cells(sample: Sample, *, producer: str, created_ns: int) -> tuple[str, ...]:
    """A sample as one row of `COLUMNS`."""
    reward = "-" if sample.reward is None or math.isnan(sample.reward) else f"{sample.reward:.3g}"
    return (
        datetime.fromtimestamp(created_ns / 1e9).strftime("%H:%M:%S"),
        plain(producer),
        plain(sample.task_id),
        sample.rollout_id[:12],
        f"{sample.part + 1}/{sample.parts}",
        str(len(sample)),
        str(sample.trained_tokens),
        reward,
        sample.status,
        sample.source,
    )


def row(cells: tuple[str, ...]) -> str:
    """Cells as a line of fixed columns; in a narrow terminal without the less telling ones."""
    shown = shown_columns()
    return "  ".join(_fit(cells[i], _WIDTHS[i]) for i in shown).rstrip()


def shown_columns() -> tuple[int, ...]:
    """Indices of the columns that fit; all of them where stdout is not a terminal."""
    shown = list(range(len(COLUMNS)))
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        for name in _LESS_TELLING:
            if sum(_WIDTHS[i] + 2 for i in shown) - 2 <= width:
                break
            shown.remove(COLUMNS.index(name))
    return tuple(shown)


def _fit(cell: str, width: int) -> str:
    return cell.ljust(width) if len(cell) <= width else cell[: width - 1] + "…"


def plain(text: str) -> str:
    """Text from a peer, without anything that could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class StopFlag:
    """Becomes true when the process is asked to end."""

    def __init__(self) -> None:
        self.set = False


@contextmanager
def stop_flag() -> Generator[StopFlag]:
    """SIGINT and SIGTERM set a flag instead of cutting the program off, until the block ends."""
    flag = StopFlag()

    def on_signal(number: int, frame: FrameType | None) -> None:
        flag.set = True

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def interruptible() -> Generator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
