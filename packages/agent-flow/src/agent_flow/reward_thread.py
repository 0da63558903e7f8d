"""How a user's function is called so that nothing it does looks like an interrupt, or keeps the process.

A blocking one runs in a thread of its own that can be left behind: a judge that hangs must not keep anything.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call; if the caller is cancelled, the thread goes on alone and its result is lost.

    anyio's own worker threads are joined when the interpreter ends; this one is a daemon. What the call
    raises is an `Exception`, as `contained` says.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():  # cancelled: nobody waits any more
            return
        if error is None:
            done.set_result(result)  # pyright: ignore[reportArgumentType]
        else:
            done.set_exception(error)

    def work() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = context.run(call)
        except BaseException as error:
            failure = _ordinary(error)
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="agent-flow reward", daemon=True).start()
    return await done


async def contained(call: Awaitable[T]) -> T:
    """Await what a user wrote. It raises an `Exception`, or the cancellation of a scope around it.

    `sys.exit`, and the cancellation of a task that several calls share, would else end more than this call.
    What it gives after it was cancelled is lost: a function may swallow the cancellation of its time-out.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()

    async def raise_if_cancelled() -> None:
        await checkpoint_if_cancelled()
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError  # by `Task.cancel`, without a scope

    try:
        result = await call
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        await raise_if_cancelled()
        failure = _ordinary(error)
        if failure is error:
            raise
        raise failure from error
    await raise_if_cancelled()
    return result


def described(error: BaseException) -> str:
    """Class and message, also of an exception whose `__str__` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _ordinary(error: BaseException) -> Exception:
    """The error, or one that a future and a task group take for no signal to themselves."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    made = RuntimeError(described(error))
    made.__cause__ = error
    return made
