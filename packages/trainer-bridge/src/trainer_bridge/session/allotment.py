"""`Allotment`: how much each producer may have waiting at the receiver."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_bridge.messages import Credit
from trainer_bridge.session.peers import Peer, Producer

STEPS_PER_QUEUE = 4
"""Credit moves by a quarter of the queue; less than that waits for the heartbeat."""
QUEUES_BEYOND = 16
"""While the consumer waits for a step that full queues keep from being completed, so many queues more may
come, over all producers together."""


class Allotment:
    """Bounds of the producers' queues: each its own, an even share of what may come, and room for a step.

    A bound on what waits is right as long as the consumer can take what waits. Members of groups that lack
    others it cannot take: without an end to the bound, 64 groups of 8 in turn from one worker fill a queue of
    256 and none is ever complete. So a full queue gets room while the consumer waits for groups, a quarter of
    a queue at a time.

    Args:
        queue_messages: see `ReceiverConfig`.
        queue_bytes: see `ReceiverConfig`.
    """

    def __init__(self, *, queue_messages: int, queue_bytes: int) -> None:
        self._messages = queue_messages
        self._bytes = queue_bytes
        self._share: int | None = None
        self._beyond: tuple[int, int] | None = None
        """Messages and bytes that each full queue may get in addition. None: nobody waits for groups."""

    def set(self, places: int | None, producers: Sequence[Producer], *, starved: bool) -> bool:
        """Say how much may come in all, and whether the consumer waits. True: credits may have changed.

        Args:
            places: rollouts, shared evenly, rounded up, so that at most one per producer is given too many.
                None: only the queues bound it.
            producers: those that are connected.
            starved: the consumer waits for groups that are not complete.
        """
        share = None if places is None else -(-places // max(len(producers), 1))
        beyond = self._room_beyond(producers) if starved else None
        changed = (share, beyond) != (self._share, self._beyond)
        self._share, self._beyond = share, beyond
        return changed

    def credit(self, producer: Producer, session: int) -> Credit:
        """What a producer may be told now."""
        nbytes = max(self._bytes - producer.queued_bytes, 0)
        if self._beyond is not None:
            nbytes = nbytes or self._beyond[1]
        return Credit(session, producer.passage.limit(self.places(producer)), nbytes)

    def places(self, producer: Producer) -> int:
        """Messages of a producer that may come."""
        places = max(self._messages - producer.queued, 0)
        if self._beyond is not None:
            places = places or self._beyond[0]
        return places if self._share is None else min(places, self._share)

    def has_moved(self, peer: Peer, credit: Credit) -> bool:
        """True: a credit differs enough from what the peer was last told to be said at once."""
        moved = abs(credit.sequence_limit - peer.sequence_limit)
        messages = moved * STEPS_PER_QUEUE >= self._messages
        if self._share is not None:  # it may be far smaller than the queue
            messages = messages or (moved > 0 and moved * STEPS_PER_QUEUE >= self._share)
        nbytes = abs(credit.byte_limit - peer.byte_limit) * STEPS_PER_QUEUE >= self._bytes
        return messages or nbytes or (credit.byte_limit == 0) != (peer.byte_limit == 0)

    @property
    def is_plain(self) -> bool:
        """True: only the queues bound what may come."""
        return self._share is None and self._beyond is None

    def is_beyond(self, producer: Producer) -> bool:
        """True: its queue is full, and it may send all the same."""
        return self._beyond is not None and self._is_full(producer)

    def ceiling(self, producers: Sequence[Producer]) -> str:
        """Why no more room is given to full queues, for people. Empty: it is, or nobody waits for it."""
        full = [producer for producer in producers if self._is_full(producer)]
        if not full or self._beyond is None or 0 not in self._beyond:
            return ""
        messages, nbytes = sum(p.queued for p in full), sum(p.queued_bytes for p in full)
        return (
            f"{messages} rollouts ({nbytes} bytes) of {len(full)} producers wait and make no step, and "
            f"{QUEUES_BEYOND} queues are full beyond their own: let workers finish groups before they begin "
            "others, ask for fewer groups, or raise ReceiverConfig.queue_messages "
            f"({self._messages}) or queue_bytes ({self._bytes})"
        )

    def _is_full(self, producer: Producer) -> bool:
        return producer.queued >= self._messages or producer.queued_bytes >= self._bytes

    def _room_beyond(self, producers: Sequence[Producer]) -> tuple[int, int]:
        full = max(sum(self._is_full(producer) for producer in producers), 1)
        messages = sum(max(p.queued - self._messages, 0) for p in producers)
        nbytes = sum(max(p.queued_bytes - self._bytes, 0) for p in producers)
        return _part(self._messages, messages, full), _part(self._bytes, nbytes, full)


def _part(queue: int, beyond: int, full: int) -> int:
    """A quarter of a queue, or what is left for each full one; rounded up, so that it counts as a move."""
    left = max(QUEUES_BEYOND * queue - beyond, 0)
    return min(-(-queue // STEPS_PER_QUEUE), -(-left // full))
