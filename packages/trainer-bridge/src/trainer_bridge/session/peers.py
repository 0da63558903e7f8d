"""What a receiver keeps of each producer and each connection."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from trainer_bridge.codec import Data
from trainer_bridge.messages import Levels, Report, Role
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session.passage import Passage

Presence = Literal["connected", "finished", "lost", "away"]
"""`finished`: said BYE. `lost`: silent for too long, or replaced without a BYE. `away`: known from the
store only."""


class Identity(NamedTuple):
    """Names one message for ever."""

    producer: bytes
    epoch: int
    sequence: int


class Accepted(NamedTuple):
    """A message that is new: deliver it once."""

    identity: Identity
    data: Data
    nbytes: int


class StreamState(msgspec.Struct):
    """How far one epoch of one producer has come."""

    received: SeqSet = msgspec.field(default_factory=SeqSet)
    stored: SeqSet = msgspec.field(default_factory=SeqSet)
    committed: SeqSet = msgspec.field(default_factory=SeqSet)


class Producer(msgspec.Struct):
    """Everything known of one producer id, over all its connections."""

    id: bytes
    name: str
    presence: Presence = "away"
    epoch: int = 0
    streams: dict[int, StreamState] = msgspec.field(default_factory=dict[int, StreamState])
    passage: Passage = msgspec.field(default_factory=lambda: Passage({}))
    """What may still come, as its last HELLO says."""
    told: int = 0
    """Acknowledgements that it got."""
    peer: bytes | None = None
    """Routing id of its live connection."""
    messages: int = 0
    samples: int = 0
    duplicates: int = 0
    doubled: int = 0
    """Of the duplicates: messages of their own, whose rollout had come in another one."""
    fenced: int = 0
    rejected: int = 0
    queued: int = 0
    queued_bytes: int = 0
    highest_limit: int = 0
    """The largest sequence limit it was ever told: what lies above was never allowed."""
    kept: bool = False
    """A message of it arrived, or is known from the store or a checkpoint: it must not be forgotten."""
    crowded_s: float | None = None
    """Since when it says that it has a message which it does not send. None: it does not."""
    reported_unsettled: int = 0
    """Messages it says are not settled yet; once it has finished, less what was committed since."""

    def stream(self, epoch: int) -> StreamState:
        """The state of one epoch, made when it is first met."""
        state = self.streams.get(epoch)
        if state is None:
            state = self.streams[epoch] = StreamState()
        return state

    @property
    def account(self) -> str:
        """What its messages brought, for people."""
        words = f"{self.messages} rollouts were new, {self.doubled} were here already"
        return f"{words}, {self.fenced} of an attempt that was replaced" if self.fenced else words

    def report(self, message: Report, now_s: float) -> None:
        """Take in what it says of itself."""
        self.reported_unsettled = message.unsettled
        if message.last_sequence <= self.highest:
            self.crowded_s = None
        elif self.crowded_s is None:
            self.crowded_s = now_s

    def settle_one(self) -> None:
        """A message was committed; one that has finished does not report that any more."""
        if self.presence == "finished":
            self.reported_unsettled = max(self.reported_unsettled - 1, 0)

    def levels(self) -> tuple[Levels, ...]:
        """What the next ACK or WELCOME says; of more ranges than one of them holds, each comes in turn."""
        turn = self.told
        self.told += 1
        return tuple(
            Levels(epoch, *(level.to_wire(turn) for level in (state.received, state.stored, state.committed)))
            for epoch, state in self.streams.items()
        )

    @property
    def highest(self) -> int:
        """The largest sequence number that arrived, or was passed over."""
        return max((state.received.highest for state in self.streams.values()), default=0)


class Peer(msgspec.Struct):
    """One connection that was welcomed."""

    session: int
    role: Role
    id: bytes
    name: str
    heard_s: float
    told_s: float
    ack_due: bool = False
    """Its ACK must go out now."""
    ack_by_s: float | None = None
    """Its ACK has news that may wait until then for more. None: no such news."""
    unsaid: int = 0
    """News since its last ACK: messages that came, were stored, or committed."""
    credit_due: bool = False
    """Something that its CREDIT says has changed."""
    sequence_limit: int = 0
    """As last told."""
    byte_limit: int = 0
    copies: int = 0
    """Observers: copies sent."""
    copy_limit: int = 0
