"""`LeasedRollout` and `LeasedGroup`: what a consumer sees of the rollouts in its hands."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from token_tracking.sample import Sample

from trainer_bridge.codec import Data
from trainer_bridge.errors import BridgeError
from trainer_bridge.grouping import RemoteRollout, trained_count
from trainer_bridge.groups import PoolLease
from trainer_bridge.member import Member
from trainer_bridge.rank_messages import Share, ShareRemote, ShareRollout


class LeasedRollout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One rollout of a lease, whole."""

    rollout_id: str
    """32 hex characters."""
    group_id: str
    attempt: int
    samples: tuple[Sample, ...]
    """All parts, in order. Their arrays are read-only views of the received message."""
    producer: str
    """The producer id, 32 hex characters."""
    producer_name: str
    """The producer's name, for people."""
    sequence: int
    """The message's number within its producer."""
    created_ns: int
    """When the producer accepted it, Unix nanoseconds of its clock."""
    restored: bool
    """An earlier process stored it, and did not commit it."""
    nacks: int
    """How often it was given back before."""
    staleness: int | None
    """Versions that its oldest trained token lies behind the published one. None: not known."""


class LeasedGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One group of a lease, or this rank's part of it."""

    group_id: str
    """32 hex characters."""
    rollouts: tuple[LeasedRollout, ...]
    size: int
    """Rollouts that a complete group has."""
    complete: bool
    """False: handed out at its deadline, or after a member was dropped (`partial_groups="deliver"`)."""
    elsewhere: tuple[RemoteRollout, ...] = ()
    """The rollouts of this step's group that other ranks hold (`rank_split="rollouts"`)."""

    @property
    def is_split(self) -> bool:
        """Other ranks hold rollouts of it, which the ones here must be compared with."""
        return bool(self.elsewhere)

    @property
    def baseline(self) -> dict[str, float]:
        """Rollout id -> reward of all that is graded and `in_baseline`, over all ranks."""
        firsts = [rollout.samples[0] for rollout in self.rollouts]
        rewards = {s.rollout_id: s.reward for s in firsts if s.in_baseline and s.reward is not None}
        return rewards | {
            each.rollout_id: each.reward
            for each in self.elsewhere
            if each.in_baseline and each.reward is not None
        }

    @property
    def trained_tokens(self) -> int:
        """Tokens that enter the loss, over all ranks."""
        here = sum(trained_count(sample) for rollout in self.rollouts for sample in rollout.samples)
        return here + sum(each.trained_tokens for each in self.elsewhere)


def leased_groups(
    lease: PoolLease, *, names: dict[bytes, str], weights_version: int
) -> tuple[LeasedGroup, ...]:
    """What a consumer sees of a lease.

    Args:
        lease: members with their data.
        names: producer id -> name.
        weights_version: as published.
    """
    return tuple(
        LeasedGroup(
            group_id=leased.group.id.hex(),
            rollouts=tuple(
                _leased(
                    data_of(member),
                    said_of(member, name=names[member.identity.producer], weights_version=weights_version),
                )
                for member in leased.group.members.values()
            ),
            size=leased.group.size,
            complete=leased.complete,
        )
        for leased in lease.groups
    )


def granted_groups(share: Share, rollouts: Sequence[Data]) -> tuple[LeasedGroup, ...]:
    """What a rank sees of its share.

    Args:
        share: as rank 0 said.
        rollouts: its messages, in the share's order.
    """
    left = iter(rollouts)
    return tuple(
        LeasedGroup(
            group_id=group.group_id.hex(),
            rollouts=tuple(_leased(next(left), said) for said in group.rollouts),
            size=group.size,
            complete=group.complete,
            elsewhere=tuple(_remote(said) for said in group.elsewhere),
        )
        for group in share.groups
    )


def said_of(member: Member, *, name: str, weights_version: int) -> ShareRollout:
    """What a consumer is told of a rollout beside its message.

    Args:
        member: with its data.
        name: of its producer.
        weights_version: as published.
    """
    behind = None if member.age is None else member.age.behind(weights_version)
    return ShareRollout(member.rollout_id, member.attempt, name, member.restored, member.nacks, behind)


def data_of(member: Member) -> Data:
    """A member's message, which whoever leases it has read.

    Raises:
        BridgeError: it has not.
    """
    if member.data is None:
        raise BridgeError(f"rollout {member.rollout_id.hex()} was leased without its data")
    return member.data


def _leased(data: Data, said: ShareRollout) -> LeasedRollout:
    head = data.head
    return LeasedRollout(
        rollout_id=head.rollout_id.hex(),
        group_id=head.group_id.hex(),
        attempt=head.attempt,
        samples=data.samples,
        producer=head.producer.hex(),
        producer_name=said.producer_name,
        sequence=head.sequence,
        created_ns=head.created_ns,
        restored=said.restored,
        nacks=said.nacks,
        staleness=said.staleness,
    )


def _remote(said: ShareRemote) -> RemoteRollout:
    return RemoteRollout(
        said.rollout_id.hex(), said.trained_tokens, said.reward, said.in_baseline, said.turn_rewards
    )
