"""Settings of both ends."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainer_bridge.errors import ConfigError
from trainer_bridge.options import check_options

Durability = Literal["none", "async", "sync"]
"""When `send` returns. `none`: in the memory of this process, or written without ever asking the disk.
`async`: written to the spool file; the disk is asked within 5 ms, so that a crash of the process loses
nothing and a crash of the machine at most those 5 ms. `sync`: on the disk."""

SettleLevel = Literal["received", "stored", "committed"]
"""The acknowledgement after which a sender may forget a sample."""

PartialGroups = Literal["wait", "drop", "deliver"]
"""What becomes of a group that is not complete at its deadline. `wait`: nothing, it is counted. `drop`: its
rollouts are dropped, and counted. `deliver`: it is handed out as it is if it has `group_minimum` rollouts,
else dropped."""

CommitOn = Literal["commit", "checkpoint"]
"""When senders hear that a rollout is committed, and forget it. `commit`: at once. `checkpoint`: when the
trainer says that a checkpoint which knows of the commit is saved (`SampleReceiver.checkpoint_saved`): senders
then hold what came since the last one, so give them a spool."""

KeepCommitted = Literal["all", "checkpoint", "none"]
"""Which committed rollouts stay in the receiver's store. `all`: every one, for `read_samples` and `replay`.
`checkpoint`: those that a trainer needs that goes back to one of the `keep_checkpoints` checkpoints that were
saved last (`SampleReceiver.checkpoint_saved`). `none`: none; a trainer cannot go back. Segments are deleted
whole, oldest first, once nothing in them is to be kept. What was in them stays known: a message that comes
again is a duplicate."""

RankSplit = Literal["groups", "rollouts"]
"""How a step is shared out over ranks: `groups` keeps each group on one rank, `rollouts` does not. Either way
each rank gets as many as the others (`rollouts`: or one less), and about as many tokens."""

MAX_HEAD_BYTES = 1 << 20
"""Upper bound of a head frame, metadata of all parts included."""
MAX_PAYLOAD_BYTES = 1 << 29
"""Default upper bound of a payload frame (512 MiB)."""
MAX_PARTS = 1024
"""Upper bound of the parts of one rollout in one message."""
MAX_GROUP_SIZE = 1 << 16
"""Upper bound of the rollouts of one group."""
MAX_WINDOW = (1 << 32) - 1
"""Upper bound of `window`, as messages carry it."""
MAX_INTERVAL_S = 1e6
"""Upper bound of an interval: libzmq counts milliseconds in 32 bits."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of the protocol, in seconds. The defaults suit a cluster; tests shorten them.

    Attributes:
        heartbeat_s: CONTROL, CREDIT and ACK are repeated at this interval, REPORT is sent at it.
        peer_timeout_s: A peer that was silent for so long counts as lost. Long, because a trainer may hold
            the GIL for seconds.
        greet_again_s: HELLO is repeated at this interval until WELCOME or ERROR comes.
        resend_s: A sample that was sent and not acknowledged as received is sent again after this time (same
            identity).
    """

    heartbeat_s: float = 1.0
    peer_timeout_s: float = 30.0
    greet_again_s: float = 1.0
    resend_s: float = 10.0

    def __post_init__(self) -> None:
        values = msgspec.structs.asdict(self)
        check_options(Timing, values, ConfigError)
        for name, value in values.items():
            if not 0 < value <= MAX_INTERVAL_S:
                raise ConfigError(
                    f"{name} is {value}: give seconds, more than 0 and at most {MAX_INTERVAL_S:g}"
                )
        if self.peer_timeout_s <= self.heartbeat_s:
            raise ConfigError(
                f"peer_timeout_s is {self.peer_timeout_s}: give more than heartbeat_s ({self.heartbeat_s}), "
                "or every peer counts as lost between two heartbeats"
            )


class SenderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleSender` that are rarely changed.

    Attributes:
        settle: The acknowledgement after which a sample may be forgotten. `received`: the receiver has it, in
            memory. `stored`: it is on the receiver's disk (a receiver with `out`). `committed`: the trainer
            is done with it.
        max_unsettled: Without a spool: messages kept in memory for resending; `send` waits when there are
            more.
        max_unsettled_bytes: Without a spool: the same in bytes.
        spool_quota_bytes: With a spool: `send` waits when the unsettled part of the spool is larger.
        segment_bytes: A spool segment is closed, and the next begun, when it is this large.
        keep_segments: True: segments stay on disk after everything in them is settled.
        max_payload_bytes: `send` refuses a rollout with more bytes of arrays (`UnsendableError`).
        insecure: True: allow a peer that is not on this machine, without encryption or authentication.
        timing: Intervals of the protocol.
    """

    settle: SettleLevel = "committed"
    max_unsettled: int = 4096
    max_unsettled_bytes: int = 1 << 30
    spool_quota_bytes: int = 64 << 30
    segment_bytes: int = 128 << 20
    keep_segments: bool = False
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    insecure: bool = False
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        check_options(SenderConfig, msgspec.structs.asdict(self), ConfigError)
        _check_least(self, 1, "max_unsettled", "max_unsettled_bytes", "spool_quota_bytes", "segment_bytes")
        _check_least(self, 1, "max_payload_bytes")


class ReceiverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleReceiver` that are rarely changed.

    Attributes:
        window: Messages that a producer may keep on the wire; the smaller of this and the sender's own window
            holds.
        queue_messages: Per producer: rollouts that may wait to be handed out; credit for more is given as
            they are taken. Only while `next_batch` lacks groups that full queues keep from being completed,
            more is taken: up to 16 such queues, over all producers together.
        queue_bytes: Per producer: the same in bytes.
        observer_copies: Copies on the way to one observer (`tail`, `SampleObserver`) that it has not
            confirmed; further ones are skipped for it, and counted (`skipped_copies_total`). 0: observers see
            no samples.
        remember_rollouts: Rollout ids kept for deduplication, committed ones too; the oldest are forgotten
            first, and counted (`rollouts_forgotten_total`). A rollout that was forgotten and comes again in
            another message is new.
        max_producers: Producers that are remembered; one more is refused. Of those that are gone and never
            sent anything, the latest 256 are.
        group_size: Rollouts that make a group complete, where the sender does not say (`send_group`,
            `group_size=`). None: the sender has to.
        group_deadline_s: Seconds from a group's first rollout until it is given up as incomplete. None:
            never.
        partial_groups: What becomes of a group that is not complete at its deadline. `wait`: nothing, it is
            counted (`groups_overdue_total`). `drop`: its rollouts are dropped, and counted. `deliver`: it is
            handed out as it is if it has `group_minimum` rollouts, else dropped.
        group_minimum: With `partial_groups="deliver"`: fewest rollouts of a group that is handed out
            incomplete; with fewer it is dropped.
        max_staleness: Weight versions that a rollout's oldest trained token may lie behind the published one;
            older ones, those of an unknown version or of another policy run are dropped, and counted. None:
            no rule.
        max_nacks: A rollout is given back so often; after that it goes to the dead letters.
        commit_on: When senders hear that a rollout is committed, and forget it. `commit`: at once.
            `checkpoint`: when the trainer says that a checkpoint which knows of the commit is saved
            (`SampleReceiver.checkpoint_saved`); they hold what came since the last one, so give them a spool.
        rank_split: How a step of `next_batch(world=n)` is shared out over data-parallel ranks. `groups`: each
            group lies on one rank. `rollouts`: the rollouts of a group may lie on several. Either way each
            rank gets as many as the others (`rollouts`: or one less), and about as many tokens.
        patience_s: `next` and `next_batch` raise `StuckError` when nothing can come, and nothing has moved
            for so long. None: they wait on. Waiting for a first worker, or for one that is slow, is not being
            stuck.
        segment_bytes: A segment of the store is closed, and the next begun, when it is this large.
        keep_committed: Which committed rollouts stay in the store. `all`: every one. `checkpoint`: those that
            a trainer needs that goes back to one of the last `keep_checkpoints` saved checkpoints. `none`:
            none. What is deleted stays known: a message that comes again is a duplicate.
        keep_checkpoints: With `keep_committed="checkpoint"`: a trainer may go back to so many checkpoints,
            the latest included. As many as it keeps itself (`save_total_limit`, `max_to_keep`).
        store_quota_bytes: The store gives no more credit when it would grow beyond this (what is on its way
            is still stored), and goes on when segments were deleted. None: it grows until the disk is full,
            which is an error.
        max_payload_bytes: A larger message ends its connection, before memory is taken for it. Senders learn
            it in WELCOME.
        messages_per_s: Per connection: messages beside new samples (greetings, reports, repetitions) that are
            read per second; the rest is left unread, and counted.
        malformed_limit: So many malformed messages within `quarantine_s`, and their peer is left unread for
            `quarantine_s`.
        quarantine_s: Seconds: the span in which malformed messages are counted, and the time that their peer
            is left unread. 0: no quarantine.
        insecure: True: allow a bind that other machines can reach, without encryption or authentication.
        timing: Intervals of the protocol.
    """

    window: int = 256
    queue_messages: int = 256
    queue_bytes: int = 256 << 20
    observer_copies: int = 64
    remember_rollouts: int = 1 << 20
    max_producers: int = 1 << 16
    group_size: int | None = None
    group_deadline_s: float | None = None
    partial_groups: PartialGroups = "wait"
    group_minimum: int = 1
    max_staleness: int | None = None
    max_nacks: int = 3
    commit_on: CommitOn = "commit"
    rank_split: RankSplit = "groups"
    patience_s: float | None = 300.0
    segment_bytes: int = 128 << 20
    keep_committed: KeepCommitted = "all"
    keep_checkpoints: int = 1
    store_quota_bytes: int | None = None
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    messages_per_s: int = 1000
    malformed_limit: int = 32
    quarantine_s: float = 60.0
    insecure: bool = False
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        check_options(ReceiverConfig, msgspec.structs.asdict(self), ConfigError)
        _check_least(self, 1, "window", "queue_messages", "queue_bytes", "remember_rollouts", "max_producers")
        _check_least(self, 1, "group_size", "group_minimum", "segment_bytes", "keep_checkpoints")
        _check_least(self, 1, "max_payload_bytes", "messages_per_s", "malformed_limit")
        _check_least(self, 0, "observer_copies", "max_staleness", "max_nacks")
        _check_least(self, 0, "group_deadline_s", "patience_s", "quarantine_s")
        if self.window > MAX_WINDOW:
            raise ConfigError(f"window is {self.window}: give at most {MAX_WINDOW}")
        self._check_groups()
        if self.store_quota_bytes is not None and self.store_quota_bytes < 2 * self.segment_bytes:
            raise ConfigError(
                f"store_quota_bytes is {self.store_quota_bytes}: it must be at least two segments "
                f"({2 * self.segment_bytes} bytes), the one that is written and one that can be deleted"
            )

    def _check_groups(self) -> None:
        if self.group_size is not None and self.group_size > MAX_GROUP_SIZE:
            raise ConfigError(f"group_size is {self.group_size}: give at most {MAX_GROUP_SIZE}")
        if self.group_size is not None and self.group_minimum > self.group_size:
            raise ConfigError(
                f"group_minimum is {self.group_minimum}: no group of group_size={self.group_size} ever has "
                "so many rollouts; give at most the size"
            )
        if self.partial_groups != "wait" and self.group_deadline_s is None:
            raise ConfigError(
                f"partial_groups={self.partial_groups!r} needs group_deadline_s: until when is a group "
                "waited for?"
            )


def _check_least(config: SenderConfig | ReceiverConfig, least: int, *names: str) -> None:
    """None is let pass: of an option that may be None it means no rule."""
    values = msgspec.structs.asdict(config)
    for name in names:
        if values[name] is not None and values[name] < least:
            raise ConfigError(f"{name} must be at least {least}, got {values[name]}")
