"""`Pool`: every rollout between its arrival and its end: queued, leased, trained, committed or dropped.

No clock, no thread, no socket, no file: its owner passes instants in, and carries out what
`ends.take_finished` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from trainer_bridge.codec import Data
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard
from trainer_bridge.demand import Demand
from trainer_bridge.ends import Ends
from trainer_bridge.groups import Group, GroupTable, HeldGroup, PoolLease
from trainer_bridge.judge import Judge
from trainer_bridge.member import Member
from trainer_bridge.meter import Meter
from trainer_bridge.session import Identity, ReceiverSession
from trainer_bridge.staleness import StalenessRule

UNSIZED = (
    "nobody says how many rollouts group {} has: use send_group() or send(..., group_size=n) in the workers, "
    "or ReceiverConfig(group_size=n) here"
)


class Pool:
    """Queue, groups, leases and ends of all rollouts of one receiver.

    `arrived + restored = queued + leased + trained + committed + dropped` holds after every call.

    Args:
        session: told of every place that becomes free, and of every end.
        board: what the trainer published; staleness is measured against it.
        read: gets a rollout that lies in the store only; DamagedError if it is damaged.
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
        self.session = session
        self._config = config
        self.board = board
        self._bury = bury
        self._rule = StalenessRule(config.max_staleness)
        self._judge = Judge(rule=self._rule, board=board, read=read, bury=bury)
        self.groups = GroupTable(group_size=config.group_size, deadline_s=config.group_deadline_s)
        self._queue: OrderedDict[Identity, Member] = OrderedDict()
        self.leases: dict[int, PoolLease] = {}
        self.ends = Ends(session.ledger, commit_on=config.commit_on)
        self.meter = Meter()
        self.demand = Demand()
        self._in_hand: set[bytes] = set()
        """Rollouts in the consumer's hands: a later attempt waits until it is known what becomes of them."""
        self.moved_s = now_s
        """When something last arrived, was handed out, or came to its end."""
        self.seen_s = now_s
        """The latest instant that the owner has said."""

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
        return self.board.state.weights_version

    @property
    def allowance(self) -> int | None:
        """Rollouts that may still come before they would wait so long as to be stale. None: no such rule.

        Incomplete groups are left out, so that they cannot use it up while their last members wait outside.
        """
        if self._rule.max_staleness is None:
            return None
        return self._rule.allowance(self.demand.step_rollouts, self.groups.ready_members + self.leased)

    @property
    def starved(self) -> bool:
        """True: the consumer waits for groups that are not complete; no bound may keep their members away."""
        return self.demand.groups > self.groups.ready_count

    def take_news(self) -> list[str]:
        """What people are to be told since the last call."""
        if self.session.beyond_queue:
            self.demand.tell(
                "beyond",
                "a producer's queue is full and a step lacks groups: more is taken beyond queue_messages "
                f"({self._config.queue_messages}) or queue_bytes ({self._config.queue_bytes}), as much as "
                "completes it (counted as credit_beyond_queue_total; workers that finish a group before they "
                "begin the next need less)",
            )
        return self.demand.take_news()

    # -- in

    def offer(self, member: Member, now_s: float) -> None:
        """Take in a rollout that is new."""
        self.moved_s = now_s
        self._queue[member.identity] = member
        if self.is_late(member):
            self.drop(member, "late")
            return
        replaced = self.groups.add(member, now_s)
        if replaced is not None:
            self.drop(replaced, "replaced")

    # -- out

    def ask(self, groups: int) -> None:
        """The consumer waits for a step of so many groups; end it with `demand.withdraw`."""
        self.demand.ask(groups, self.groups.largest)
        if self.groups.closed.take_restored(by_group=True):
            for member in [m for m in self.waiting() if m.group_id in self.groups.closed]:
                self.drop(member, "late")

    def lease_one(self, now_s: float) -> PoolLease | None:
        """Hand out the first rollout that is fit, whatever its group. None: none is there."""
        self.expire(now_s)
        self.groups.closed.take_restored(by_group=False)
        while (member := self._first_free()) is not None:
            if self._is_fit(member):
                self.groups.remove(member)
                group = Group(member.group_id, now_s, 1, {member.rollout_id: member})
                return self._lease([HeldGroup(group, complete=True, single=True)], now_s)
        return None

    def lease_groups(self, count: int, now_s: float) -> PoolLease | None:
        """Hand out `count` groups that are ready and fit. None: there are not so many, nothing was taken."""
        self.ask(count)
        self.expire(now_s)
        if self.groups.ready_count < count:
            self._tell_unsized()
            return None
        chosen: list[Group] = []
        for group in self.groups.ready():
            if len(chosen) == count:
                break
            if self._is_group_fit(group):
                chosen.append(group)
        if len(chosen) < count:
            return None
        self.demand.withdraw()
        for group in chosen:
            self.groups.close(group)
        leased = [HeldGroup(group, complete=group.is_complete, single=False) for group in chosen]
        self.meter.partial_groups += sum(not each.complete for each in leased)
        return self._lease(leased, now_s)

    def expire(self, now_s: float) -> None:
        """Give up groups whose deadline has passed, as the policy says."""
        self.seen_s = now_s
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
        members = lease.members()
        for member in members:
            self.meter.trained(member)
            self._in_hand.discard(member.rollout_id)
        self.ends.resolve(members)
        for member in members:
            self._drop_later_attempt(member)

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

    # -- for a checkpoint that is loaded

    def waiting(self) -> list[Member]:
        """The rollouts that wait, first one first."""
        return list(self._queue.values())

    def put_in_order(self) -> None:
        """Rollouts and groups come as they did the first time: by their places in the store."""
        ordered = sorted(self._queue.values(), key=lambda member: member.position)
        self._queue = OrderedDict((member.identity, member) for member in ordered)
        self.groups.put_in_order()

    def is_late(self, member: Member) -> bool:
        """Its group is over, or another attempt of it was trained on: it must not be trained on as well."""
        trained = self.session.ledger.rollouts.is_trained(member.rollout_id)
        return trained or member.group_id in self.groups.closed

    def drop(self, member: Member, reason: str) -> None:
        """A queued rollout ends here, for a counted reason; its place is free at once (SkyRL#1173)."""
        self.leave(member)
        self.meter.drop(reason)
        self.ends.resolve([member], dropped=reason)

    def leave(self, member: Member) -> None:
        """A queued rollout does not wait any more."""
        del self._queue[member.identity]
        self.groups.remove(member)
        self.session.mark_taken(member.identity, member.nbytes)

    # -- inside

    def _lease(self, groups: list[HeldGroup], now_s: float) -> PoolLease:
        self.moved_s = now_s
        self.meter.leases += 1
        lease = PoolLease(self.meter.leases, now_s, groups)
        for member in lease.members():
            del self._queue[member.identity]
            self.session.mark_taken(member.identity, member.nbytes)
            self._in_hand.add(member.rollout_id)
        self.leases[lease.number] = lease
        self.meter.handed_out(lease.members(), self.board.state.weights_version)
        return lease

    def _first_free(self) -> Member | None:
        return next((m for m in self._queue.values() if m.rollout_id not in self._in_hand), None)

    def _is_fit(self, member: Member) -> bool:
        """Read it if need be; False: it cannot be handed out, and was dropped."""
        verdict = self._judge.verdict(member)
        if verdict is not None:
            self.drop(member, verdict)
        return verdict is None

    def _drop_later_attempt(self, trained: Member) -> None:
        latest = self.session.ledger.latest_of(trained.rollout_id)
        later = None if latest is None else self._queue.get(latest)
        if later is not None:
            self.drop(later, "late")

    def _tell_unsized(self) -> None:
        group_id = self.groups.unsized
        if group_id is not None:
            self.demand.tell("unsized", f"{UNSIZED.format(group_id.hex())}; other groups are handed out")

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
            self.drop(member, reason)
        self.groups.close(group)

    def _take_back(
        self, leased: HeldGroup, rollouts: frozenset[bytes] | None, reason: str, now_s: float
    ) -> None:
        group = leased.group
        for member in list(group.members.values()):
            self.session.mark_returned(member.identity, member.nbytes)
            self._in_hand.discard(member.rollout_id)
            self._queue[member.identity] = member
            if rollouts is None or member.rollout_id in rollouts:
                member.nacks += 1
                self.meter.nacks += 1
        if leased.single:
            for member in group.members.values():
                lesser = self.groups.add(member, now_s)
                if lesser is not None:
                    self.drop(lesser, "replaced")
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
            self.drop(member, "nacked")
        if worn and not leased.single:
            self._is_rest_fit(group)
