"""The messages of the wire protocol: a closed set of kinds, one frozen Struct each.

Bodies are msgpack arrays (positional). A field is only ever appended, with a default; a reader skips trailing
fields that it does not know. `docs/wire-protocol.md` says the same for readers in other languages.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from msgspec import Meta

from trainer_bridge.rank_messages import Ask, Done, RankMessage, Ready, Share, Verdict
from trainer_bridge.wire_types import (
    BUNDLE_MESSAGES,
    MAX_EPOCHS,
    MAX_HOLES,
    MAX_NUMBER,
    MAX_PLACE,
    U8,
    U16,
    U32,
    Body,
    Features,
    Hash,
    Id,
    Name,
    Number,
    Text,
    Token,
    Version,
)

Role = Literal["producer", "observer", "rank"]
RunState = Literal["run", "pause", "drain", "abort"]
Scalar = str | int | float | bool | None

MAJOR = 1
MINOR = 0


class Kind(enum.IntEnum):
    """Byte 4 of every head."""

    HELLO = 1
    WELCOME = 2
    DATA = 3
    ACK = 4
    CONTROL = 5
    CREDIT = 6
    BYE = 7
    ERROR = 8
    REPORT = 9
    ASK = 10
    SHARE = 11
    READY = 12
    VERDICT = 13
    DONE = 14
    STATUS = 15
    BUNDLE = 16


class WireSet(Body, frozen=True):
    """A set of sequence numbers: all up to `upto`, and the ranges (first, last) above it, in rising order."""

    upto: Number = 0
    ranges: tuple[tuple[Number, Number], ...] = ()


class Levels(Body, frozen=True):
    """What has become of one epoch's messages. Absolute, so that repeating or losing one does no harm."""

    epoch: U32
    received: WireSet
    stored: WireSet
    committed: WireSet


class Hello(Body, frozen=True):
    """First message of a connection, from whoever connected."""

    session: Number
    """Chosen by the sender of HELLO, larger for each connection it makes; everything sent back repeats it."""
    role: Role
    peer: Id
    """16 bytes: the producer id (kept beside the spool), or a fresh id of an observer."""
    name: Name
    """For people: shown in tables and errors."""
    minor_min: U8
    minor_max: U8
    schemas: Annotated[tuple[tuple[Token, Hash], ...], Meta(max_length=64)]
    """(schema id, schema hash) of each schema spoken, best first."""
    features: Features = ()
    epoch: U32 = 0
    """Producers: the number of times this identity was opened."""
    streams: Annotated[tuple[tuple[U32, Number], ...], Meta(max_length=MAX_EPOCHS)] = ()
    """Producers: (epoch, lowest sequence number that is not settled), for each epoch that still matters."""
    starts: Annotated[tuple[Number, ...], Meta(max_length=MAX_EPOCHS)] = ()
    """Producers: the first sequence number of each epoch of `streams`; it ends where the next one begins.
    Empty: as `streams` says."""


class Welcome(Body, frozen=True):
    """The answer to HELLO: what was picked, and what has already arrived."""

    session: Number
    receiver: Id
    """16 bytes, fresh for each start of the receiver."""
    minor: U8
    schema: Token
    features: Features
    window: U32
    max_payload: Number
    control_address: Text = ""
    """Reserved: CONTROL travels on this connection (docs/adr/0002-one-socket-pair.md)."""
    acks: tuple[Levels, ...] = ()
    sequence_limit: Number = 0
    """First credit, as in CREDIT."""
    byte_limit: Number = 0


class Ack(Body, frozen=True):
    """Receiver to producer: how far each epoch has come."""

    session: Number
    levels: tuple[Levels, ...]


class Control(Body, frozen=True):
    """Receiver to all: the state in which the trainer wants its workers. Re-sent with every heartbeat."""

    session: Number
    generation: Number
    """Grows with each change; a state is applied if its generation is larger than the one held."""
    run_state: RunState
    weights_version: Version
    """Latest version published in `policy_run`; -1: none yet."""
    min_version: Version
    """Samples below it will be refused as stale; -1: no rule."""
    policy_run: Name = ""
    weights_location: Annotated[str, Meta(max_length=MAX_PLACE)] = ""
    """Where the weights of `weights_version` lie, as the trainer names it. Empty: it does not say."""


