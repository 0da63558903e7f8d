"""An event loop's life in a thread, and single calls there: what `sync_loop.LoopThread` is made of."""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

_log = logging.getLogger("sandbox_k8s")
T = TypeVar("T")
_LAST_STEP_S = 1.0


class EndedError(Exception):
    """The loop was left before or while a call ran."""


class Life:
    """What the thread and its owner share. It does not know the owner, which may be garbage-collected."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.opened: Future[None] = Future()
        self.tasks: anyio.abc.TaskGroup | None = None
        self.unanswered: set[Future[Any]] = set()
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._told: deque[Callable[[], object]] = deque()
        self._wake = asyncio.Event()
        self._left = False
        self._ended = threading.Event()
        self._opening: anyio.CancelScope | None = None

    def start(self, manager: AbstractAsyncContextManager[object]) -> None:
        """Start the thread, which enters ``manager`` and leaves it in the end."""
        # A daemon: the interpreter would wait for any other before `atexit` can tell it to leave.
        self._thread = threading.Thread(target=self._run, args=(manager,), name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    @property
    def here(self) -> bool:
        """Whether the caller is in the thread."""
        return threading.current_thread() is self._thread

    def end(self, within_s: float) -> bool:
        """Leave the manager and wait for the end of the thread; False when it took longer."""
        self.leave()
        # Not `join` alone: on Python 3.11 one that Ctrl-C interrupts takes the thread for ended from then on.
        if not self._ended.wait(within_s):
            return False
        self._thread.join(_LAST_STEP_S)
        return True

    def tell(self, callback: Callable[[], object]) -> bool:
        """Have the loop's task call something, in the order of telling; False when the loop has ended."""
        self._told.append(callback)
        return self._rouse(self._wake.set)

    def _rouse(self, callback: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def leave(self) -> None:
        """End the opening or the calls under way, leave the manager, end the thread."""
        self._rouse(self._leave)

    def _leave(self) -> None:
        self._left = True
        self._wake.set()
        if self._opening is not None:
            self._opening.cancel()

    def _run(self, manager: AbstractAsyncContextManager[object]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live(manager))
        except BaseException as problem:
            if self.opened.done():
                raise
            self.opened.set_exception(problem)
        finally:
            for answer in list(self.unanswered):
                answer.set_exception(EndedError())  # told to the loop when it had just run its last
            self._ended.set()

    async def _live(self, manager: AbstractAsyncContextManager[object]) -> None:
        with anyio.CancelScope() as self._opening:
            if self._left:
                self._opening.cancel()
            async with manager:
                self._opening = None
                async with anyio.create_task_group() as self.tasks:
                    self.opened.set_result(None)
                    await self._obey()
                    self.tasks.cancel_scope.cancel()
            return
        raise EndedError

    async def _obey(self) -> None:
        while not self._left:
            await self._wake.wait()
            self._wake.clear()
            while self._told:
                self._told.popleft()()


class Call(Generic[T]):
    """One call. Its methods, but for `abandon`, are for the loop's own task."""

    def __init__(
        self,
        life: Life,
        work: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None = None,
    ) -> None:
        self.answer: Future[T] = Future()
        self.answer.add_done_callback(life.unanswered.discard)
        self._life = life
        self._work = work
        self._undo = undo
        self._scope: anyio.CancelScope | None = None
        self._begun = self._cancelled = False
        self._ended = asyncio.Event()

    def begin(self) -> None:
        """Start it, unless the loop is being left."""
        tasks = self._life.tasks
        if tasks is None or tasks.cancel_scope.cancel_called:
            self.answer.set_exception(EndedError())
        else:
            self._begun = True
            tasks.start_soon(self._run)

    def abandon(self) -> Future[None] | None:
        """End it for a caller that waits for it no more; for any thread.

        It is ended and undone in the loop, also when the caller does not wait for that either.

        Returns:
            Done when it has ended, and the result that came all the same is undone; None when the loop has
            ended.
        """
        over: Future[None] = Future()
        over.add_done_callback(self._life.unanswered.discard)
        self._life.unanswered.add(over)
        if self._life.tell(partial(self._cancel, over)):
            return over
        self._life.unanswered.discard(over)
        return None

    def _cancel(self, over: Future[None]) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        elif not self._begun:
            self._ended.set()
            if not self.answer.done():
                self.answer.set_exception(EndedError())
        if self._life.tasks is None:
            over.set_result(None)
        else:
            self._life.tasks.start_soon(self._take_back, over)

    async def _take_back(self, over: Future[None]) -> None:
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
            if self._undo is not None and self.answer.exception() is None:
                try:
                    await self._undo(self.answer.result())
                except Exception as problem:
                    _log.warning("a call that nobody waits for was not undone: %s", problem)
        over.set_result(None)

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                self.answer.set_result(await self._work())
        except Exception as problem:
            self.answer.set_exception(problem)
        finally:
            if not self.answer.done():
                self.answer.set_exception(EndedError())
            self._ended.set()
