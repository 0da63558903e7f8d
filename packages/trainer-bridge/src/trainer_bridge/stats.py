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

    `sent + inherited = acknowledged + dropped + lost + pending`.

    Attributes:
        address: The receiver's, as given.
        producer: The producer id, 32 hex characters.
        epoch: Counts the processes that have used this producer id: its messages are numbered anew in each.
        sent: Accepted by `send`.
        inherited: In the spool at the start and not settled by earlier processes; those that are lost
            included.
        acknowledged: Of both: acknowledged at the level asked for (`settle`).
        pending: Not acknowledged at that level yet.
        in_flight: Of the pending: on the wire, the receiver has not said that it has them.
        spooled: Of the pending: lie in the spool (0 without one).
        dropped: Given up because the receiver refuses what they say: reason -> count.
        lost: Their records in the spool are damaged or missing, so that nobody can send them.
        damaged: Times that the receiver says that a message arrived damaged; it is sent again, for as long as
            it takes. `last_error` names the latest.
        resent: Messages that were sent again, after a lost connection or without an acknowledgement.
        reconnects: Times that a session began anew.
        connected: True: the receiver is there, and has said WELCOME.
        disk_faults: Times that the disk did not take the note of what is settled or did not give it back, did
            not delete what is settled, or did not give back a message just then (it is tried again). It costs
            repeated sending, no sample.
        unreadable: Messages of the receiver that could not be read: damaged on the way, or of a kind that is
            not known here. What they said is said again.
        event_faults: Exceptions that came out of `on_event`; the first is logged.
        last_error: The latest that went wrong, for people. Empty: nothing so far.
        farewell: What the receiver said when it or this sender ended the session, for people. Empty: nothing
            yet.
        where: Where pending messages lie, for people. Empty: there are none.
    """

    address: str
    producer: str
    epoch: int
    sent: int
    inherited: int
    acknowledged: int
    pending: int
    in_flight: int
    spooled: int
    dropped: Mapping[str, int]
    lost: int
    damaged: int
    resent: int
    reconnects: int
    connected: bool
    disk_faults: int
    unreadable: int
    event_faults: int
    last_error: str
    farewell: str
    where: str


class ProducerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One producer as its receiver sees it, over all its connections.

    Attributes:
        name: For people, as the sender chose it; two may share one.
        producer: The producer id, 32 hex characters.
        presence: `connected`; `finished`: it said BYE; `lost`: silent for `peer_timeout_s`, or replaced
            without a BYE; `away`: known from the store only.
        messages: New rollouts that it sent.
        samples: Their parts.
        duplicates: Its messages that came again.
        fenced: Its messages of an attempt that a later one has replaced.
        rejected: Its messages that were refused.
        queued: Rollouts that wait for the consumer.
        unsettled: Messages that it last reported as not settled; of one that has finished, less what was
            committed since.
    """

    name: str
    producer: str
    presence: Presence
    messages: int
    samples: int
    duplicates: int
    fenced: int
    rejected: int
    queued: int
    unsettled: int


class ReceiverStats(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver at one instant.

    `messages + restored = queued + leased + trained + committed + dropped`. With the senders' counts it is
    the ledger of a run: what was sent is here, or a duplicate, or fenced, or still with its sender.

    Attributes:
        address: Where senders connect to.
        messages: New rollouts that arrived since the start.
        samples: Their parts.
        tokens: Their tokens.
        restored: Rollouts found in the store at the start that were not committed.
        queued: Rollouts that wait for the trainer.
        leased: Handed out, and neither committed nor given back yet.
        trained: Committed by the trainer, and in no saved checkpoint yet (`commit_on="checkpoint"`).
        committed: Rollouts that are done with for good.
        dropped: Dropped rollouts: reason -> count.
        nacks: Rollouts given back.
        groups_ready: Groups that `next_batch` could hand out.
        groups_incomplete: Groups that wait for members.
        groups_unsized: Of these: nobody has said how many rollouts they have, so that they are never
            complete.
        oldest_incomplete_s: Seconds since the oldest of these began; 0.0: there is none.
        credit_beyond_queue: Rollouts that were taken though the queue of their producer was full: the
            consumer waited for groups, and their members could not come otherwise.
        unavailable: Messages that a loaded checkpoint lacks and that their senders have forgotten: it is
            older than what they were told is saved, and there is no store to take them from, or it has
            deleted them.
        duplicates: Repeated messages: same identity, or same rollout and attempt.
        doubled: Of the duplicates: messages of their own, whose rollout had come in another one.
        fenced: Messages of an attempt that a later attempt has replaced.
        rejected: Refused messages: reason -> count.
        unread: Messages left unread because their peer sent too many, ignored its credit, or is in
            quarantine.
        quarantines: Times that a peer was put into quarantine for malformed messages.
        connections_refused: Connections turned away because their key is not in the allow-list; one peer
            tries again and again.
        stored: Rollouts in the store (0 without one).
        trimmed: Rollouts that were in the store, and were deleted as `keep_committed` says; they stay known.
        store_bytes: Bytes of the store's segments (0 without one).
        store_left_bytes: Bytes until the quota or the disk is full. None: there is no store.
        store_faults: Times that a segment of the store could not be deleted; it is tried again.
        store_damaged: Records of the store that are damaged or missing. Those that were not committed are in
            `dropped`, as `unreadable`; each place has a dead letter.
        letters_not_kept: Dead letters that were not written down: the catalogue is full, or its file damaged.
        event_faults: Exceptions that came out of `on_event`; the first is logged.
        torn_bytes: Bytes of a torn record that was cut off the store at the start.
        observers: Observers with a live connection.
        skipped_copies: Copies that slow observers did not get.
        forgotten_rollouts: Rollout ids that deduplication no longer knows (`remember_rollouts`).
        producers: Everyone who sends or has sent.
    """

    address: str
    messages: int
    samples: int
    tokens: int
    restored: int
    queued: int
    leased: int
    trained: int
    committed: int
    dropped: Mapping[str, int]
    nacks: int
    groups_ready: int
    groups_incomplete: int
    groups_unsized: int
    oldest_incomplete_s: float
    credit_beyond_queue: int
    unavailable: int
    duplicates: int
    doubled: int
    fenced: int
    rejected: Mapping[str, int]
    unread: int
    quarantines: int
    connections_refused: int
    stored: int
    trimmed: int
    store_bytes: int
    store_left_bytes: int | None
    store_faults: int
    store_damaged: int
    letters_not_kept: int
    event_faults: int
    torn_bytes: int
    observers: int
    skipped_copies: int
    forgotten_rollouts: int
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
