"""What a container printed, for as long as its pod exists."""

import asyncio
from collections.abc import AsyncGenerator

from .store import Store


class Log:
    """Lines with the times at which they came."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: list[tuple[str, bytes]] = []
        self._open = b""
        self._ended = False
        self._changed = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Add what was printed."""
        *whole, self._open = (self._open + data).split(b"\n")
        now = self._store.now(precise=True)
        self._lines += [(now, line + b"\n") for line in whole]
        self._tell()

    def end(self) -> None:
        """Nothing more will come."""
        if self._open:
            self._lines.append((self._store.now(precise=True), self._open))
        self._open, self._ended = b"", True
        self._tell()

    def tail(self, count: int) -> str:
        """The last lines, as a termination message takes them."""
        return b"".join(line for _, line in self._lines[-count:]).decode("utf-8", "replace")

    async def read(self, *, follow: bool, tail: int | None, timestamps: bool) -> AsyncGenerator[bytes]:
        """Lines from the start or the last ones, then those to come if they are wanted."""
        at = 0 if tail is None else max(0, len(self._lines) - tail)
        while True:
            changed = self._changed
            for when, line in self._lines[at:]:
                yield (when.encode() + b" " if timestamps else b"") + line
            at = len(self._lines)
            if self._ended or not follow:
                return
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
