"""Tasks that go on for as long as a client is open, whatever one turn of theirs meets."""

import logging
from collections.abc import Awaitable, Callable

import anyio

from .stats import ClientStats

_log = logging.getLogger("sandbox_k8s")
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


async def supervised(what: str, work: Callable[[], Awaitable[object]], stats: ClientStats) -> None:
    """Run ``work`` until it returns, anew when it fails.

    All tasks of a client are in one group: an error that one of them does not handle ends the client, and the
    sandboxes with it. What a task knows may go wrong it handles itself; this is for what nobody thought of.
    It is logged with its trace the first time, and always counted.

    Args:
        what: Names the task in the log.
        work: Begins from the start each time that it is called.
        stats: Counts ``task_faults``.
    """
    pause_s, level = _FIRST_PAUSE_S, logging.ERROR
    while True:
        begun_s = anyio.current_time()
        try:
            await work()
        except Exception as problem:
            stats.task_faults += 1
            text = "%s failed and goes on (please report this): %s: %s"
            trace = problem if level == logging.ERROR else None
            _log.log(level, text, what, type(problem).__name__, problem, exc_info=trace)
        else:
            return
        level = logging.DEBUG
        if anyio.current_time() - begun_s > _LONGEST_PAUSE_S:
            pause_s = _FIRST_PAUSE_S
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
