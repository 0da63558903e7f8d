"""`Pool`: every rollout between its arrival and its end: queued, leased, trained, committed or dropped.

No clock, no thread, no socket, no file: its owner passes instants in, and carries out what
`ends.take_finished` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from trainer_bridge.checkpoint import (
    ReceiverState,
    decode_groups,
    decode_rollouts,
    encode_groups,
    encode_rollouts,
)
from trainer_bridge.codec import Data
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard
from trainer_bridge.ends import Ends
from trainer_bridge.errors import BridgeError, ConfigError, SpoolError
from trainer_bridge.groups import Group, GroupTable, HeldGroup, PoolLease
from trainer_bridge.member import Member
from trainer_bridge.meter import Meter
from trainer_bridge.session import Identity, ReceiverSession
from trainer_bridge.staleness import StalenessRule, age_of


class Pool:
    """Queue, groups, leases and ends of all rollouts of one receiver.

    `arrived + restored = queued + leased + trained + committed + dropped` holds after every call.

    Args:
        session: told of every place that becomes free, and of every end.
        board: what the trainer published; staleness is measured against it.
        read: gets a rollout that lies in the store only; SpoolError if it is damaged.
        bury: takes a rollout that nobody can use: (member, reason, detail).
    """

    def __init__(
        self,
        *,
        session: ReceiverSession,
        config: ReceiverConfig,
        board: ControlBoard,
        read: Callable[[int], Data],
        bury: Callable[[Member, str, str], None],
        now_s: float,
    ) -> None:
        self._session = session
        self._config = config
        self._board = board
        self._read = read
        self._bury = bury
        self._rule = StalenessRule(config.max_staleness)
        self.groups = GroupTable(group_size=config.group_size, deadline_s=config.group_deadline_s)
        self._queue: OrderedDict[Identity, Member] = OrderedDict()
        self.leases: dict[int, PoolLease] = {}
        self.ends = Ends(session.ledger, commit_on=config.commit_on)
        self.meter = Meter()
        self.moved_s = now_s
        """When something last arrived, was handed out, or came to its end."""
        self.step_rollouts = 0
        """Rollouts of the largest step asked for; 0: none was."""

    # -- what is there

    @property
    def queued(self) -> int:
        """Rollouts that wait."""
        return len(self._queue)

    @property
    def leased(self) -> int:
        """Rollouts in the consumer's hands."""
        return sum(len(each.group.members) for lease in self.leases.values() for each in lease.groups)

    @property
    def weights_version(self) -> int:
        """As published."""
        return self._board.state.weights_version

    @property
    def allowance(self) -> int | None:
        """Rollouts that may still come before they would wait so long as to be stale. None: no such rule.

        Incomplete groups are left out, so that they cannot use it up while their last members wait outside.
        """
        if self._rule.max_staleness is None:
            return None
        return self._rule.allowance(self.step_rollouts, self.groups.ready_members + self.leased)

    # -- in

    def offer(self, member: Member, now_s: float) -> None:
        """Take in a rollout that is new."""
        self.moved_s = now_s
        self._queue[member.identity] = member
        if self.groups.is_closed(member.group_id):
            self._drop(member, "late")
            return
        replaced = self.groups.add(member, now_s)
        if replaced is not None:
            self._drop(replaced, "replaced")

    # -- out

    def lease_one(self, now_s: float) -> PoolLease | None:
        """Hand out the first rollout that is fit, whatever its group. None: none is there."""
        self.expire(now_s)
        while self._queue:
            member = next(iter(self._queue.values()))
            if self._is_fit(member):
                self.groups.remove(member)
                group = Group(member.group_id, now_s, 1, {member.rollout_id: member})
                return self._lease([HeldGroup(group, complete=True, single=True)], now_s)
        return None

    def lease_groups(self, count: int, now_s: float) -> PoolLease | None:
        """Hand out `count` groups that are ready and fit. None: there are not so many, nothing was taken.

        Raises:
            ConfigError: nobody says how large a group is.
        """
        self.expire(now_s)
        unsized = self.groups.unsized
        if unsized is not None:
            raise ConfigError(
                f"nobody says how many rollouts group {unsized.hex()} has: use send_group() or "
                "send(..., group_size=n) in the workers, or ReceiverConfig(group_size=n) here"
            )
        if self.groups.ready_count < count:
            return None
        chosen: list[Group] = []
        for group in self.groups.ready():
            if len(chosen) == count:
                break
            if self._is_group_fit(group):
                chosen.append(group)
        if len(chosen) < count:
            return None
        for group in chosen:
            self.groups.close(group, complete=group.is_complete)
        leased = [HeldGroup(group, complete=group.is_complete, single=False) for group in chosen]
        self.meter.partial_groups += sum(not each.complete for each in leased)
        self.step_rollouts = max(self.step_rollouts, sum(group.size for group in chosen))
        return self._lease(leased, now_s)

    def expire(self, now_s: float) -> None:
        """Give up groups whose deadline has passed, as the policy says."""
        for group in self.groups.due(now_s):
            self.meter.overdue_groups += 1
            if self._config.partial_groups == "wait":
                continue
            if self._config.partial_groups == "deliver" and len(group.members) >= self._config.group_minimum:
                self.groups.make_ready(group)
                self.moved_s = now_s
            else:
                self._drop_group(group, "group_deadline")

    # -- ends

    def commit(self, number: int, now_s: float) -> None:
        """The consumer is done with what is left of a lease."""
        lease = self.leases.pop(number)
        self.moved_s = now_s
        for member in lease.members():
            self.meter.trained(member)
            self.ends.resolve(member)

    def nack(self, number: int, rollouts: frozenset[bytes] | None, reason: str, now_s: float) -> None:
        """The consumer gives rollouts back; their groups come again, first.

        Args:
            number: the lease.
            rollouts: which ones count as refused; their groups come back whole. None: all.
            reason: for the dead letters.
            now_s: the instant.
        """
        lease = self.leases[number]
        back: list[HeldGroup] = []
        rest: list[HeldGroup] = []
        for leased in lease.groups:
            named = rollouts is None or not rollouts.isdisjoint(leased.group.members)
            (back if named else rest).append(leased)
        lease.groups = rest
        if not lease.groups:
            del self.leases[number]
        self.moved_s = now_s
        for leased in reversed(back):
            self._take_back(leased, rollouts, reason, now_s)

    def release(self, number: int, now_s: float) -> None:
        """A lease comes back through no fault of its rollouts: a rank was lost."""
        lease = self.leases.pop(number)
        self.moved_s = now_s
        for held in reversed(lease.groups):
            self._take_back(held, frozenset(), "", now_s)

    # -- the checkpoint

    def state(self) -> ReceiverState:
        """What a checkpoint must hold: everything that came to its end until now."""
        ledger = self._session.ledger
        # A partial group in the consumer's hands is over here, and comes again after a restart.
        held = {each.group.id for lease in self.leases.values() for each in lease.groups}
        closed = [group_id for group_id in self.groups.closed_early() if group_id not in held]
        return ReceiverState(
            policy_run=self._board.state.policy_run,
            weights_version=self._board.state.weights_version,
            done=ledger.done.to_plain(),
            rollouts=encode_rollouts(ledger.rollouts.done()),
            closed_groups=encode_groups(closed),
        )

    def load(self, state: ReceiverState, again: Iterable[Member], now_s: float) -> None:
        """Go on from a checkpoint.

        Args:
            state: the checkpoint's.
            again: stored rollouts that were committed and that the checkpoint does not hold, in their order.
            now_s: the instant.

        Raises:
            BridgeError: rollouts were handed out already, or the state is damaged.
        """
        if self.meter.leases:
            raise BridgeError("load_state_dict comes after rollouts were handed out: load it first")
        done, rollouts = state.watermark(), decode_rollouts(state.rollouts)
        self.groups.load_closed(decode_groups(state.closed_groups))
        self._session.ledger.load(done, rollouts)
        known = dict(rollouts)
        for member in list(self._queue.values()):
            if member.identity in done:
                self._leave(member)
                self.ends.known(member)
            elif known.get(member.rollout_id, -1) >= member.attempt:
                self._drop(member, "duplicate")
            elif self.groups.is_closed(member.group_id):
                self._drop(member, "late")
        first = list(again)
        for member in first:
            self.meter.restored += 1
            self.offer(member, now_s)
        for member in reversed(first):
            if member.identity in self._queue:
                self._queue.move_to_end(member.identity, last=False)

    # -- inside

    def _lease(self, groups: list[HeldGroup], now_s: float) -> PoolLease:
        self.moved_s = now_s
        self.meter.leases += 1
        lease = PoolLease(self.meter.leases, now_s, groups)
        for member in lease.members():
            del self._queue[member.identity]
            self._session.mark_taken(member.identity, member.nbytes)
        self.leases[lease.number] = lease
        self.meter.handed_out(lease.members(), self._board.state.weights_version)
        return lease

    def _is_fit(self, member: Member) -> bool:
        """Read it if need be; False: it cannot be handed out, and was dropped."""
        if member.data is None:
            try:
                member.data = self._read(member.position)
            except SpoolError as error:
                self._bury(member, "unreadable", str(error))
                self._drop(member, "unreadable")
                return False
        control = self._board.state
        if not self._rule.applies(control):
            return True
        if member.age is None:
            member.age = age_of(member.data.samples)
        verdict = self._rule.judge(member.age, control)
        if verdict is not None:
            self._drop(member, verdict)
        return verdict is None

    def _is_group_fit(self, group: Group) -> bool:
        before = len(group.members)
        for member in list(group.members.values()):
            self._is_fit(member)
        return len(group.members) == before or self._is_rest_fit(group)

    def _is_rest_fit(self, group: Group) -> bool:
        """A group lost a member for good, nobody will replace it: its deadline's policy holds now."""
        rest = len(group.members)
        if self._config.partial_groups == "deliver" and rest >= self._config.group_minimum:
            self.groups.make_ready(group)
            return True
        self._drop_group(group, "group_broken")
        return False

    def _drop_group(self, group: Group, reason: str) -> None:
        for member in list(group.members.values()):
            self._drop(member, reason)
        self.groups.close(group, complete=False)

    def _take_back(
        self, leased: HeldGroup, rollouts: frozenset[bytes] | None, reason: str, now_s: float
    ) -> None:
        group = leased.group
        for member in list(group.members.values()):
            self._session.mark_returned(member.identity, member.nbytes)
            self._queue[member.identity] = member
            if rollouts is None or member.rollout_id in rollouts:
                member.nacks += 1
                self.meter.nacks += 1
        if leased.single:
            for member in group.members.values():
                lesser = self.groups.add(member, now_s)
                if lesser is not None:
                    self._drop(lesser, "replaced")
        else:
            self.groups.give_back(group)
        for member in reversed(list(group.members.values())):
            if member.identity in self._queue:
                self._queue.move_to_end(member.identity, last=False)
        worn = [
            m
            for m in group.members.values()
            if m.nacks > self._config.max_nacks and m.identity in self._queue
        ]
        for member in worn:
            self._bury(member, "nacked", reason)
            self._drop(member, "nacked")
        if worn and not leased.single:
            self._is_rest_fit(group)

    def _drop(self, member: Member, reason: str) -> None:
        """A queued rollout ends here, for a counted reason; its place is free at once (SkyRL#1173)."""
        self._leave(member)
        self.meter.drop(reason)
        self.ends.resolve(member, dropped=reason)

    def _leave(self, member: Member) -> None:
        del self._queue[member.identity]
        self.groups.remove(member)
        self._session.mark_taken(member.identity, member.nbytes)
