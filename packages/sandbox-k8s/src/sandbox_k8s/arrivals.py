"""Starts of one client that are under way: when it closes they are given up, and undone."""

from collections.abc import Generator
from contextlib import contextmanager

import anyio

from .errors import ConfigError


class Arrivals:
    """What a client's `start` runs in."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._changed = anyio.Event()
        self._closed = False

    @contextmanager
    def one(self) -> Generator[None]:
        """For the time of one start, and of giving its sandbox an owner.

        Raises:
            ConfigError: The client is closing, or did before the block's end; then the block was cancelled.
        """
        if self._closed:
            raise ConfigError("this client is closing and takes no more sandboxes")
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
                self._changed.set()
                self._changed = anyio.Event()
        if scope.cancelled_caught:
            raise ConfigError("the client was closed while this sandbox was starting; nothing of it is left")

    async def end(self) -> None:
        """Give up all that are under way, and wait until they are undone."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()
        while self._scopes:
            await self._changed.wait()
