"""How a step's groups are shared out over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_bridge.config import RankSplit
from trainer_bridge.errors import ConfigError
from trainer_bridge.groups import Group, HeldGroup, PoolLease
from trainer_bridge.member import Member


def check_split(groups: int, world: int, split: RankSplit) -> None:
    """Raise unless so many groups can be shared out evenly.

    Raises:
        ConfigError: whole groups per rank, and their number is no multiple of the ranks'.
    """
    if world < 1:
        raise ConfigError(f"world must be 1 or more, got {world}")
    if split == "groups" and groups % world:
        raise ConfigError(
            f"{groups} groups cannot be shared out evenly over {world} ranks: ask for a multiple, or set "
            'ReceiverConfig(rank_split="rollouts")'
        )


def share_out(lease: PoolLease, world: int, split: RankSplit) -> list[list[HeldGroup]]:
    """A list per rank. Each gets as many as the others, and about as many tokens.

    Longest first, each to the rank with the fewest tokens that has room (LPT; at most 4/3 of the best split
    without the bound on the count).
    """
    if split == "groups":
        weighed = [(sum(map(tokens_of, held.group.members.values())), held) for held in lease.groups]
    else:
        weighed = [
            (tokens_of(m), _alone(held, m)) for held in lease.groups for m in held.group.members.values()
        ]
    room = -(-len(weighed) // world)
    shares: list[list[HeldGroup]] = [[] for _ in range(world)]
    loads = [0] * world
    for tokens, held in sorted(weighed, key=lambda pair: -pair[0]):
        rank = min((r for r in range(world) if len(shares[r]) < room), key=lambda r: (loads[r], r))
        shares[rank].append(held)
        loads[rank] += tokens
    return [_merged(share) for share in shares]


def tokens_of(member: Member) -> int:
    """Tokens of all parts; 0 if they lie in the store only."""
    return 0 if member.data is None else sum(len(sample) for sample in member.data.samples)


def _alone(held: HeldGroup, member: Member) -> HeldGroup:
    group = Group(held.group.id, held.group.opened_s, held.group.size, {member.rollout_id: member})
    return HeldGroup(group, held.complete, held.single)


def _merged(share: Sequence[HeldGroup]) -> list[HeldGroup]:
    """Rollouts of one group stand together."""
    merged: dict[bytes, HeldGroup] = {}
    for held in share:
        into = merged.setdefault(held.group.id, held)
        if into is not held:
            into.group.members.update(held.group.members)
    return list(merged.values())
