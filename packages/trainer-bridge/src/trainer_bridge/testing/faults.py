"""What may happen to a message on its way, and how often. No socket, no clock, no thread."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from trainer_bridge.errors import ConfigError
from trainer_bridge.payload import Buffer

Message = Sequence[Buffer]
Fate = Literal["passed", "dropped", "cut"]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Chances per message, 0 to 1 each, in both directions; each is drawn by itself.

    Raises:
        ConfigError: a chance is not from 0 to 1, or `delay_s` is negative.
    """

    drop: float = 0.0
    """It is lost."""
    double: float = 0.0
    """It comes twice."""
    reorder: float = 0.0
    """It is overtaken by those behind it, for up to `delay_s`."""
    delay: float = 0.0
    """It and everything behind it wait for `delay_s`."""
    delay_s: float = 0.05
    flip: float = 0.0
    """One of its bits is inverted."""
    cut: float = 0.0
    """Its connection ends in the middle of it; what is on the way in either direction is lost."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name == "delay_s" and value < 0:
                raise ConfigError(f"delay_s must not be negative, got {value}")
            if name != "delay_s" and not 0 <= value <= 1:
                raise ConfigError(f"{name} is a chance, from 0 to 1, got {value}")


class FaultCounts(msgspec.Struct):
    """What was done so far, in messages; `cut` in connections."""

    passed: int = 0
    """Came out at least once, whole or not."""
    dropped: int = 0
    doubled: int = 0
    reordered: int = 0
    delayed: int = 0
    flipped: int = 0
    cut: int = 0


class FaultLine:
    """One direction of one connection.

    Args:
        faults: may be replaced at any time.
        rng: draws the faults; the same draws for the same messages.
        counts: counts them; may be shared.
    """

    def __init__(self, faults: Faults, rng: np.random.Generator, counts: FaultCounts) -> None:
        self.faults = faults
        self._rng = rng
        self._counts = counts
        self._waiting: list[tuple[float, int, Message]] = []
        self._number = 0
        self._stalled_until_s = 0.0

    @property
    def next_due_s(self) -> float | None:
        """When the next message comes out. None: none waits."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, frames: Message, now_s: float) -> Fate:
        """A message goes in. `cut`: it is lost, and its connection is to be ended."""
        faults, counts = self.faults, self._counts
        drop, double, reorder, delay, flip, cut = self._rng.random(6)
        if cut < faults.cut:
            counts.cut += 1
            return "cut"
        if drop < faults.drop:
            counts.dropped += 1
            return "dropped"
        if flip < faults.flip:
            frames = self._flipped(frames)
        due_s = max(now_s, self._stalled_until_s)
        if delay < faults.delay:
            counts.delayed += 1
            due_s = self._stalled_until_s = due_s + faults.delay_s
        if reorder < faults.reorder:
            counts.reordered += 1
            due_s += faults.delay_s * float(self._rng.random())
        self._put(due_s, frames)
        if double < faults.double:
            counts.doubled += 1
            self._put(due_s + faults.delay_s * float(self._rng.random()), frames)
        counts.passed += 1
        return "passed"

    def due(self, now_s: float) -> list[Message]:
        """Messages that come out now, in their new order."""
        out: list[Message] = []
        while self._waiting and self._waiting[0][0] <= now_s:
            out.append(heapq.heappop(self._waiting)[2])
        return out

    def clear(self) -> None:
        """The connection is gone, and what was on it."""
        self._waiting.clear()
        self._stalled_until_s = 0.0

    def _put(self, due_s: float, frames: Message) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (due_s, self._number, frames))

    def _flipped(self, frames: Message) -> Message:
        sizes = [len(frame) for frame in frames]
        if not sum(sizes):
            return frames
        self._counts.flipped += 1
        at = int(self._rng.integers(sum(sizes)))
        out = [bytes(frame) for frame in frames]
        for n, size in enumerate(sizes):
            if at < size:
                raw = bytearray(out[n])
                raw[at] ^= 1 << int(self._rng.integers(8))
                out[n] = bytes(raw)
                break
            at -= size
        return out
