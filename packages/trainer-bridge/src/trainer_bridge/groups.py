"""`GroupTable`: the queued rollouts by group, and which groups can be handed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from trainer_bridge.closed_groups import ClosedGroups
from trainer_bridge.member import Member


class Group(msgspec.Struct, eq=False):
    """Queued rollouts of one group. Two attempts of a rollout are one member, the later."""

    id: bytes
    opened_s: float
    size: int = 0
    """Rollouts that make it complete; 0: nobody has said."""
    members: dict[bytes, Member] = {}
    """By rollout id, in order of arrival."""
    ready: bool = False
    overdue: bool = False

    @property
    def is_complete(self) -> bool:
        """Every member is here."""
        return 0 < self.size <= len(self.members)


class HeldGroup(msgspec.Struct, eq=False):
    """A group, or a single rollout of one, in the consumer's hands."""

    group: Group
    complete: bool
    single: bool


class PoolLease(msgspec.Struct, eq=False):
    """One step in the consumer's hands."""

    number: int
    since_s: float
    groups: list[HeldGroup]

    def members(self) -> list[Member]:
        """All rollouts, group by group."""
        return [member for leased in self.groups for member in leased.group.members.values()]


class GroupTable:
    """Sorts members into groups. Keeps no account and drops nothing: `Pool` does.

    Args:
        group_size: where the sender does not say. None: such groups are never complete.
        deadline_s: from a group's first member. None: none.
    """

    def __init__(self, *, group_size: int | None, deadline_s: float | None) -> None:
        self._group_size = group_size or 0
        self._deadline_s = deadline_s
        self._groups: dict[bytes, Group] = {}
        self._ready: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        """Not ready and not overdue, by the time of their first member."""
        self._unsized: dict[bytes, None] = {}
        self.closed = ClosedGroups()
        self.largest = self._group_size
        """Rollouts of the largest group that was here. 0: nobody has said how large one is."""

    def add(self, member: Member, now_s: float) -> Member | None:
        """Sort a member in; returns the earlier one of two attempts, which may be this member itself."""
        group = self._groups.get(member.group_id)
        if group is None:
            group = self._groups[member.group_id] = Group(member.group_id, now_s, members={})
            self._waiting[group.id] = None
        replaced = group.members.get(member.rollout_id)
        if replaced is not None and replaced.attempt > member.attempt:
            return member
        group.members.pop(member.rollout_id, None)
        group.members[member.rollout_id] = member
        group.size = max(group.size, member.group_size or self._group_size)
        if group.size:
            self._unsized.pop(group.id, None)
        else:
            self._unsized[group.id] = None
        if group.size:
            self.largest = max(self.largest, group.size, len(group.members))
        if group.is_complete and not group.ready:
            self.make_ready(group)
        return replaced

    def remove(self, member: Member) -> Group | None:
        """Take a member out; returns the group as it is without it. None: it is not in the table."""
        group = self._groups.get(member.group_id)
        if group is None or group.members.get(member.rollout_id) is not member:
            return None
        del group.members[member.rollout_id]
        if not group.members:
            self._forget(group)
        elif group.ready and not group.is_complete:
            group.ready = False
            self._ready.pop(group.id)
            self._waiting[group.id] = None
        return group

    def make_ready(self, group: Group) -> None:
        """The group may be handed out, after those that are ready."""
        group.ready = True
        self._waiting.pop(group.id, None)
        self._unsized.pop(group.id, None)
        self._ready[group.id] = None

    def put_in_order(self) -> None:
        """Groups come as they were completed the first time: by the places of their members in the store."""
        last = {
            group_id: max(member.position for member in self._groups[group_id].members.values())
            for group_id in self._ready
        }
        self._ready = OrderedDict.fromkeys(sorted(last, key=last.__getitem__))

    def give_back(self, group: Group) -> None:
        """A group that was handed out comes again, first."""
        self.closed.reopen(group.id)
        self._groups[group.id] = group
        group.ready = True
        self._ready[group.id] = None
        self._ready.move_to_end(group.id, last=False)

    def close(self, group: Group) -> None:
        """The group is over: what comes of it later is late."""
        self._forget(group)
        self.closed.add(group.id)

    def due(self, now_s: float) -> list[Group]:
        """Groups whose deadline has passed since the last call; each is told once."""
        found: list[Group] = []
        if self._deadline_s is None:
            return found
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            group_id, _ = self._waiting.popitem(last=False)
            group = self._groups[group_id]
            group.overdue = True
            found.append(group)
        return found

    def next_due_s(self) -> float | None:
        """When the next deadline passes. None: none will."""
        first = next(iter(self._waiting), None)
        if first is None or self._deadline_s is None:
            return None
        return self._groups[first].opened_s + self._deadline_s

    def ready(self) -> Iterator[Group]:
        """Groups to hand out, first one first; the table may be changed meanwhile."""
        return (self._groups[group_id] for group_id in list(self._ready) if group_id in self._ready)

    @property
    def ready_count(self) -> int:
        """Number of groups to hand out."""
        return len(self._ready)

    @property
    def ready_members(self) -> int:
        """Their rollouts."""
        return sum(len(self._groups[group_id].members) for group_id in self._ready)

    @property
    def unsized(self) -> bytes | None:
        """The oldest group of which nobody has said how large it is. None: there is none."""
        return next(iter(self._unsized), None)

    @property
    def unsized_count(self) -> int:
        """Number of groups of which nobody has said how large they are."""
        return len(self._unsized)

    @property
    def only_unsized(self) -> bool:
        """True: there are groups, and of none is it known how large it is, so that none will be complete."""
        return 0 < len(self._unsized) == len(self._groups)

    @property
    def incomplete_count(self) -> int:
        """Number of groups that are not ready."""
        return len(self._groups) - len(self._ready)

    def incomplete(self) -> list[Group]:
        """Groups that are not ready, oldest first."""
        return sorted((g for g in self._groups.values() if not g.ready), key=lambda g: g.opened_s)

    def oldest_incomplete_s(self, now_s: float) -> float:
        """Seconds since the first member of the oldest group that is not ready came; 0.0: there is none."""
        opened = [group.opened_s for group in self._groups.values() if not group.ready]
        return max(now_s - min(opened), 0.0) if opened else 0.0

    def _forget(self, group: Group) -> None:
        self._groups.pop(group.id, None)
        self._ready.pop(group.id, None)
        self._waiting.pop(group.id, None)
        self._unsized.pop(group.id, None)
