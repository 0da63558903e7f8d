"""`RankedDesk`: where rank 0 waits for steps that all ranks share."""

from __future__ import annotations

from collections.abc import Callable

from trainer_bridge.clock import Clock
from trainer_bridge.config import RankSplit
from trainer_bridge.errors import BridgeError, ConfigError, StuckError
from trainer_bridge.groups import PoolLease
from trainer_bridge.lease import BatchLease, WholeStep
from trainer_bridge.leased import data_of, granted_groups, said_of
from trainer_bridge.member import Member
from trainer_bridge.rank_messages import Share, ShareRollout
from trainer_bridge.receiver_loop import ReceiverLoop
from trainer_bridge.session.steps import StepTable
from trainer_bridge.shares import shares_of


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
        self._mine: tuple[Share, list[Member]] = (Share(0, 0, ()), [])

    @property
    def steps(self) -> StepTable:
        """What the ranks hold."""
        return self._loop.session.steps

    def advance(self, groups: int, world: int, now_s: float) -> BatchLease | None:
        """Bring the next step as far as it can be now; rank 0's share once everyone was told to go.

        Raises:
            ConfigError: the step cannot be told to the ranks; it waits in the pool.
        """
        steps, pool = self.steps, self._loop.pool
        if steps.step is None:
            if steps.missing():
                return None
            lease = pool.lease_groups(groups, now_s)
            if lease is None:
                return None
            self._mine, *others = self._shared(lease, world, now_s)
            steps.start(lease.number, dict(enumerate(others, 1)))
        step = steps.take()
        if step is None:
            return None
        share, members = self._mine
        groups_here = granted_groups(share, [data_of(member) for member in members])
        return BatchLease(step.number, groups_here, self, WholeStep.of(share, world))

    def commit_lease(self, number: int) -> None:
        """Wait until every rank has committed the step, and commit it.

        Raises:
            StepAbortedError: a rank was lost or gave it back; the groups come again.
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
                    raise StuckError(
                        f"{holders} has not committed step {number} for {waited_s:.1f} s: look at that rank, "
                        "then commit again to wait on, or give the step back with nack"
                    )
                loop.listener.check_outside("commit of a step that ranks share")
                loop.changed.wait(None if self._patience_s is None else self._patience_s - waited_s)
            if step is not None:
                loop.pool.commit(step.lease, self._clock.monotonic_s())
            loop.settle()

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        """Give the step back for all ranks.

        Raises:
            StepAbortedError: the step was aborted before.
            BridgeError: single rollouts were named.
        """
        if rollouts is not None:
            raise BridgeError("a step that is shared by ranks is given back whole: name no rollouts")
        with self._loop.changed:
            self._check()
            self.steps.nack(number, reason)
            self._loop.settle()

    def _shared(self, lease: PoolLease, world: int, now_s: float) -> list[tuple[Share, list[Member]]]:
        try:
            return shares_of(lease, world, self.split, self._say)
        except ConfigError:
            self._loop.pool.release(lease.number, now_s)
            raise

    def _say(self, member: Member) -> ShareRollout:
        name = self._loop.session.ledger.producers[member.identity.producer].name
        return said_of(member, name=name, weights_version=self._loop.pool.weights_version)
