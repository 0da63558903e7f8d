"""An event loop in a thread of its own: for callers that have none, or whose loop ends before the sandbox.

anyio's ``BlockingPortal.call`` leaves a call running when Ctrl-C ends the wait for it; here the call is
cancelled, and has cleaned up, before the caller goes on.
"""

import asyncio
import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import anyio

from .errors import ConfigError
from .sync_calls import Call, EndedError, Life

_log = logging.getLogger("sandbox_k8s")
T = TypeVar("T")


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
        self._life = life = Life(name)
        life.start(manager)
        try:
            life.opened.result()
        except BaseException:
            life.end(leave_s)
            raise
        self._at_exit = partial(_leave_at_exit, life, leave_s)
        atexit.register(self._at_exit)
        self._abandoned = weakref.finalize(self, _abandoned, life, name)
        self._abandoned.atexit = False

    def call(
        self, work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """Run something in the loop, from any thread that runs no event loop, and wait for it.

        Ctrl-C ends it and waits until it has ended; a second Ctrl-C does not wait.

        Args:
            work: Makes the awaitable, in the loop.
            undo: Given a result that came although the wait for it was interrupted. It runs in the loop, to
                its end; what it raises is logged.

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
        call = Call(self._life, work, undo)
        try:
            self._begin(call)
            wait([call.answer])
        except BaseException:
            over = call.abandon()
            if over is not None:
                wait([over])
            raise
        return self._result(call)

    async def call_from(
        self, work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """The same from another asyncio loop, which goes on meanwhile; cancelling the caller cancels it.

        Loops may come and go between calls, as with one ``asyncio.run`` for each. A second cancellation,
        which asyncio lets through a shield, does not wait for the end of what it cancelled.
        """
        self._check()
        call = Call(self._life, work, undo)
        self._begin(call)
        try:
            await asyncio.wait([_seen(call.answer)])
        except asyncio.CancelledError:
            over = call.abandon()
            if over is not None:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([_seen(over)])
            raise
        return self._result(call)

    def post(self, work: Callable[[], Awaitable[object]]) -> None:
        """Begin something and do not wait; for finalizers. Nothing happens in a fork or when it is closed."""
        if self._life.pid == os.getpid():
            self._life.tell(Call(self._life, work).begin)

    def close(self) -> None:
        """End the calls under way and leave the manager. Closing twice does nothing.

        Ctrl-C ends the wait for it only: closing again, and the interpreter's exit, wait for the rest.

        Raises:
            ConfigError: Called in the loop's own thread, which would wait for itself.
        """
        if not self._abandoned.alive or self._life.pid != os.getpid():
            return
        if self._life.here:
            raise ConfigError(
                f"{self._name} cannot be closed from a callback of its own: that thread would wait for itself"
            )
        ended = self._life.end(self._leave_s)
        self._abandoned.detach()
        atexit.unregister(self._at_exit)
        if not ended:
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

    def _begin(self, call: Call[Any]) -> None:
        self._life.unanswered.add(call.answer)
        if not self._life.tell(call.begin):
            self._life.unanswered.discard(call.answer)
            raise ConfigError(f"{self._name} is closed")

    def _result(self, call: Call[T]) -> T:
        try:
            return call.answer.result()
        except EndedError as ended:
            raise ConfigError(f"{self._name} was closed before this call was over") from ended


def _leave_at_exit(life: Life, leave_s: float) -> None:
    if life.pid == os.getpid():
        life.end(leave_s)


def _abandoned(life: Life, name: str) -> None:
    # The wait at the interpreter's exit stays: it may come while the thread is still leaving.
    if life.pid == os.getpid():
        life.leave()  # without waiting: this may be any thread, the loop's too
        warnings.warn(f"{name} was never closed; what it holds is being ended", ResourceWarning, stacklevel=2)


def _seen(future: Future[Any]) -> asyncio.Future[Any]:
    """It, in this thread's event loop, which else reports an error that nobody looked at."""
    here = asyncio.wrap_future(future)
    here.add_done_callback(lambda done: done.cancelled() or done.exception())
    return here
