"""Settings of both ends."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainer_bridge.errors import ConfigError

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


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of the protocol, in seconds. The defaults suit a cluster; tests shorten them."""

    heartbeat_s: float = 1.0
    """CONTROL, CREDIT and ACK are repeated at this interval, REPORT is sent at it."""
    peer_timeout_s: float = 30.0
    """A peer that was silent for so long counts as lost. Long, because a trainer may hold the GIL for
    seconds."""
    greet_again_s: float = 1.0
    """HELLO is repeated at this interval until WELCOME or ERROR comes."""
    resend_s: float = 10.0
    """A sample that was sent and not acknowledged as received is sent again after this time (same
    identity)."""


class SenderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleSender` that are rarely changed."""

    settle: SettleLevel = "committed"
    max_unsettled: int = 4096
    """Without a spool: messages kept in memory for resending; `send` waits when there are more."""
    max_unsettled_bytes: int = 1 << 30
    """Without a spool: the same in bytes."""
    spool_quota_bytes: int = 64 << 30
    """With a spool: `send` waits when the unsettled part of the spool is larger."""
    segment_bytes: int = 128 << 20
    """A spool segment is closed, and the next begun, when it is this large."""
    keep_segments: bool = False
    """True: segments stay on disk after everything in them is settled."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    insecure: bool = False
    """True: allow a peer that is not on this machine, without encryption or authentication."""
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        _positive(self, ("max_unsettled", "max_unsettled_bytes", "spool_quota_bytes", "segment_bytes"))


class ReceiverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleReceiver` that are rarely changed."""

    window: int = 256
    """Messages that a producer may keep on the wire; the smaller of this and the sender's own window
    holds."""
    queue_messages: int = 256
    """Per producer: rollouts that may wait for `next()`; credit for more is given as they are taken."""
    queue_bytes: int = 256 << 20
    """Per producer: the same in bytes."""
    observer_copies: int = 64
    """Copies on the way to one observer; further ones are skipped and counted."""
    remember_rollouts: int = 1 << 20
    """Rollout ids kept for deduplication; the oldest are forgotten first, and counted."""
    group_size: int | None = None
    """Rollouts that make a group complete, where the sender does not say."""
    group_deadline_s: float | None = None
    """Seconds from a group's first rollout until it is given up as incomplete. None: never."""
    partial_groups: PartialGroups = "wait"
    group_minimum: int = 1
    """Fewest rollouts of a partial group that is delivered."""
    max_staleness: int | None = None
    """Weight versions that a rollout's oldest trained token may lie behind the published one; older ones,
    those of an unknown version or of another policy run are dropped, and counted. None: no rule."""
    max_nacks: int = 3
    """A rollout is given back so often; after that it goes to the dead letters."""
    commit_on: CommitOn = "commit"
    rank_split: RankSplit = "groups"
    patience_s: float | None = 300.0
    """`next` and `next_batch` raise `StuckError` when nothing can come, and nothing has moved for so long.
    None: they wait on. Waiting for a first worker, or for one that is slow, is not being stuck."""
    segment_bytes: int = 128 << 20
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    messages_per_s: int = 1000
    """Per connection: messages beside new samples (greetings, reports, repetitions) that are read per
    second; the rest is left unread, and counted."""
    malformed_limit: int = 32
    """So many malformed messages within `quarantine_s`, and their peer is left unread for `quarantine_s`."""
    quarantine_s: float = 60.0
    insecure: bool = False
    """True: allow a bind that other machines can reach, without encryption or authentication."""
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        _positive(self, ("window", "queue_messages", "queue_bytes", "remember_rollouts", "segment_bytes"))
        _positive(self, ("group_minimum", "messages_per_s", "malformed_limit"))
        if self.group_size is not None and not 1 <= self.group_size <= MAX_GROUP_SIZE:
            raise ConfigError(f"group_size must be 1 to {MAX_GROUP_SIZE}, got {self.group_size}")
        for name, value in (("max_staleness", self.max_staleness), ("max_nacks", self.max_nacks)):
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        if self.partial_groups != "wait" and self.group_deadline_s is None:
            raise ConfigError(
                f"partial_groups={self.partial_groups!r} needs group_deadline_s: until when is a group "
                "waited for?"
            )


def _positive(config: SenderConfig | ReceiverConfig, names: tuple[str, ...]) -> None:
    values = msgspec.structs.asdict(config)
    for name in names:
        if values[name] < 1:
            raise ConfigError(f"{name} must be at least 1, got {values[name]}")
