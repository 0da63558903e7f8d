"""`BatchLease` and `Lease`: a step, or one rollout, in the consumer's hands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from token_tracking.sample import Sample

from trainer_bridge.codec import Data
from trainer_bridge.errors import BridgeError
from trainer_bridge.groups import PoolLease
from trainer_bridge.member import Member
from trainer_bridge.messages import Share, ShareRollout


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
    """One group of a lease."""

    group_id: str
    """32 hex characters."""
    rollouts: tuple[LeasedRollout, ...]
    size: int
    """Rollouts that a complete group has."""
    complete: bool
    """False: handed out at its deadline, or after a member was dropped (`partial_groups="deliver"`)."""


class Ends(Protocol):
    """What a lease needs of its receiver."""

    def commit_lease(self, number: int) -> None:
        """Done with for good."""
        ...

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        """Given back."""
        ...


class BatchLease:
    """The rollouts of one training step, handed out: yours until you `commit` or `nack` them.

    What was neither committed nor given back comes again after a restart, from the receiver's store or from
    its senders. Not thread-safe.
    """

    def __init__(self, number: int, groups: Sequence[LeasedGroup], ends: Ends) -> None:
        self._number = number
        self._groups = tuple(groups)
        self._ends = ends
        self._committed = False
        self._given_back: set[str] = set()

    @property
    def groups(self) -> tuple[LeasedGroup, ...]:
        """The groups, without those given back."""
        return tuple(group for group in self._groups if group.group_id not in self._given_back)

    @property
    def rollouts(self) -> tuple[LeasedRollout, ...]:
        """The rollouts, group by group."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Group by group, each rollout with all of its parts in order."""
        return tuple(sample for rollout in self.rollouts for sample in rollout.samples)

    def commit(self) -> None:
        """Say that the trainer is done with these rollouts for good. Again: nothing happens.

        Their senders may forget them now, or, with `commit_on="checkpoint"`, once `checkpoint_saved` was
        called with a state that holds them.

        Raises:
            BridgeError: everything was given back.
            ClosedError: the receiver was closed before; they stay uncommitted.
            SpoolError: the store has failed.
        """
        if self._committed:
            return
        if not self.groups:
            raise BridgeError("this lease was given back: there is nothing left to commit")
        self._ends.commit_lease(self._number)
        self._committed = True

    def nack(self, reason: str, rollouts: Iterable[str] | None = None) -> None:
        """Give rollouts back: their groups come again, before anything else.

        Rollouts that were given back more than `max_nacks` times go to the dead letters; what becomes of
        the rest of their group is decided as for a partial group.

        Args:
            reason: for people, and for the dead letters.
            rollouts: ids of those that cannot be used. Their groups come back whole, but only these count as
                given back; the other groups stay with you. None: all.

        Raises:
            BridgeError: the lease was committed or given back before, or a rollout is not in it.
            ClosedError, SpoolError: as `commit`.
        """
        if self._committed or not self.groups:
            raise BridgeError("this lease was committed or given back before: it cannot be given back")
        named = None if rollouts is None else frozenset(rollouts)
        if named is not None:
            unknown = named - {rollout.rollout_id for rollout in self.rollouts}
            if unknown:
                raise BridgeError(f"rollout {min(unknown)} is not in this lease, or was given back before")
        chosen = None if named is None else frozenset(bytes.fromhex(each) for each in named)
        self._ends.nack_lease(self._number, chosen, reason)
        self._given_back |= {
            group.group_id
            for group in self.groups
            if named is None or any(rollout.rollout_id in named for rollout in group.rollouts)
        }


class Lease(BatchLease):
    """One rollout, as `SampleReceiver.next` hands it out: a step of one."""

    @property
    def rollout(self) -> LeasedRollout:
        """The rollout, also after it was given back."""
        return self._groups[0].rollouts[0]

    @property
    def rollout_id(self) -> str:
        """32 hex characters."""
        return self.rollout.rollout_id

    @property
    def producer(self) -> str:
        """The producer id, 32 hex characters."""
        return self.rollout.producer

    @property
    def producer_name(self) -> str:
        """The producer's name, for people."""
        return self.rollout.producer_name

    @property
    def sequence(self) -> int:
        """The message's number within its producer."""
        return self.rollout.sequence

    @property
    def created_ns(self) -> int:
        """When the producer accepted it, Unix nanoseconds of its clock."""
        return self.rollout.created_ns

    @property
    def restored(self) -> bool:
        """An earlier process stored it, and did not commit it."""
        return self.rollout.restored


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
                _rollout(member, names[member.identity.producer], weights_version)
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
            rollouts=tuple(_granted(said, next(left)) for said in group.rollouts),
            size=group.size,
            complete=group.complete,
        )
        for group in share.groups
    )


def _granted(said: ShareRollout, data: Data) -> LeasedRollout:
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


def _rollout(member: Member, name: str, weights_version: int) -> LeasedRollout:
    if member.data is None:
        raise BridgeError(f"rollout {member.rollout_id.hex()} was leased without its data")
    return LeasedRollout(
        rollout_id=member.rollout_id.hex(),
        group_id=member.group_id.hex(),
        attempt=member.attempt,
        samples=member.data.samples,
        producer=member.identity.producer.hex(),
        producer_name=name,
        sequence=member.identity.sequence,
        created_ns=member.data.head.created_ns,
        restored=member.restored,
        nacks=member.nacks,
        staleness=None if member.age is None else member.age.behind(weights_version),
    )
