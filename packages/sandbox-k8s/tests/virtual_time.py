"""An event loop whose time is virtual: nothing waits, and the same seed gives the same run."""

import asyncio
import selectors
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
EPOCH_NS = 1_800_000_000_000_000_000


MOST_TURNS = 200_000


class StuckError(Exception):
    """Nothing is ready and no timer will ever make anything so, or it turns round and round."""


class _Jumps(selectors.DefaultSelector):
    """Waiting is a jump of the clock. There is no I/O; only the loop's own wake-up pipe is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turns += 1
        if timeout is None or self.turns > MOST_TURNS:
            raise StuckError(f"at {self.now_s:.3f} s, after {self.turns} turns of the loop")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio on virtual seconds, from zero."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own, to its end."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class VirtualClock:
    """A `sandbox_k8s.clock.Clock` on a loop's time; ``skew_s`` is how far it is off."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: Random, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._chance = chance
        self.skew_s = skew_s

    def now_ns(self) -> int:
        return EPOCH_NS + int((self._loop.time() + self.skew_s) * 1e9)

    def monotonic_s(self) -> float:
        return self._loop.time()

    def new_id(self) -> str:
        return f"{self._chance.getrandbits(128):032x}"
