"""`Holes`: numbers that a receiver waits for and that never come, as a sender's REPORT names them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainer_bridge.seqset import SeqSet
from trainer_bridge.session.streams import Streams
from trainer_bridge.wire_types import MAX_HOLES

Hole = tuple[int, int, int]
"""Epoch, first, last."""


class Holes:
    """Which holes there are, which of them were told, and which are in doubt.

    A hole is what is settled at the sender (lost, dropped, or committed under an earlier receiver) while this
    receiver does not have it. Once it knows of it, it acknowledges it as received.

    A message that was given up because the receiver refused it may have arrived all the same, in a copy that
    was still on its way. It is no hole before that would be known: else the receiver's answer says nothing.

    Args:
        streams: the sender's epochs.
        doubt_s: so long.
    """

    def __init__(self, streams: Streams, doubt_s: float) -> None:
        self._streams = streams
        self._doubt_s = doubt_s
        self._doubted: dict[int, tuple[int, float]] = {}
        """Message -> error code, and when the doubt ends."""
        self._told: tuple[Hole, ...] = ()

    def doubt(self, seq: int, code: int, now_s: float) -> None:
        """A message was given up after refusals with this error code."""
        self._doubted[seq] = code, now_s + self._doubt_s

    def tick(self, now_s: float) -> None:
        """Let time pass."""
        for seq in [seq for seq, (_, until_s) in self._doubted.items() if now_s >= until_s]:
            del self._doubted[seq]

    def on_greeting(self) -> None:
        """A new session begins. HELLO names holes too, so that nothing is in doubt any more."""
        self._doubted.clear()
        self._told = ()

    def take_arrived(self, received: SeqSet) -> list[int]:
        """Error codes of messages that were in doubt and have arrived after all."""
        return [self._doubted.pop(seq)[0] for seq in [seq for seq in self._doubted if seq in received]]

    def are_news(self, settled: SeqSet, received: SeqSet, passed: int) -> bool:
        """Whether a REPORT is to go out now; arguments as `tell`."""
        return not set(self._lowest(settled, received, passed)) <= set(self._told)

    def tell(self, settled: SeqSet, received: SeqSet, passed: int) -> tuple[Hole, ...]:
        """The lowest holes, as REPORT names them.

        Args:
            settled: what needs no care of the sender's any more.
            received: what the receiver of this connection has.
            passed: every number up to here was sent, or is settled.
        """
        self._told = self._lowest(settled, received, passed)
        return self._told

    def _lowest(self, settled: SeqSet, received: SeqSet, passed: int) -> tuple[Hole, ...]:
        return tuple(itertools.islice(self._find(settled, received, passed), MAX_HOLES))

    def _find(self, settled: SeqSet, received: SeqSet, passed: int) -> Iterator[Hole]:
        at = received.upto + 1
        if next(settled.without(received, at, passed), None) is None:
            return
        doubted = SeqSet()
        for seq in self._doubted:
            doubted.add(seq)
        for epoch, first, last in self._streams.spans(passed):
            for low, high in settled.without(received, max(first, at), min(last, passed)):
                for hole in doubted.missing(low, high):
                    yield epoch, *hole
