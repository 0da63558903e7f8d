"""Work in a thread that is waited for, whoever cancels meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

Answer = TypeVar("Answer")


async def to_the_end(work: Callable[[], Answer], limiter: anyio.CapacityLimiter) -> Answer:
    """Run blocking work in a thread; a cancel while it runs is raised when it has ended.

    Otherwise whoever cleans up after a cancelled create looks before the object is there. anyio's shield
    holds its own cancels off, and not those of `asyncio.wait_for`, `asyncio.timeout` and Ctrl-C.

    Args:
        work: Called once, in a thread, or never when cancelled before the limiter has room.
        limiter: Threads at once.
    """
    async with limiter:
        task = asyncio.ensure_future(anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1)))
        cancelled = await _ended(task)
    if cancelled is not None:
        task.exception()  # seen: nobody waits for it any more
        raise cancelled
    return task.result()


async def _ended(task: "asyncio.Future[Answer]") -> asyncio.CancelledError | None:
    """Wait for its end; the last cancel that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as problem:
                cancelled = problem
    return cancelled
