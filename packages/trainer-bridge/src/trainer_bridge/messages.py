"""The messages of the wire protocol: a closed set of kinds, one frozen Struct each.

Bodies are msgpack arrays (positional). A field is only ever appended, with a default; a reader skips trailing
fields that it does not know. `docs/wire-protocol.md` says the same for readers in other languages.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

Role = Literal["producer", "observer", "rank"]
RunState = Literal["run", "pause", "drain", "abort"]
VerdictKind = Literal["go", "none", "again", "aborted"]
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


class Body(msgspec.Struct, array_like=True, frozen=True):
    """Base of all bodies."""


class WireSet(Body, frozen=True):
    """A set of sequence numbers: all up to `upto`, and the ranges (first, last) above it, in rising order."""

    upto: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


class Levels(Body, frozen=True):
    """What has become of one epoch's messages. Absolute, so that repeating or losing one does no harm."""

    epoch: int
    received: WireSet
    stored: WireSet
    committed: WireSet


class Hello(Body, frozen=True):
    """First message of a connection, from whoever connected."""

    session: int
    """Chosen by the sender of HELLO, larger for each connection it makes; everything sent back repeats it."""
    role: Role
    peer: bytes
    """16 bytes: the producer id (kept beside the spool), or a fresh id of an observer."""
    name: str
    """For people: shown in tables and errors."""
    minor_min: int
    minor_max: int
    schemas: tuple[tuple[str, int], ...]
    """(schema id, schema hash) of each schema spoken, best first."""
    features: tuple[str, ...] = ()
    epoch: int = 0
    """Producers: the number of times this identity was opened."""
    streams: tuple[tuple[int, int], ...] = ()
    """Producers: (epoch, lowest sequence number that is not settled), for each epoch that still matters."""


class Welcome(Body, frozen=True):
    """The answer to HELLO: what was picked, and what has already arrived."""

    session: int
    receiver: bytes
    """16 bytes, fresh for each start of the receiver."""
    minor: int
    schema: str
    features: tuple[str, ...]
    window: int
    max_payload: int
    control_address: str = ""
    """Where the control pair listens. Empty: CONTROL travels on this connection."""
    acks: tuple[Levels, ...] = ()
    sequence_limit: int = 0
    """First credit, as in CREDIT."""
    byte_limit: int = 0


class Ack(Body, frozen=True):
    """Receiver to producer: how far each epoch has come."""

    session: int
    levels: tuple[Levels, ...]


class Control(Body, frozen=True):
    """Receiver to all: the state in which the trainer wants its workers. Re-sent with every heartbeat."""

    session: int
    generation: int
    """Grows with each change; a state is applied if its generation is larger than the one held."""
    run_state: RunState
    weights_version: int
    """Latest version published in `policy_run`; -1: none yet."""
    min_version: int
    """Samples below it will be refused as stale; -1: no rule."""
    policy_run: str = ""


class Credit(Body, frozen=True):
    """How much more may be sent. Absolute limits, re-sent with every heartbeat."""

    session: int
    sequence_limit: int
    """To a producer: messages with a sequence number up to this may be sent. From an observer: so many
    copies in all."""
    byte_limit: int
    """Payload bytes that may be on the way without being acknowledged; a message may be sent while
    less than this is on the way, so that one of any size passes an empty queue."""


class Report(Body, frozen=True):
    """Producer or observer to receiver, with every heartbeat: I live, and this is how far I am."""

    session: int
    generation: int
    """The control generation that was applied."""
    last_sequence: int = 0
    unsettled: int = 0


class Bye(Body, frozen=True):
    """An orderly end of a session, from either side; a producer's BYE is answered by BYE."""

    session: int
    reason: str = ""


class Error(Body, frozen=True):
    """A refusal. Codes below 32 concern one message, the others end the session."""

    session: int
    code: int
    text: str
    epoch: int = 0
    sequence: int = 0
    """The refused message; 0: not known, or not about one message."""


class Ask(Body, frozen=True):
    """Rank to receiver: I wait for the next step."""

    session: int
    rank: int
    world: int
    """Ranks, 0 included."""
    groups: int
    """Of the whole step."""


class ShareRollout(Body, frozen=True, gc=False):
    """What a rank is told of a rollout beside its DATA message."""

    producer_name: str
    restored: bool
    nacks: int
    staleness: int | None


class ShareGroup(Body, frozen=True):
    """One group of a share, or this rank's part of it."""

    group_id: bytes
    size: int
    complete: bool
    rollouts: tuple[ShareRollout, ...]


class Share(Body, frozen=True):
    """Receiver to rank: your part of a step; the DATA messages of its rollouts follow in this order."""

    session: int
    step: int
    groups: tuple[ShareGroup, ...]


class Ready(Body, frozen=True):
    """Rank to receiver: I hold all of my share."""

    session: int
    step: int


class Verdict(Body, frozen=True):
    """Receiver to rank: what became of a step."""

    session: int
    step: int
    verdict: VerdictKind
    """`go`: it is yours. `none`: nobody gets one this time. `again`: forget your share, another one comes.
    `aborted`: what you were given, or asked for, is void."""
    reason: str = ""


class Done(Body, frozen=True):
    """Rank to receiver: I am done with a step."""

    session: int
    step: int
    committed: bool
    """False: given back."""
    reason: str = ""


class Status(Body, frozen=True):
    """Receiver to observer, with every heartbeat: how it stands."""

    session: int
    metrics: dict[str, float]
    """As `SampleReceiver.metrics` names them."""
    producers: tuple[tuple[str, bytes, str, int, int, int], ...]
    """(name, producer id, presence, queued, credit in messages, unsettled) of each."""


class ArrayEntry(Body, frozen=True, gc=False):
    """Where one array lies in the payload."""

    name: str
    dtype: str
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
    top_k: int | None
    min_p: float | None
    reward: float | None


class PartBody(Body, frozen=True):
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


class DataHead(Body, frozen=True):
    """Head of a DATA message: all parts of one rollout."""

    schema: str
    producer: bytes
    epoch: int
    sequence: int
    created_ns: int
    rollout_id: bytes
    group_id: bytes
    attempt: int
    task_id: str
    parts: tuple[PartBody, ...]
    arrays: tuple[ArrayEntry, ...]
    payload_nbytes: int
    payload_hash: int
    group_size: int = 0
    """Rollouts that make the group complete; 0: the sender does not say."""


RankMessage = Ask | Ready | Done
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
}
KINDS: dict[type[Message], Kind] = {body: kind for kind, body in BODIES.items()}
