"""An event loop in a thread of its own, for servers that tests of any kind talk to."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

_T = TypeVar("_T")
_STOP_S = 10.0


class Background:
    """Holds an async context open in a thread."""

    def __init__(self, name: str) -> None:
        self._name = name

    def start(self, context: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Enter the context; what that raises comes out here."""
        entered: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(context, entered), name=self._name, daemon=True
        )
        self._thread.start()
        entered.result()

    def stop(self) -> None:
        """Leave the context.

        Raises:
            TimeoutError: It does not end.
        """
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._name} did not end within {_STOP_S:.0f} s")

    def do(self, work: Callable[[], _T]) -> _T:
        """Do something in the loop's thread."""

        async def wrapped() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result()

    def _run(self, context: Callable[[], AbstractAsyncContextManager[None]], entered: "Future[None]") -> None:
        try:
            asyncio.run(self._hold(context, entered))
        except BaseException as problem:
            if entered.done():
                raise
            entered.set_exception(problem)

    async def _hold(
        self, context: Callable[[], AbstractAsyncContextManager[None]], entered: "Future[None]"
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        async with context():
            entered.set_result(None)
            await self._end.wait()
