"""A network inside one process, for tests and simulations: loses, repeats and reorders as it is told.

Nothing here waits: whoever drives it moves messages and time by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from trainer_bridge.payload import Buffer
from trainer_bridge.transport import Event, Incoming

Fault = Callable[[Sequence[Buffer]], Sequence[Sequence[Buffer]]]
"""Called for each message that enters the network; returns what comes out of it (nothing, it, it twice,
...)."""


def faultless(frames: Sequence[Buffer]) -> Sequence[Sequence[Buffer]]:
    """Every message comes out once, as it went in."""
    return (frames,)


class MemoryServer:
    """`ServerTransport` for any number of `MemoryClient`s."""

    def __init__(self, name: str = "memory://server") -> None:
        self._name = name
        self._inbox: list[Incoming] = []
        self._clients: dict[bytes, MemoryClient] = {}
        self._connections = 0

    @property
    def address(self) -> str:
        """A name for people."""
        return self._name

    @property
    def refused(self) -> int:
        """None: there are no keys here."""
        return 0

    def wait(self, timeout_s: float) -> None:
        """Returns at once: time is moved by whoever drives the test."""

    def wake(self) -> None:
        """Nothing waits here."""

    def attach(self, client: MemoryClient) -> bytes:
        """A client connects; returns its routing id."""
        self._connections += 1
        peer = self._connections.to_bytes(5, "big")
        self._clients[peer] = client
        return peer

    def detach(self, peer: bytes) -> None:
        """A client's connection is gone."""
        self._clients.pop(peer, None)

    def arrive(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Put a message into the inbox."""
        self._inbox.append(Incoming(peer, frames))

    def receive(self, limit: int) -> list[Incoming]:
        """Messages that are there, oldest first, at most `limit`."""
        found, self._inbox = self._inbox[:limit], self._inbox[limit:]
        return found

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> Literal["sent", "full", "gone"]:
        """Give a message to the network."""
        client = self._clients.get(peer)
        if client is None:
            return "gone"
        client.arrive(frames)
        return "sent"

    def close(self) -> None:
        """Every client loses its connection."""
        for client in list(self._clients.values()):
            client.cut()


class MemoryClient:
    """`ClientTransport` to a `MemoryServer`.

    Args:
        server: where to connect to, at once.
        outward: faults on the way to the server.
        inward: faults on the way back.
    """

    def __init__(
        self, server: MemoryServer, *, outward: Fault = faultless, inward: Fault = faultless
    ) -> None:
        self._server = server
        self._outward = outward
        self._inward = inward
        self._events: list[Event] = []
        self._peer: bytes | None = None
        self.reopen()

    def wait(self, timeout_s: float) -> None:
        """Returns at once: time is moved by whoever drives the test."""

    def wake(self) -> None:
        """Nothing waits here."""

    def arrive(self, frames: Sequence[Buffer]) -> None:
        """A message from the server enters the network."""
        self._events.extend(Event("message", each) for each in self._inward(frames))

    def events(self, limit: int) -> list[Event]:
        """What happened, oldest first, at most `limit`."""
        found, self._events = self._events[:limit], self._events[limit:]
        return found

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Give a message to the network."""
        if self._peer is None:
            return False
        for each in self._outward(frames):
            self._server.arrive(self._peer, each)
        return True

    def cut(self) -> None:
        """The connection breaks; what was on the way to the client is lost."""
        if self._peer is not None:
            self._server.detach(self._peer)
            self._peer = None
        self._events = [Event("down")]

    def reopen(self, server: MemoryServer | None = None) -> None:
        """Connect anew, to another server if one is given (a restarted receiver)."""
        if self._peer is not None:
            self.cut()
        self._server = server or self._server
        self._peer = self._server.attach(self)
        self._events.append(Event("up"))

    def close(self) -> None:
        """Disconnect."""
        self.cut()
        self._events.clear()
