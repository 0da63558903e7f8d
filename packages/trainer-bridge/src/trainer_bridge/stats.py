"""What senders and receivers say about themselves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from trainer_bridge.session.peers import Presence


class Receipt(msgspec.Struct, frozen=True):
    """What `send` returns: the messages are accepted at the durability level asked for."""

    seqs: tuple[int, ...]
    """One sequence number for each rollout, unique within this producer."""


class SenderStats(msgspec.Struct, frozen=True, kw_only=True):
    """A sender at one instant. Counts are messages (one rollout each).

    `sent + inherited = acknowledged + dropped + pending`.
    """

    address: str
    producer: str
    """The producer id, 32 hex characters."""
    epoch: int
    sent: int
    """Accepted by `send`."""
    inherited: int
    """Found in the spool at the start, not settled by earlier processes."""
    acknowledged: int
    """Of both: acknowledged at the level asked for (`settle`)."""
    pending: int
    """Not acknowledged at that level yet."""
    in_flight: int
    """Of the pending: on the wire, the receiver has not said that it has them."""
    spooled: int
    """Of the pending: lie in the spool (0 without one)."""
    dropped: Mapping[str, int]
    """Given up because the receiver refuses them as invalid: reason -> count."""
    resent: int
    reconnects: int
    connected: bool
    disk_faults: int
    """Times that the disk did not take the note of what is settled. It costs repeated sending, no sample."""
    last_error: str
    """Empty: none so far."""
    where: str
    """Where pending messages lie, for people."""


class ProducerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One producer as its receiver sees it, over all its connections."""

    name: str
    producer: str
    """The producer id, 32 hex characters."""
    presence: Presence
    messages: int
    samples: int
    duplicates: int
    fenced: int
    rejected: int
    queued: int
    """Rollouts that wait for the consumer."""
    unsettled: int
    """Messages that it last reported as not settled."""


class ReceiverStats(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver at one instant.

    `messages + restored = queued + leased + trained + committed + dropped`. With the senders' counts it is
    the ledger of a run: what was sent is here, or a duplicate, or fenced, or still with its sender.
    """

    address: str
    messages: int
    """New rollouts that arrived since the start."""
    samples: int
    """Their parts."""
    tokens: int
    restored: int
    """Rollouts found in the store at the start that were not committed."""
    queued: int
    leased: int
    """Handed out, and neither committed nor given back yet."""
    trained: int
    """Committed by the trainer, and in no saved checkpoint yet (`commit_on="checkpoint"`)."""
    committed: int
    dropped: Mapping[str, int]
    """Dropped rollouts: reason -> count."""
    nacks: int
    """Rollouts given back."""
    groups_ready: int
    """Groups that `next_batch` could hand out."""
    groups_incomplete: int
    unavailable: int
    """Messages that a loaded checkpoint lacks and that their senders have forgotten: it is older than what
    they were told is saved, and there is no store to take them from."""
    duplicates: int
    """Repeated messages: same identity, or same rollout and attempt."""
    doubled: int
    """Of the duplicates: messages of their own, whose rollout had come in another one."""
    fenced: int
    """Messages of an attempt that a later attempt has replaced."""
    rejected: Mapping[str, int]
    """Refused messages: reason -> count."""
    unread: int
    """Messages left unread because their peer sent too many, ignored its credit, or is in quarantine."""
    quarantines: int
    """Times that a peer was put into quarantine for malformed messages."""
    stored: int
    """Rollouts in the store (0 without one)."""
    torn_bytes: int
    """Bytes of a torn record that was cut off the store at the start."""
    observers: int
    skipped_copies: int
    """Copies that slow observers did not get."""
    forgotten_rollouts: int
    """Rollout ids that deduplication no longer knows (`remember_rollouts`)."""
    producers: tuple[ProducerStats, ...]

    @property
    def unaccounted(self) -> int:
        """What the equation above is off by: 0, or there is a fault in this package."""
        ends = self.committed + sum(self.dropped.values())
        return self.messages + self.restored - self.queued - self.leased - self.trained - ends

    @property
    def lost_producers(self) -> tuple[str, ...]:
        """Names of producers that ended without BYE."""
        return tuple(p.name for p in self.producers if p.presence == "lost")
