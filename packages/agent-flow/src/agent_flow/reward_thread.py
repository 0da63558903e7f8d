"""A call in a thread of its own that can be left behind: a judge that hangs must not keep the process."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call; if the caller is cancelled, the thread goes on alone and its result is lost.

    anyio's own worker threads are joined when the interpreter ends; this one is a daemon.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # cancelled: nobody waits any more
            return
        if error is None:
            done.set_result(result)  # pyright: ignore[reportArgumentType]
        else:
            done.set_exception(error)

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = context.run(call)
        except Exception as error:
            failure = error
        except BaseException as error:
            # `sys.exit` in a reward function must not look like an interrupt of ours.
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="agent-flow reward", daemon=True).start()
    return await done
