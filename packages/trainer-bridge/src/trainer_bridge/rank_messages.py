"""What a receiver and its ranks say to each other about a training step."""

from __future__ import annotations

from typing import Literal

from trainer_bridge.wire_types import U32, Body, Id, Name, Number, Text

VerdictKind = Literal["go", "none", "again", "aborted"]


class Ask(Body, frozen=True):
    """Rank to receiver: I wait for the next step."""

    session: Number
    rank: U32
    world: U32
    """Ranks, 0 included."""
    groups: U32
    """Of the whole step."""
    last: Number = 0
    """The step that this rank was granted last, and has committed. 0: none, or it knows that it is void."""


class ShareRollout(Body, frozen=True, gc=False):
    """What a rank is told of a rollout beside its DATA message, and which message that is."""

    rollout_id: Id
    attempt: U32
    producer_name: Name
    restored: bool
    nacks: U32
    staleness: int | None


class ShareRemote(Body, frozen=True, gc=False):
    """A rollout of a group that is split over ranks, for those who do not get it: what it is compared by."""

    rollout_id: Id
    trained_tokens: Number
    reward: float | None
    in_baseline: bool
    turn_rewards: tuple[float | None, ...]


class ShareGroup(Body, frozen=True, gc=False):
    """One group of a share, or this rank's part of it."""

    group_id: Id
    size: U32
    complete: bool
    rollouts: tuple[ShareRollout, ...]
    elsewhere: tuple[ShareRemote, ...] = ()
    """What other ranks hold of it."""


class ShareTotals(Body, frozen=True, gc=False):
    """What the whole step trains on, over all ranks: the number of things with a trained token."""

    tokens: Number = 0
    samples: Number = 0
    rollouts: Number = 0
    groups: Number = 0


class Share(Body, frozen=True, gc=False):
    """Receiver to rank: your part of a step; the DATA messages of its rollouts follow in this order."""

    session: Number
    step: Number
    groups: tuple[ShareGroup, ...]
    totals: ShareTotals = ShareTotals()
    lengths: tuple[tuple[Number, ...], ...] = ()
    """Tokens of every sample of every rank's share, rank 0 first, in the order of the share."""


class Ready(Body, frozen=True):
    """Rank to receiver: I hold all of my share."""

    session: Number
    step: Number


class Verdict(Body, frozen=True):
    """Receiver to rank: what became of a step."""

    session: Number
    step: Number
    verdict: VerdictKind
    """`go`: it is yours. `none`: nobody gets one this time. `again`: forget your share, another one comes.
    `aborted`: what you were given, or asked for, is void."""
    reason: Text = ""


class Done(Body, frozen=True):
    """Rank to receiver: I am done with a step."""

    session: Number
    step: Number
    committed: bool
    """False: given back."""
    reason: Text = ""


RankMessage = Ask | Ready | Done
