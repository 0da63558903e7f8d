"""How a step's groups are shared out over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_bridge.config import RankSplit
from trainer_bridge.credit import turn_rewards
from trainer_bridge.errors import ConfigError, UnsendableError
from trainer_bridge.grouping import trained_count
from trainer_bridge.groups import Group, HeldGroup, PoolLease
from trainer_bridge.head import encode_head
from trainer_bridge.leased import data_of
from trainer_bridge.member import Member
from trainer_bridge.rank_messages import Share, ShareGroup, ShareRemote, ShareRollout, ShareTotals
from trainer_bridge.weights import count_groups


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
    """A list per rank. Each gets as many as the others, or one less, and about as many tokens.

    Longest first, each to the rank with the fewest tokens that has room (LPT; at most 4/3 of the best split
    without the bound on the count).
    """
    if split == "groups":
        weighed = [(sum(map(tokens_of, held.group.members.values())), held) for held in lease.groups]
    else:
        weighed = [
            (tokens_of(m), _alone(held, m)) for held in lease.groups for m in held.group.members.values()
        ]
    least, longer = divmod(len(weighed), world)
    """Every rank gets `least`, and so many one more."""
    shares: list[list[HeldGroup]] = [[] for _ in range(world)]
    loads = [0] * world
    for tokens, held in sorted(weighed, key=lambda pair: -pair[0]):
        open_ranks = (r for r in range(world) if len(shares[r]) < least + (longer > 0))
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        longer -= len(shares[rank]) == least
        shares[rank].append(held)
        loads[rank] += tokens
    return [_merged(share) for share in shares]


def shares_of(
    lease: PoolLease, world: int, split: RankSplit, say: Callable[[Member], ShareRollout]
) -> list[tuple[Share, list[Member]]]:
    """What each rank gets of a step, rank 0 first: its share, and the rollouts of it in the share's order.

    Each share carries what its rank's weights and advantages need of the others'. Session and step are 0.

    Args:
        lease: the step, members with their data.
        world: number of ranks.
        split: as `share_out`.
        say: what a rank is told of a rollout.

    Raises:
        ConfigError: a share is too large for one message.
    """
    totals = _totals(lease)
    whole = {held.group.id: held.group for held in lease.groups}
    remote: dict[bytes, ShareRemote] = {}
    out: list[tuple[Share, list[Member]]] = []
    split_up = share_out(lease, world, split)
    lengths = tuple(tuple(len(s) for m in _members(share) for s in data_of(m).samples) for share in split_up)
    for share in split_up:
        groups: list[ShareGroup] = []
        for held in share:
            here = held.group.members
            others = [m for key, m in whole[held.group.id].members.items() if key not in here]
            for member in others:
                if member.rollout_id not in remote:
                    remote[member.rollout_id] = _remote(member)
            elsewhere = tuple(remote[member.rollout_id] for member in others)
            said = tuple(map(say, here.values()))
            groups.append(ShareGroup(held.group.id, held.group.size, held.complete, said, elsewhere))
        out.append((Share(0, 0, tuple(groups), totals, lengths), _members(share)))
    _check_size([share for share, _ in out])
    return out


def _totals(lease: PoolLease) -> ShareTotals:
    groups = [[data_of(m).samples for m in held.group.members.values()] for held in lease.groups]
    return ShareTotals(*count_groups(groups))


def _members(share: Sequence[HeldGroup]) -> list[Member]:
    return [member for held in share for member in held.group.members.values()]


def _remote(member: Member) -> ShareRemote:
    parts = data_of(member).samples
    return ShareRemote(
        member.rollout_id,
        sum(map(trained_count, parts)),
        parts[0].reward,
        parts[0].in_baseline,
        turn_rewards(parts),
    )


def _check_size(shares: Sequence[Share]) -> None:
    """Before anyone is told: a message that cannot be made would cost the rank its connection."""
    for rank, share in enumerate(shares):
        try:
            encode_head(share)
        except UnsendableError as error:
            raise ConfigError(
                f"rank {rank}'s share of this step does not fit into one message ({error}): ask for fewer "
                'groups, or set ReceiverConfig(rank_split="groups")'
            ) from error


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
