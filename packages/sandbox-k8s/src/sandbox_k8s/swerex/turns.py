"""One at a time, across event loops: what asyncio's own locks cannot do."""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from types import TracebackType


class Turns:
    """A lock for tasks of any event loops and threads; whoever waits is served in the order of coming.

    As ``async with turns:``.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wait([asyncio.wrap_future(turn)])
        except asyncio.CancelledError:
            with self._guard:
                came = turn not in self._waiting
                if not came:
                    self._waiting.remove(turn)
            if came:
                self._pass_on()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            turn = self._waiting.popleft() if self._waiting else None
            self._taken = turn is not None
        if turn is not None:
            turn.set_result(None)
