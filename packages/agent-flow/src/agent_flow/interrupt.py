"""Ctrl-C, SIGTERM and SIGHUP: the first one ends the run in order, the next ones only make it hurry."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from agent_flow.errors import unwrapped


class Interrupt:
    """Whether the run was interrupted, and the scope that this cancels.

    The handlers stand until everything is closed, so that a second Ctrl-C never tears the clean-up.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._scopes: list[anyio.CancelScope] = []
        self.happened = anyio.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Take the signals for the time of the context."""
        with unwrapped():
            async with anyio.create_task_group() as group:
                await group.start(self._watch)
                try:
                    yield
                finally:
                    group.cancel_scope.cancel()

    def scope(self) -> anyio.CancelScope:
        """A scope that an interrupt cancels."""
        scope = anyio.CancelScope()
        self._scopes.append(scope)
        if self.happened.is_set():
            scope.cancel()
        return scope

    async def _watch(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                if self.happened.is_set():
                    self._tell("already stopping")
                    continue
                self.happened.set()
                self._tell("interrupted: stopping sandboxes, keeping samples")
                for scope in self._scopes:
                    scope.cancel()
