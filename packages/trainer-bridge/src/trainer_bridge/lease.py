"""`BatchLease` and `Lease`: a step, or one rollout, in the consumer's hands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError, BridgeError
from trainer_bridge.leased import LeasedGroup, LeasedRollout
from trainer_bridge.rank_messages import Share
from trainer_bridge.weights import TrainedCounts, count_groups


class Ends(Protocol):
    """What a lease needs of its receiver."""

    def commit_lease(self, number: int) -> None:
        """Done with for good."""
        ...

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        """Given back."""
        ...


class WholeStep(NamedTuple):
    """What a rank's share says of the step that it is a share of."""

    world: int
    """Ranks that have a share."""
    totals: TrainedCounts
    """Over all ranks."""
    lengths: tuple[tuple[int, ...], ...]
    """Tokens of every sample of every rank, rank 0 first, in the order of `BatchLease.rollouts`."""

    @classmethod
    def of(cls, share: Share, world: int) -> WholeStep:
        """As rank 0 says with each share."""
        said = share.totals
        counts = TrainedCounts(said.tokens, said.samples, said.rollouts, said.groups)
        return cls(world, counts, share.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the step's longest sample."""
        return max((length for lengths in self.lengths for length in lengths), default=0)


class BatchLease:
    """The rollouts of one training step, handed out: yours until you `commit` or `nack` them.

    With data-parallel ranks it is this rank's share of the step, and knows what the whole step is weighted
    and compared with: give it to `Collator.pad` or `pack` as it is.

    What was neither committed nor given back comes again after a restart, from the receiver's store or from
    its senders. Not thread-safe.
    """

    def __init__(
        self, number: int, groups: Sequence[LeasedGroup], ends: Ends, whole: WholeStep | None = None
    ) -> None:
        self._number = number
        self._groups = tuple(groups)
        self._ends = ends
        self._committed = False
        self._given_back: set[str] = set()
        self._over = False
        """Everything was given back."""
        self.whole = whole
        """None: this is all of the step, not the share of one of several ranks."""

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
        """Group by group, each rollout with all of its parts in order.

        Of a rank's share, they do not know what other ranks hold: alone, their weights add up to 1 on this
        rank and not over all. Where groups are split over ranks (`rank_split="rollouts"`) not even their
        advantages would be right, so they are not given.

        Raises:
            BatchError: other ranks hold rollouts of the same groups.
        """
        split = next((group for group in self.groups if group.is_split), None)
        if split is not None:
            raise BatchError(
                f"group {split.group_id} is split over ranks ({len(split.rollouts)} rollouts here, "
                f"{len(split.elsewhere)} elsewhere), and samples alone would be compared among themselves: "
                "give the lease itself to Collator.pad or pack, or use rank_split='groups'; for the samples "
                "one by one, see `rollouts`"
            )
        return tuple(sample for rollout in self.rollouts for sample in rollout.samples)

    @property
    def world(self) -> int:
        """Ranks that share the step; 1: this is all of it."""
        return 1 if self.whole is None else self.whole.world

    @property
    def totals(self) -> TrainedCounts:
        """What the step trains on, over all ranks. Without ranks, what was given back does not count."""
        if self.whole is not None:
            return self.whole.totals
        return count_groups([rollout.samples for rollout in group.rollouts] for group in self.groups)

    def commit(self) -> None:
        """Say that the trainer is done with these rollouts for good. Again: nothing happens.

        Their senders may forget them now, or, with `commit_on="checkpoint"`, once `checkpoint_saved` was
        called with a state that holds them.

        Raises:
            StepAbortedError: the step is shared by ranks, and one was lost or gave it back.
            BridgeError: everything was given back.
            ClosedError: the receiver was closed before; they stay uncommitted.
            SpoolError: the store has failed.
        """
        if self._committed:
            return
        if self._over:
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
        if self._committed or self._over:
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
        self._over = named is None or not self.groups


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
