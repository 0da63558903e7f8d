"""How long an event loop did nothing but one thing: the longest stall while something is under way."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import anyio.abc

from .stats import ClientStats

_EVERY_S = 0.005


class StallWatch:
    """Looks at the loop of a client while starts are under way, and only then: it costs a timer.

    A machine with more to do than it has cores stalls loops too; so it counts by the processor time of the
    loop's thread as well.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, stats: ClientStats) -> None:
        self._tasks = tasks
        self._stats = stats
        self._busy = 0
        self._is_looking = False

    @contextmanager
    def looking(self) -> Generator[None]:
        """Look for the time of the block."""
        self._busy += 1
        if not self._is_looking:
            self._is_looking = True
            self._tasks.start_soon(self._look)
        try:
            yield
        finally:
            self._busy -= 1

    async def _look(self) -> None:
        stats = self._stats
        before_s, before_cpu_s = anyio.current_time(), time.thread_time()
        while self._busy:
            await anyio.sleep(_EVERY_S)
            if not self._busy:
                break  # what the loop was doing may have nothing to do with starts
            now_s, cpu_s = anyio.current_time(), time.thread_time()
            late_s = now_s - before_s - _EVERY_S
            stats.loop_stall_s = max(stats.loop_stall_s, late_s)
            stats.loop_stall_cpu_s = max(stats.loop_stall_cpu_s, min(late_s, cpu_s - before_cpu_s))
            before_s, before_cpu_s = now_s, cpu_s
        self._is_looking = False
