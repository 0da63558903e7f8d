"""`Desk`: where a consumer waits for rollouts, and gives them back."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from trainer_bridge.clock import Clock
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import ConfigError, StuckError
from trainer_bridge.groups import PoolLease
from trainer_bridge.lease import BatchLease, Lease
from trainer_bridge.leased import LeasedGroup, leased_groups
from trainer_bridge.pool import UNSIZED
from trainer_bridge.ranked import RankedDesk
from trainer_bridge.receiver_loop import ReceiverLoop
from trainer_bridge.shares import check_split
from trainer_bridge.stuck import cause_of_standstill, what_is_awaited

T = TypeVar("T")


class Desk:
    """Hands leases out of a loop's pool and takes their ends in; safe from any thread.

    Args:
        loop: not the loop's own thread uses the desk.
        board: staleness is shown against it.
        patience_s: see `ReceiverConfig`.
        ranked: for steps that several ranks share.
        check: raises if the receiver cannot be used; called with `loop.changed` held.
    """

    def __init__(
        self,
        *,
        loop: ReceiverLoop,
        board: ControlBoard,
        clock: Clock,
        patience_s: float | None,
        ranked: RankedDesk,
        check: Callable[[], None],
    ) -> None:
        self._ranked = ranked
        self._loop = loop
        self._board = board
        self._clock = clock
        self._patience_s = patience_s
        self._check = check

    def one(self, timeout_s: float | None) -> Lease | None:
        """See `SampleReceiver.next`."""
        lease = self._await(self._loop.pool.lease_one, timeout_s)
        return None if lease is None else Lease(lease.number, self._shown(lease), self)

    def batch(self, groups: int, deadline_s: float | None, world: int) -> BatchLease | None:
        """See `SampleReceiver.next_batch`."""
        if world != 1:
            return self._ranked_batch(groups, deadline_s, world)
        with self._loop.changed, self._loop.session.steps.alone():
            lease = self._await(lambda now_s: self._loop.pool.lease_groups(groups, now_s), deadline_s)
        return None if lease is None else BatchLease(lease.number, self._shown(lease), self)

    def _ranked_batch(self, groups: int, deadline_s: float | None, world: int) -> BatchLease | None:
        check_split(groups, world, self._ranked.split)
        steps = self._loop.session.steps
        with self._loop.changed:
            self._check()
            steps.open(groups, world)
            self._loop.pool.ask(groups)  # not only when all ranks are here: what comes depends on it
            try:
                lease = self._await(lambda now_s: self._ranked.advance(groups, world, now_s), deadline_s)
            except BaseException:
                steps.give_up()
                self._loop.settle()
                raise
            if lease is None:
                steps.give_up()
                self._loop.settle()
            return lease

    def commit_lease(self, number: int) -> None:
        """See `BatchLease.commit`."""
        with self._changing() as now_s:
            self._loop.pool.commit(number, now_s)

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        """See `BatchLease.nack`."""
        with self._changing() as now_s:
            self._loop.pool.nack(number, rollouts, reason, now_s)
            self._loop.changed.notify_all()

    @contextmanager
    def _changing(self) -> Generator[float]:
        with self._loop.changed:
            self._check()
            yield self._clock.monotonic_s()
            self._loop.settle()

    def _await(self, attempt: Callable[[float], T | None], timeout_s: float | None) -> T | None:
        """Try until it succeeds, the time is over, or nothing can come any more."""
        loop = self._loop
        began_s = now_s = self._clock.monotonic_s()
        with loop.changed:
            try:
                while True:
                    self._check()
                    lease = attempt(now_s)
                    loop.settle()
                    left_s = math.inf if timeout_s is None else began_s + timeout_s - now_s
                    if lease is not None or left_s <= 0:
                        loop.pool.meter.wait_s += now_s - began_s
                        return lease
                    left_s = min(left_s, self._next_look_s(now_s))
                    loop.listener.check_outside("next or next_batch")
                    loop.changed.wait(None if left_s == math.inf else left_s)
                    now_s = self._clock.monotonic_s()
            finally:
                loop.pool.demand.withdraw()

    def _next_look_s(self, now_s: float) -> float:
        """How long to wait before asking again whether anything can come.

        Raises:
            ConfigError: nobody says how large any of the groups is, so that none will be complete.
            StuckError: nothing can.
        """
        pool, patience_s = self._loop.pool, self._patience_s
        if patience_s is None:
            return math.inf
        quiet_s = now_s - pool.moved_s
        if quiet_s < patience_s:
            return patience_s - quiet_s
        store = self._loop.store
        full = "" if store is None else store.room.obstacle
        cause = cause_of_standstill(self._loop.session, pool, now_s, full)
        group_id = pool.groups.unsized
        if pool.demand.groups and group_id is not None and pool.groups.only_unsized:
            raise ConfigError(f"nothing has moved for {quiet_s:.1f} s, and {UNSIZED.format(group_id.hex())}")
        if cause is not None:
            raise StuckError(f"nothing has moved for {quiet_s:.1f} s and nothing can come: {cause}")
        for subject, about, text in what_is_awaited(pool, now_s):
            pool.demand.tell(subject, f"nothing has moved for {quiet_s:.1f} s: {text}", about=about)
        return patience_s

    def _shown(self, lease: PoolLease) -> tuple[LeasedGroup, ...]:
        producers = self._loop.session.ledger.producers
        names = {m.identity.producer: producers[m.identity.producer].name for m in lease.members()}
        return leased_groups(lease, names=names, weights_version=self._board.state.weights_version)