class Credit(Body, frozen=True):
    """How much more may be sent. Absolute limits, re-sent with every heartbeat."""

    session: Number
    sequence_limit: Number
    """To a producer: messages with a sequence number up to this may be sent. From an observer: so many
    copies in all."""
    byte_limit: Number
    """Payload bytes that may be on the way without being acknowledged; a message may be sent while
    less than this is on the way, so that one of any size passes an empty queue."""


class Report(Body, frozen=True):
    """Producer or observer to receiver, with every heartbeat: I live, and this is how far I am."""

    session: Number
    generation: Number
    """The control generation that was applied."""
    last_sequence: Number = 0
    unsettled: Number = 0
    holes: Annotated[tuple[tuple[U32, Number, Number], ...], Meta(max_length=MAX_HOLES)] = ()
    """Producers: (epoch, first, last) of numbers below those that were sent which never come, and which no
    ACK names as received; rising. If there are more, the others follow once these are acknowledged."""


class Bye(Body, frozen=True):
    """An orderly end of a session, from either side; a producer's BYE is answered by BYE."""

    session: Number
    reason: Text = ""


class Error(Body, frozen=True):
    """A refusal. Codes below 32 concern one message, the others end the session."""

    session: Number
    code: U16
    text: Text
    epoch: U32 = 0
    sequence: Number = 0
    """The refused message; 0: not known, or not about one message."""


class Status(Body, frozen=True):
    """Receiver to observer, with every heartbeat: how it stands."""

    session: Number
    metrics: dict[Name, float]
    """As `SampleReceiver.metrics` names them."""
    producers: tuple[tuple[Name, Id, Token, Number, Number, Number], ...]
    """(name, producer id, presence, queued, credit in messages, unsettled) of each."""


class ArrayEntry(Body, frozen=True, gc=False):
    """Where one array lies in the payload."""

    name: Token
    dtype: Annotated[str, Meta(max_length=8)]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TurnBody(Body, frozen=True, gc=False):
    """`token_tracking.sample.Turn`, positional."""

    start: int
    end: int
    finish_reason: Literal["stop", "length", "abort"]
    logprob_kind: Literal["none", "raw", "processed"]
    temperature: float | None
    top_p: float | None
    top_k: Annotated[int, Meta(le=MAX_NUMBER)] | None
    min_p: float | None
    reward: float | None


class PartBody(Body, frozen=True, gc=False):
    """What a sample says beside its arrays and beside what all parts of a rollout share."""

    prompt_length: int
    turns: tuple[TurnBody, ...]
    reward: float | None
    in_loss: bool
    in_baseline: bool
    status: Literal["completed", "truncated", "aborted", "failed"]
    source: Literal["sampled", "replayed"]
    policy_run: str
    provenance: dict[str, Scalar]
    extra: dict[str, Scalar]


class DataHead(Body, frozen=True, gc=False):
    """Head of a DATA message: all parts of one rollout."""

    schema: Token
    producer: Id
    epoch: U32
    sequence: Number
    created_ns: Number
    rollout_id: Id
    group_id: Id
    attempt: U32
    task_id: str
    parts: tuple[PartBody, ...]
    arrays: tuple[ArrayEntry, ...]
    payload_nbytes: int
    payload_hash: Hash
    group_size: int = 0
    """Rollouts that make the group complete; 0: the sender does not say."""


class Bundle(Body, frozen=True, gc=False):
    """Producer to receiver: several DATA messages in one, if both ends have the feature `bundle`."""

    items: Annotated[tuple[tuple[bytes, U32], ...], Meta(min_length=1, max_length=BUNDLE_MESSAGES)]
    """(head, bytes of the payload) of each. The payloads stand in the second frame in this order, each at the
    next multiple of 64; what lies between is zero."""


Message = (
    Hello
    | Welcome
    | DataHead
    | Ack
    | Control
    | Credit
    | Bye
    | Error
    | Report
    | RankMessage
    | Share
    | Verdict
    | Status
    | Bundle
)

BODIES: dict[Kind, type[Message]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.DATA: DataHead,
    Kind.ACK: Ack,
    Kind.CONTROL: Control,
    Kind.CREDIT: Credit,
    Kind.BYE: Bye,
    Kind.ERROR: Error,
    Kind.REPORT: Report,
    Kind.ASK: Ask,
    Kind.SHARE: Share,
    Kind.READY: Ready,
    Kind.VERDICT: Verdict,
    Kind.DONE: Done,
    Kind.STATUS: Status,
    Kind.BUNDLE: Bundle,
}
KINDS: dict[type[Message], Kind] = {body: kind for kind, body in BODIES.items()}
