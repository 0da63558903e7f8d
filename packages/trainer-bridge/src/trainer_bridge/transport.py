"""What the bridge needs of a network: two small protocols. Messages arrive whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from trainer_bridge.payload import Buffer


class Event(NamedTuple):
    """Something that happened to a client's connection."""

    kind: Literal["up", "down", "message", "unknown"]
    """`unknown`: the peer is there and will not have us, or we it: the keys do not fit."""
    frames: Sequence[Buffer] = ()
    text: str = ""
    """What went wrong, if something did."""


class Incoming(NamedTuple):
    """A message at a server."""

    peer: bytes
    """Routing id of the connection it came on; a new connection has a new one."""
    frames: Sequence[Buffer]
    user: str = ""
    """Name of the key it was authenticated by; empty without keys."""


class ClientTransport(Protocol):
    """The connecting side. All methods but `wake` belong to one thread."""

    def wait(self, timeout_s: float) -> None:
        """Return when there is an event, when woken, or after the time."""
        ...

    def wake(self) -> None:
        """End a `wait`, now or the next; safe from any thread."""
        ...

    def events(self, limit: int) -> list[Event]:
        """What happened, oldest first, at most `limit`; never waits."""
        ...

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Give a message to the network. False: it has no room or no connection, nothing was sent.

        The buffers must never be written to again.
        """
        ...

    def reopen(self) -> None:
        """Give the connection up, forget what was queued on it, and begin another."""
        ...

    def close(self) -> None:
        """Free everything at once; what is queued is thrown away."""
        ...


class ServerTransport(Protocol):
    """The binding side. All methods but `wake` belong to one thread."""

    @property
    def address(self) -> str:
        """Where clients connect to."""
        ...

    @property
    def refused(self) -> int:
        """Connections that were turned away because their key is not in the allow-list."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when a message is there, when woken, or after the time."""
        ...

    def wake(self) -> None:
        """End a `wait`, now or the next; safe from any thread."""
        ...

    def receive(self, limit: int) -> list[Incoming]:
        """Messages that are there, oldest first, at most `limit`; never waits."""
        ...

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> Literal["sent", "full", "gone"]:
        """Give a message to the network. `full`: the peer does not read. `gone`: it is not there."""
        ...

    def close(self) -> None:
        """Stop listening and free everything; what was just sent may take a moment to leave."""
        ...
