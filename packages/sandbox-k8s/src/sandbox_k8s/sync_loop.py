"""An event loop in a thread of its own: for callers that have none, or whose loop ends before the sandbox.

anyio's ``BlockingPortal.call`` leaves a call running when Ctrl-C ends the wait for it; here the call is
cancelled, and has cleaned up, before the caller goes on.
"""

import asyncio
import atexit
import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

from .errors import ConfigError

_log = logging.getLogger("sandbox_k8s")
T = TypeVar("T")


class _EndedError(Exception):
    """The loop was left before or while a call ran."""


class _Life:
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
        self._opening: anyio.CancelScope | None = None

    def start(self, manager: AbstractAsyncContextManager[object]) -> threading.Thread:
        """Start the thread, which enters ``manager`` and leaves it in the end."""
        # A daemon: the interpreter would wait for any other before `atexit` can tell it to leave.
        thread = threading.Thread(target=self._run, args=(manager,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._loop.close()
            raise
        return thread

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
                answer.set_exception(_EndedError())  # told to the loop when it had just run its last

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
        raise _EndedError

    async def _obey(self) -> None:
        while not self._left:
            await self._wake.wait()
            self._wake.clear()
            while self._told:
                self._told.popleft()()


class _Call(Generic[T]):
    """One call. All methods are for the loop's own task."""

    def __init__(self, life: _Life, work: Callable[[], Awaitable[T]]) -> None:
        self.answer: Future[T] = Future()
        self.answer.add_done_callback(life.unanswered.discard)
        self._life = life
        self._work = work
        self._scope: anyio.CancelScope | None = None
        self._begun = self._cancelled = False

    def begin(self) -> None:
        """Start it, unless the loop is being left."""
        tasks = self._life.tasks
        if tasks is None or tasks.cancel_scope.cancel_called:
            self.answer.set_exception(_EndedError())
        else:
            self._begun = True
            tasks.start_soon(self._run)

    def cancel(self) -> None:
        """End it; one that was never begun is over with this."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        elif not self._begun and not self.answer.done():
            self.answer.set_exception(_EndedError())

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
                self.answer.set_exception(_EndedError())


class LoopThread:
    """Holds one async context manager open in a thread of its own, and runs calls there.

    Garbage-collected without `close`, it warns, ends the calls, and leaves the manager; so it does when the
    interpreter exits. In a fork it refuses to work: threads do not come along.
    """

    def __init__(self, manager: AbstractAsyncContextManager[object], *, name: str, leave_s: float) -> None:
        """Enter ``manager``; its errors are raised here.

        Args:
            manager: What all calls need, for example a client. It is entered and left in the thread.
            name: Of the thread and in errors.
            leave_s: How long `close` and the interpreter's exit wait for the manager to be left.
        """
        self._name = name
        self._leave_s = leave_s
        self._life = life = _Life(name)
        self._thread = life.start(manager)
        try:
            life.opened.result()
        except BaseException:
            life.leave()
            self._thread.join(leave_s)
            raise
        self._at_exit = partial(_leave_at_exit, life, self._thread, leave_s)
        atexit.register(self._at_exit)
        self._abandoned = weakref.finalize(self, _abandoned, life, self._at_exit, name)
        self._abandoned.atexit = False

    def call(
        self, work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """Run something in the loop, from any thread that runs no event loop, and wait for it.

        Ctrl-C ends it and waits until it has ended; a second Ctrl-C does not wait.

        Args:
            work: Makes the awaitable, in the loop.
            undo: Given a result that came although the wait for it was interrupted.

        Raises:
            ConfigError: The loop was closed, belongs to the process that this one was forked from, or this
                thread runs an event loop, which would stand still.
        """
        self._check()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigError(
                f"{self._name}: this thread runs an event loop, which would stand still during the call; use "
                "`async with SandboxClient...` here, or call from another thread (asyncio.to_thread)"
            )
        call = _Call(self._life, work)
        try:
            self._begin(call)
            wait([call.answer])
        except BaseException:
            if self._life.tell(call.cancel):
                wait([call.answer])
                if undo is not None and call.answer.exception() is None:
                    self.call(partial(undo, call.answer.result()))
            raise
        return self._result(call)

    async def call_from(
        self, work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """The same from another asyncio loop, which goes on meanwhile; cancelling the caller cancels it.

        Loops may come and go between calls, as with one ``asyncio.run`` for each.
        """
        self._check()
        call = _Call(self._life, work)
        self._begin(call)
        answered = asyncio.wrap_future(call.answer)
        try:
            await asyncio.wait([answered])
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                if self._life.tell(call.cancel):
                    await asyncio.wait([answered])
                    failed = answered.exception() is not None  # asked for in any case, see below
                    if undo is not None and not failed:
                        await self.call_from(partial(undo, answered.result()))
            raise
        answered.exception()  # else asyncio reports it as one that nobody looked at
        return self._result(call)

    def post(self, work: Callable[[], Awaitable[object]]) -> None:
        """Begin something and do not wait; for finalizers. Nothing happens in a fork or when it is closed."""
        if self._life.pid == os.getpid():
            self._life.tell(_Call(self._life, work).begin)

    def close(self) -> None:
        """End the calls under way and leave the manager. Closing twice does nothing."""
        if not self._abandoned.alive or self._life.pid != os.getpid():
            return
        self._abandoned.detach()
        atexit.unregister(self._at_exit)
        self._life.leave()
        self._thread.join(self._leave_s)
        if self._thread.is_alive():
            _log.warning("%s is still ending after %.0f s", self._name, self._leave_s)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._abandoned.alive

    def _check(self) -> None:
        if self._life.pid != os.getpid():
            raise ConfigError(
                f"{self._name} belongs to process {self._life.pid}; a fork has none of its threads: open a "
                f"client of its own in process {os.getpid()}"
            )

    def _begin(self, call: _Call[Any]) -> None:
        self._life.unanswered.add(call.answer)
        if not self._life.tell(call.begin):
            self._life.unanswered.discard(call.answer)
            raise ConfigError(f"{self._name} is closed")

    def _result(self, call: _Call[T]) -> T:
        try:
            return call.answer.result()
        except _EndedError as ended:
            raise ConfigError(f"{self._name} was closed before this call was over") from ended


def _leave_at_exit(life: _Life, thread: threading.Thread, leave_s: float) -> None:
    if life.pid == os.getpid():
        life.leave()
        thread.join(leave_s)


def _abandoned(life: _Life, at_exit: Callable[[], object], name: str) -> None:
    atexit.unregister(at_exit)
    if life.pid == os.getpid():
        life.leave()  # without waiting: this may be any thread, the loop's too
        warnings.warn(f"{name} was never closed; what it holds is being ended", ResourceWarning, stacklevel=2)
