"""`Ledger`: every message that arrived, exactly once, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import chain

from trainer_bridge.codec import Data
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import DataHead, Hello
from trainer_bridge.rollouts import RolloutIndex
from trainer_bridge.seqset import SeqSet, all_ranges
from trainer_bridge.session.passage import Passage
from trainer_bridge.session.peers import Accepted, Identity, Presence, Producer, StreamState
from trainer_bridge.session.watermark import Watermark

MAX_GAPS = 1 << 16
"""Holes in one epoch's sequence; a peer that makes more of them is broken or hostile."""
STRANGERS = 256
"""Producers that are gone and never sent anything: so many are remembered, for people to see."""


class Ledger:
    """Deduplication by (producer, epoch, sequence) and by (rollout, attempt), and the acknowledgement levels.

    A message whose rollout came under another identity (a re-run of a worker) follows that one: it is
    acknowledged together with it, and never delivered.

    Args:
        remember_rollouts: see `ReceiverConfig`.
        max_producers: see `ReceiverConfig`.
    """

    def __init__(self, remember_rollouts: int, max_producers: int) -> None:
        self.producers: dict[bytes, Producer] = {}
        self._max_producers = max_producers
        self._strangers: dict[bytes, None] = {}
        """Producers that are gone and never sent anything, the latest last."""
        self.rollouts = RolloutIndex(remember_rollouts)
        self.done = Watermark()
        """What the consumer is done with: ahead of `committed` while that waits for the disk or for a
        checkpoint; behind it after a return to an earlier checkpoint."""
        self.dropped = Watermark()
        """Of `done`: what ended since the start without being trained on. No checkpoint changes that."""
        self._expected = Watermark()
        """`done` of a checkpoint that was loaded: what lies below it must be there."""
        self.unavailable = 0
        """Messages that a loaded checkpoint lacks and that their senders have forgotten."""
        self._followers: dict[Identity, list[Identity]] = {}
        self._owners: dict[bytes, Identity] = {}
        """Rollout id -> the message that brought it, until that is committed."""
        self._open: dict[Identity, bytes] = {}
        """The same, backwards."""

    def claim(self, hello: Hello) -> Producer:
        """The producer that a HELLO speaks for, brought up to date with what it says.

        Raises:
            ProtocolError: a later process has opened the same identity, or the HELLO is not valid.
        """
        if not hello.streams:
            raise ProtocolError(ErrorCode.BAD_BODY, "HELLO of a producer names no epoch")
        if hello.peer not in self.producers and len(self.producers) >= self._max_producers:
            raise ProtocolError(
                ErrorCode.TOO_MANY_PRODUCERS,
                f"{len(self.producers)} producers are known already, and no more are taken (max_producers): "
                "give workers a spool, and they keep their identity when they are started again",
            )
        streams = {epoch: StreamState() for epoch, _ in hello.streams}
        known = self.producers.get(hello.peer)
        if known is not None:
            streams |= {epoch: state for epoch, state in known.streams.items() if epoch in streams}
        passage = Passage.of(hello, lambda epoch: streams[epoch].received)
        producer = self.producers.setdefault(hello.peer, Producer(hello.peer, hello.name))
        if hello.epoch < producer.epoch:
            raise ProtocolError(
                ErrorCode.FENCED,
                f"epoch {hello.epoch} of producer {hello.name} is over, epoch {producer.epoch} has been "
                "here: another process has opened the same spool since",
            )
        self._strangers.pop(hello.peer, None)
        producer.name = hello.name
        producer.epoch = hello.epoch
        # What HELLO does not name is settled: epochs that are over, and everything below `first` of the
        # others.
        producer.streams, producer.passage = streams, passage
        for epoch, first in hello.streams:
            self._pass_over(producer, epoch, 1, first - 1)
            for level in (streams[epoch].stored, streams[epoch].committed):
                level.raise_to(first - 1)
        return producer

    def pass_over(self, producer: Producer, holes: Iterable[tuple[int, int, int]]) -> bool:
        """Numbers that never come, as REPORT says: (epoch, first, last). True: that was not known."""
        news = False
        for epoch, first, last in holes:
            span = producer.passage.span(epoch)
            if span is None or (span.received.gaps >= MAX_GAPS and first > span.received.highest + 1):
                continue
            news = self._pass_over(producer, epoch, first, min(last, span.last)) or news
        return news

    def disconnect(self, producer: Producer, presence: Presence) -> None:
        """Its connection is gone."""
        producer.presence = presence
        producer.peer = None
        if not producer.kept:
            self._strangers[producer.id] = None
            if len(self._strangers) > STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest], self.producers[oldest]

    def is_new(self, producer: Producer, head: DataHead) -> bool:
        """False: the message is a repetition, which is counted.

        Raises:
            ProtocolError: its place in the sequence makes no sense.
        """
        span = producer.passage.span(head.epoch)
        if span is None or not 1 <= head.sequence <= span.last:
            raise ProtocolError(
                ErrorCode.BAD_SEQUENCE,
                f"message {head.sequence} of epoch {head.epoch}, which HELLO did not name",
            )
        received = span.received
        if head.sequence in received:
            producer.duplicates += 1
            return False
        if received.gaps >= MAX_GAPS and head.sequence > received.highest + 1:
            raise ProtocolError(ErrorCode.BAD_SEQUENCE, f"more than {MAX_GAPS} holes in epoch {head.epoch}")
        return True

    def accept(self, data: Data, nbytes: int) -> Accepted | None:
        """Take in a new, valid message. None: its rollout is here already, there is nothing to deliver."""
        head = data.head
        identity = Identity(head.producer, head.epoch, head.sequence)
        producer = self.producers[head.producer]
        producer.kept = True
        producer.stream(head.epoch).received.add(head.sequence)
        verdict = self.rollouts.judge(head.rollout_id, head.attempt)
        if verdict == "new":
            self.rollouts.take(head.rollout_id, head.attempt)
            producer.messages += 1
            producer.samples += len(data.samples)
            self._enqueue(producer, identity, head.rollout_id, nbytes)
            return Accepted(identity, data, nbytes)
        owner = self._owners.get(head.rollout_id)
        if verdict == "fenced":
            producer.fenced += 1
        else:
            producer.duplicates += 1
            producer.doubled += 1
            if owner is not None:
                self._follow(identity, owner)
                return None
        self.dropped.add(identity)
        self._finish(identity)
        return None

    def restore(self, head: DataHead, *, committed: bool, nbytes: int, trained: bool = True) -> Identity:
        """Take in a message that the store held at the start; in the order in which they were stored."""
        identity = Identity(head.producer, head.epoch, head.sequence)
        producer = self._producer(head.producer)
        producer.epoch = max(producer.epoch, head.epoch)
        stream = producer.stream(head.epoch)
        stream.received.add(head.sequence)
        stream.stored.add(head.sequence)
        self.rollouts.take(head.rollout_id, head.attempt)
        if committed:
            stream.committed.add(head.sequence)
            self.rollouts.finish(head.rollout_id, head.attempt, trained=trained)
            self.done.add(identity)
        else:
            self._enqueue(producer, identity, head.rollout_id, nbytes)
        return identity

    def restore_trimmed(self, done: Watermark, rollouts: Iterable[tuple[bytes, int, bool]]) -> None:
        """Take in what the store knows of records that it has deleted; comes before `restore`.

        Args:
            done: their messages.
            rollouts: of the latest of them: rollout id, attempt, and whether it was dropped.
        """
        for rollout_id, attempt, dropped in rollouts:
            self.rollouts.take(rollout_id, attempt)
            self.rollouts.finish(rollout_id, attempt, trained=not dropped)
        for producer_id, epoch, seqs in done.items():
            producer = self._producer(producer_id)
            producer.epoch = max(producer.epoch, epoch)
            stream = producer.stream(epoch)
            for level in (stream.received, stream.stored, stream.committed):
                level.update(seqs)
        self.done.update(done)

    def give_up(self, trimmed: Watermark) -> list[tuple[bytes, int, SeqSet]]:
        """After `load`: messages that the checkpoint lacks and whose records were deleted.

        They are counted, and over: the next checkpoint holds them. Returns (producer, epoch, numbers).
        """
        lost = self.done.lacks(trimmed)
        self.unavailable += sum(seqs.count(1, seqs.highest) for _, _, seqs in lost)
        self.done.update(trimmed)
        return lost

    def reopen(self, head: DataHead, nbytes: int) -> Identity:
        """Deliver a committed message again: the trainer went back to a checkpoint before it."""
        identity = Identity(head.producer, head.epoch, head.sequence)
        self._enqueue(self._producer(head.producer), identity, head.rollout_id, nbytes)
        return identity

    def load(
        self, done: Watermark, rollouts: Iterable[tuple[bytes, int]], dropped: AbstractSet[bytes]
    ) -> None:
        """Go on from a checkpoint: what it holds was committed, whatever was known here.

        What was dropped here before stays dropped: its sender may have been told.

        Args:
            done: what the checkpoint holds; it is kept, and changed.
            rollouts: (rollout id, attempt) of the latest of it.
            dropped: those of `rollouts` that were dropped.
        """
        missed = self._passed_over()
        self.rollouts.restart()
        for rollout_id, attempt in rollouts:
            if self.rollouts.judge(rollout_id, attempt) == "new":
                self.rollouts.take(rollout_id, attempt)
            self.rollouts.finish(rollout_id, attempt, trained=rollout_id not in dropped)
        for producer_id, epoch, seqs in done.items():
            stream = self._producer(producer_id).stream(epoch)
            for level in (stream.received, stream.stored, stream.committed):
                level.update(seqs)
            self._expected.put(producer_id, epoch, seqs)
        done.update(self.dropped)
        self.done = done
        self.unavailable = 0
        for producer_id, epoch, seqs in done.lacks(missed):
            self.unavailable += self._count_missed(producer_id, epoch, all_ranges(seqs))

    def mark_taken(self, identity: Identity, nbytes: int) -> None:
        """The consumer took a message out of the queue."""
        producer = self.producers[identity.producer]
        producer.queued -= 1
        producer.queued_bytes -= nbytes

    def mark_returned(self, identity: Identity, nbytes: int) -> None:
        """The consumer gave a message back: it is in the queue again."""
        producer = self.producers[identity.producer]
        producer.queued += 1
        producer.queued_bytes += nbytes

    def resolve(self, identity: Identity, rollout_id: bytes, attempt: int, *, trained: bool) -> None:
        """The consumer is done with a message; its commit may still wait for a disk or a checkpoint."""
        self.rollouts.finish(rollout_id, attempt, trained=trained)
        for each in (identity, *self._followers.get(identity, ())):
            self.done.add(each)
            if not trained:
                self.dropped.add(each)

    def latest_of(self, rollout_id: bytes) -> Identity | None:
        """The message of the latest attempt of a rollout that is here. None: it is committed, or unknown."""
        return self._owners.get(rollout_id)

    def mark_stored(self, identity: Identity) -> set[bytes]:
        """The message is on the store's disk; returns the producers that are to be told."""
        identities = (identity, *self._followers.get(identity, ()))
        for each in identities:
            self._stream(each).stored.add(each.sequence)
        return {each.producer for each in identities}

    def mark_committed(self, identity: Identity) -> set[bytes]:
        """The consumer is done with the message for good; returns the producers that are to be told."""
        rollout_id = self._open.pop(identity, None)
        if rollout_id is not None:
            del self._owners[rollout_id]
        identities = (identity, *self._followers.pop(identity, ()))
        for each in identities:
            self._finish(each)
        return {each.producer for each in identities}

    def _enqueue(self, producer: Producer, identity: Identity, rollout_id: bytes, nbytes: int) -> None:
        former = self._owners.get(rollout_id)
        if former is not None:
            # A later attempt replaces one that still waits; each is committed by itself.
            self._open.pop(former, None)
        self._owners[rollout_id] = identity
        self._open[identity] = rollout_id
        producer.queued += 1
        producer.queued_bytes += nbytes

    def _follow(self, identity: Identity, owner: Identity) -> None:
        self._followers.setdefault(owner, []).append(identity)
        if owner.sequence in self._stream(owner).stored:
            self._stream(identity).stored.add(identity.sequence)
        if owner in self.done:
            self.done.add(identity)
        if owner in self.dropped:
            self.dropped.add(identity)

    def _finish(self, identity: Identity) -> None:
        stream = self._stream(identity)
        stream.stored.add(identity.sequence)
        if stream.committed.add(identity.sequence):
            self.producers[identity.producer].settle_one()
        self.done.add(identity)

    def _producer(self, producer_id: bytes) -> Producer:
        producer = self.producers.setdefault(producer_id, Producer(producer_id, producer_id.hex()[:8]))
        producer.kept = True
        self._strangers.pop(producer_id, None)
        return producer

    def _pass_over(self, producer: Producer, epoch: int, first: int, last: int) -> bool:
        """What has not come of first..last never will. True: there is such."""
        stream = producer.stream(epoch)
        gaps = tuple(stream.received.missing(first, last))
        self.unavailable += self._count_missed(producer.id, epoch, gaps)
        for low, high in gaps:
            for level in (stream.received, stream.stored, stream.committed):
                level.add_range(low, high)
        return bool(gaps)

    def _passed_over(self) -> Watermark:
        """What never comes, as senders say: HELLO may be read before the checkpoint is loaded."""
        here, known, passed = Watermark(), Watermark(), Watermark()
        here.update(self.done)
        for identity in (*self._open, *chain.from_iterable(self._followers.values())):
            here.add(identity)
        for producer in self.producers.values():
            for epoch, stream in producer.streams.items():
                known.put(producer.id, epoch, stream.received)
        for lacked in here.lacks(known):
            passed.put(*lacked)
        return passed

    def _count_missed(self, producer_id: bytes, epoch: int, gaps: Iterable[tuple[int, int]]) -> int:
        """How many of these numbers the loaded checkpoint expects to be here.

        What it lacks of an epoch that it knows and is not here either is unavailable once its sender has
        forgotten it; what comes before the first that it knows belongs to earlier epochs.
        """
        expected = self._expected.of(producer_id, epoch)
        lowest = next(iter(all_ranges(expected)), None) if expected is not None else None
        if lowest is None:
            return 0
        return sum(max(high - max(low, lowest[0]) + 1, 0) for low, high in gaps)

    def _stream(self, identity: Identity) -> StreamState:
        return self.producers[identity.producer].stream(identity.epoch)
