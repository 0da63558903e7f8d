"""`RankedDesk`: where rank 0 waits for steps that all ranks share."""

from __future__ import annotations

from collections.abc import Callable

from trainer_bridge.clock import Clock
from trainer_bridge.config import RankSplit
from trainer_bridge.errors import BridgeError, StuckError
from trainer_bridge.groups import HeldGroup, PoolLease
from trainer_bridge.member import Member
from trainer_bridge.messages import Share, ShareGroup, ShareRollout
from trainer_bridge.receiver_loop import ReceiverLoop
from trainer_bridge.session.steps import StepTable
from trainer_bridge.shares import share_out


class RankedDesk:
    """Leases steps for all ranks; the caller holds `loop.changed` but for `commit_lease` and `nack_lease`.

    Args:
        check: raises if the receiver cannot be used; called with `loop.changed` held.
    """

    def __init__(
        self,
        *,
        loop: ReceiverLoop,
        clock: Clock,
        split: RankSplit,
        patience_s: float | None,
        check: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self.split: RankSplit = split
        self._patience_s = patience_s
        self._check = check
        self._mine: list[HeldGroup] = []

    @property
    def steps(self) -> StepTable:
        """What the ranks hold."""
        return self._loop.session.steps

    def advance(self, groups: int, world: int, now_s: float) -> PoolLease | None:
        """Bring the next step as far as it can be now; rank 0's share once everyone was told to go."""
        steps, pool = self.steps, self._loop.pool
        if steps.step is None:
            if steps.missing():
                return None
            lease = pool.lease_groups(groups, now_s)
            if lease is None:
                return None
            self._mine, *others = share_out(lease, world, self.split)
            shares = {
                rank: (self._share(share), [m for held in share for m in held.group.members.values()])
                for rank, share in enumerate(others, 1)
            }
            steps.start(lease.number, shares)
        step = steps.step
        if step is None or not step.out:
            return None
        return PoolLease(step.number, now_s, self._mine)

    def commit_lease(self, number: int) -> None:
        """Wait until every rank has committed the step, and commit it.

        Raises:
            BridgeError: a rank was lost or gave it back; the groups come again.
            StuckError: a rank has not committed it for `patience_s`.
        """
        loop, began_s = self._loop, self._clock.monotonic_s()
        with loop.changed:
            step = self.steps.step
            while not self.steps.commit(number):
                self._check()
                waited_s = self._clock.monotonic_s() - began_s
                if self._patience_s is not None and waited_s >= self._patience_s:
                    holders = ", ".join(f"rank {rank}" for rank in self.steps.not_done())
                    raise StuckError(f"{holders} has not committed step {number} for {waited_s:.0f} s")
                loop.changed.wait(None if self._patience_s is None else self._patience_s - waited_s)
            if step is not None:
                loop.pool.commit(step.lease, self._clock.monotonic_s())
            loop.settle()

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        """Give the step back for all ranks.

        Raises:
            BridgeError: single rollouts were named, or the step was aborted before.
        """
        if rollouts is not None:
            raise BridgeError("a step that is shared by ranks is given back whole: name no rollouts")
        with self._loop.changed:
            self._check()
            self.steps.nack(number, reason)
            self._loop.settle()

    def _share(self, share: list[HeldGroup]) -> Share:
        return Share(0, 0, tuple(self._share_group(held) for held in share))

    def _share_group(self, held: HeldGroup) -> ShareGroup:
        rollouts = tuple(self._share_rollout(member) for member in held.group.members.values())
        return ShareGroup(held.group.id, held.group.size, held.complete, rollouts)

    def _share_rollout(self, member: Member) -> ShareRollout:
        version = self._loop.pool.weights_version
        name = self._loop.session.ledger.producers[member.identity.producer].name
        behind = None if member.age is None else member.age.behind(version)
        return ShareRollout(name, member.restored, member.nacks, behind)
