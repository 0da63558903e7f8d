"""One timer for many things, each with a time at which it is due."""

import heapq

import anyio
import anyio.lowlevel

_PER_TURN = 8


class DueTimes:
    """Tells what is due, in the order of the times, which are those of the event loop's clock.

    A task with a timer of its own for each of a thousand sandboxes is tens of thousands of objects, and every
    full garbage collection stops the loop to look at them all.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []
        self._sooner = anyio.Event()
        self._told = 0

    def put(self, name: str, at_s: float) -> None:
        """Let something be due at that time, and not at another that was said before."""
        self._times[name] = at_s
        heapq.heappush(self._order, (at_s, name))
        if self._order[0] == (at_s, name):
            self._sooner.set()

    def drop(self, name: str) -> None:
        """Let it not be due at all."""
        self._times.pop(name, None)

    async def next(self) -> str:
        """Wait until something is due and return its name; it is due no more. Of one caller."""
        self._told += 1
        if self._told % _PER_TURN == 0:
            await anyio.lowlevel.checkpoint()  # much that is due at once must not hold up the loop
        while True:
            self._sooner = anyio.Event()
            at_s = self._next_s()
            if at_s <= anyio.current_time():
                _, name = heapq.heappop(self._order)
                del self._times[name]
                return name
            with anyio.move_on_at(at_s):
                await self._sooner.wait()

    def _next_s(self) -> float:
        while self._order and self._times.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)  # dropped, or put again
        return self._order[0][0] if self._order else float("inf")
