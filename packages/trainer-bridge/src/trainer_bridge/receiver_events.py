"""`ReceiverEvent`: what a user of a receiver may want to show, and how it is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from trainer_bridge.errors import ProtocolError
from trainer_bridge.session.peers import Peer, Presence, Producer

REPEAT_S = 10.0
"""Of one peer's refused messages, for one reason, is told so often at most."""
KEPT = 64
"""Peers and reasons that are told apart; peers choose their names, so there must be an end."""


class ReceiverEvent(NamedTuple):
    """Something a user of the receiver may want to show. Told in its own thread: return quickly."""

    kind: Literal["producer", "rejected", "dropped", "store", "waiting"]
    """`waiting`: what the consumer waits for, and why it may not come."""
    text: str


def name_of(connection: bytes, peer: Peer | None, user: str) -> str:
    """A peer as people can find it again: by its role, name and id, else by its key, else by its connection.

    Args:
        connection: its routing id.
        peer: None: it was not welcomed.
        user: name of its key; empty without keys.
    """
    if peer is not None:
        return f"{peer.role} {peer.name} ({peer.id.hex()[:8]})"
    return f"key {user} (without a session)" if user else f"connection {connection.hex()} (without a session)"


class _Refused(msgspec.Struct):
    error: ProtocolError
    count: int = 0
    told_s: float | None = None


class Refusals:
    """Messages that were refused: the first of a peer and reason is told at once, the others as a number."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Refused] = {}

    def add(self, who: str, error: ProtocolError) -> None:
        """A message was refused."""
        key = (who, int(error.code))
        if key not in self._open and len(self._open) >= KEPT:
            key = ("others", 0)
        refused = self._open.setdefault(key, _Refused(error))
        refused.error = error
        refused.count += 1

    def take(self, now_s: float) -> list[ReceiverEvent]:
        """What is to be told now."""
        events: list[ReceiverEvent] = []
        for (who, code), refused in list(self._open.items()):
            if refused.told_s is not None and now_s - refused.told_s < REPEAT_S:
                continue
            if not refused.count:
                del self._open[who, code]
                continue
            one = refused.count == 1
            what = f"a message of {who} was" if one else f"{refused.count} messages of {who} were"
            last = "" if one else ", the last"
            events.append(ReceiverEvent("rejected", f"{what} refused{last}: {refused.error}"))
            refused.count, refused.told_s = 0, now_s
        return events


class Changes:
    """Compares with what was told before."""

    def __init__(self) -> None:
        self._presence: dict[bytes, Presence] = {}
        self._dropped: set[str] = set()

    def of_producers(self, producers: Mapping[bytes, Producer]) -> list[ReceiverEvent]:
        """Who came, finished or was lost."""
        events: list[ReceiverEvent] = []
        if len(self._presence) > len(producers):  # some were forgotten
            self._presence = {each: self._presence[each] for each in producers if each in self._presence}
        for producer in producers.values():
            if self._presence.get(producer.id) != producer.presence:
                self._presence[producer.id] = producer.presence
                if producer.presence != "away":
                    who = f"{producer.name} ({producer.id.hex()[:8]})"
                    events.append(ReceiverEvent("producer", f"producer {who} {producer.presence}"))
        return events

    def of_drops(self, reasons: Iterable[str]) -> list[ReceiverEvent]:
        """Reasons that rollouts are dropped for, each once."""
        new = [reason for reason in reasons if reason not in self._dropped]
        self._dropped.update(new)
        return [
            ReceiverEvent("dropped", f"rollouts are dropped: {reason} (counted from now on)")
            for reason in new
        ]
