"""Data-parallel ranks train on the batch that one rank would train on: same weights, same advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking.sample import Sample
from trainer_bridge import BatchError, BatchLease, BridgeError, Collator, ConfigError
from trainer_bridge.advantages import advantages
from trainer_bridge.batch import Batch
from trainer_bridge.codec import decode_frames, draft
from trainer_bridge.groups import Group, HeldGroup, PoolLease
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.lease import WholeStep
from trainer_bridge.leased import data_of, granted_groups, said_of
from trainer_bridge.member import Member
from trainer_bridge.rank_messages import Share
from trainer_bridge.session import Identity
from trainer_bridge.shares import shares_of
from trainer_bridge.truncation import truncate
from trainer_bridge.weights import TrainedCounts, count_trained

Build = Callable[..., Sample]
Rollouts = Sequence[Sequence[Sample]]
Split = Literal["groups", "rollouts"]


class NoEnds:
    """Nobody asks for the end of these leases, but for those that may end."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def commit_lease(self, number: int) -> None:
        self.committed.append(number)

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        assert rollouts is None


def pool_lease(rollouts: Rollouts) -> PoolLease:
    groups: dict[bytes, HeldGroup] = {}
    for n, parts in enumerate(rollouts):
        data = decode_frames(draft(parts).numbered(b"p" * 16, 1, n + 1, 0))
        head = data.head
        member = Member(
            Identity(b"p" * 16, 1, n + 1), head.rollout_id, head.group_id, 0, 0, 100, 0, data
        )  # fmt: skip
        held = groups.setdefault(
            head.group_id, HeldGroup(Group(head.group_id, 0.0, 0, members={}), complete=True, single=False)
        )
        held.group.members[head.rollout_id] = member
        held.group.size += 1
    return PoolLease(1, 0.0, list(groups.values()))


def leases(rollouts: Rollouts, world: int, split: Split) -> list[BatchLease]:
    """What the ranks get, over the wire's bytes."""
    out: list[BatchLease] = []
    say = lambda member: said_of(member, name="worker", weights_version=3)  # noqa: E731
    for share, members in shares_of(pool_lease(rollouts), world, split, say):
        heard = decode_head(encode_head(share))
        assert isinstance(heard, Share)
        groups = granted_groups(heard, [data_of(member) for member in members])
        out.append(BatchLease(1, groups, NoEnds(), WholeStep.of(heard, world)))
    return out


Token = tuple[str, int, int]


def by_token(batches: Sequence[Batch[Any]], samples: Sequence[Sample]) -> dict[Token, tuple[float, float]]:
    """(rollout, part, place) -> (weight, advantage) of every trained token."""
    found: dict[Token, tuple[float, float]] = {}
    for batch in batches:
        for sequence, index in enumerate(batch.sample_index.tolist()):
            at = batch.sequence_ids == sequence
            values = zip(
                batch.loss_mask[at].tolist(),
                batch.weights[at].tolist(),
                batch.advantages[at].tolist(),
                strict=True,
            )
            for place, (trained, weight, advantage) in enumerate(values):
                if trained:
                    key = (samples[index].rollout_id, samples[index].part, place)
                    assert key not in found
                    found[key] = (weight, advantage)
    return found


def samples_of(lease: BatchLease) -> list[Sample]:
    return [sample for rollout in lease.rollouts for sample in rollout.samples]


@st.composite
def steps(draw: st.DrawFn, build: Build, groups: int) -> list[list[Sample]]:
    reward = st.sampled_from([0.0, 0.1, 1.0, 0.7, -2.5, 1 / 3])
    rollouts: list[list[Sample]] = []
    for group in range(groups):
        for _ in range(draw(st.integers(1, 4))):
            parts = draw(st.integers(1, 2))
            shared = {
                "group": group,
                "parts": parts,
                "reward": draw(reward),
                "in_baseline": draw(st.sampled_from([True, True, True, False])),
            }
            rollouts.append([])
            for part in range(parts):
                turns = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
                rollouts[-1].append(
                    build(
                        len(rollouts),
                        part=part,
                        turns=turns,
                        rewards=tuple(draw(st.one_of(st.none(), reward)) for _ in turns),
                        prompt=draw(st.integers(0, 3)),
                        in_loss=draw(st.sampled_from([True, True, True, False])),
                        **shared,
                    )
                )
    return draw(st.permutations(rollouts))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    world=st.integers(1, 4),
    split=st.sampled_from(["groups", "rollouts"]),
    rule=st.sampled_from(["token", "sample", "rollout", "group", "constant"]),
    compare=st.sampled_from(["grpo", "dr_grpo", "rloo", "reward"]),
    credit=st.sampled_from(["rollout", "turn_and_rollout"]),
)
def test_all_ranks_together_have_the_batch_of_one(
    sample: Build, data: st.DataObject, world: int, split: Split, rule: Any, compare: Any, credit: Any
) -> None:
    groups = world * data.draw(st.integers(1, 2)) if split == "groups" else data.draw(st.integers(1, 3))
    rollouts = data.draw(steps(sample, groups))
    collator = Collator(
        weights=rule,
        advantages=compare,
        credit=credit,
        discount=0.9 if credit != "rollout" else 1.0,
        length_norm=7 if rule == "constant" else None,
    )
    (whole,) = leases(rollouts, 1, split)
    everything = samples_of(whole)
    alone = by_token(collator.pack(everything), everything)
    assert by_token(collator.pad(whole), everything) == alone
    shares = leases(rollouts, world, split)
    together: dict[Token, tuple[float, float]] = {}
    for lease in shares:
        assert (lease.world, lease.totals) == (world, count_trained(everything))
        mine = by_token(collator.pad(lease, max_rows=2), samples_of(lease))
        assert not mine.keys() & together.keys()
        together |= mine
    assert together == alone  # to the bit
    if alone and rule != "constant":
        assert sum(weight for weight, _ in together.values()) == pytest.approx(1, abs=1e-5)
    for lease in shares:
        for group in lease.groups:
            (mate,) = [each for each in whole.groups if each.group_id == group.group_id]
            assert group.trained_tokens == mate.trained_tokens
            assert group.baseline == mate.baseline


def test_a_group_over_two_ranks_by_hand(sample: Build) -> None:
    """Rewards 1, 1, 0, 0 over two ranks: 0.866, not the 0.707 of one and one."""
    rollouts = [[sample(n, reward=float(n < 2), turns=(4 + n,))] for n in range(4)]
    first, second = leases(rollouts, 2, "rollouts")
    found: list[float] = []
    for lease in (first, second):
        (batch,) = Collator().pad(lease)
        assert batch.weights.sum() == pytest.approx(0.5)
        found += np.unique(batch.advantages[batch.loss_mask]).tolist()
    assert sorted(found) == pytest.approx([-0.866, -0.866, 0.866, 0.866], abs=1e-3)
    (group,) = first.groups
    assert group.is_split
    assert group.baseline == {f"{n:032x}": float(n < 2) for n in range(4)}
    assert group.trained_tokens == 4 + 5 + 6 + 7
    assert {each.rollout_id for each in group.elsewhere} == {r.rollout_id for r in second.rollouts}


def test_samples_alone_of_a_split_group_are_not_given(sample: Build) -> None:
    first, _ = leases([[sample(n)] for n in range(4)], 2, "rollouts")
    with pytest.raises(
        BatchError, match=r"split over ranks \(2 rollouts here, 2 elsewhere\).*the lease itself"
    ):
        _ = first.samples
    assert len(first.rollouts[0].samples) == 1
    whole, _ = leases([[sample(n, group=n // 2)] for n in range(4)], 2, "groups")
    assert len(whole.samples) == 2


def test_turn_rewards_on_another_rank_are_refused_on_all(sample: Build) -> None:
    """One rank would have gone on with the rollouts' rewards, another had stopped."""
    rollouts = [[sample(n, rewards=(0.5,) if n == 3 else ())] for n in range(4)]
    for lease in leases(rollouts, 2, "rollouts"):
        with pytest.raises(BatchError, match=f"rollout {3:032x} has turn rewards"):
            Collator().pad(lease)


def test_more_ranks_than_rollouts(sample: Build) -> None:
    """A share of nothing could not be committed: a lease without rollouts counted as given back."""
    *_, empty = leases([[sample(1)], [sample(2, reward=1.0)]], 3, "rollouts")
    for (batch,) in (Collator().pad(empty), Collator().pack(empty)):
        assert (batch.weights.sum(), batch.loss_mask.any(), batch.sample_index.tolist()) == (0, False, [-1])
    assert empty.samples == ()
    empty.commit()
    *_, empty = leases([[sample(1)]], 2, "rollouts")
    empty.nack("no")
    with pytest.raises(BridgeError, match="given back"):
        empty.commit()


def test_a_cut_on_one_rank_is_known_to_all(sample: Build) -> None:
    """What a cut leaves changes everyone's weights, and only the rank that cuts knows it."""
    rollouts = [[sample(n, group=n, turns=(4 + 20 * (n == 1),))] for n in range(2)]
    shares = leases(rollouts, 2, "groups")
    collator = Collator(weights="token", max_length=10, truncate=True)
    for lease in shares:
        with pytest.raises(
            BatchError, match=r"rank 0 of 2 has a sample of more than max_length=10 .*: to cut"
        ):
            collator.pad(lease)
        with pytest.raises(BatchError, match=r"rank 0 of 2 has a .* or cut them with truncate=True"):
            Collator(max_length=10).pad(lease)  # or the others wait for it in vain
    cut = [[truncate(each, 10) for each in samples_of(lease)] for lease in shares]
    totals = TrainedCounts(*map(sum, zip(*map(count_trained, cut), strict=True)))
    weights = sum(batch.weights.sum() for lease in shares for batch in collator.pad(lease, totals=totals))
    assert weights == pytest.approx(1)
    rollouts = [[sample(n, turns=(4 + 20 * n,))] for n in range(2)]
    first, _ = leases(rollouts, 2, "rollouts")
    by_group = Collator(weights="group", max_length=10, truncate=True)
    with pytest.raises(BatchError, match="weight rule 'group' and groups that are split"):
        by_group.pad(first, totals=totals)


@pytest.mark.parametrize("cut", [False, True])
def test_every_rank_runs_as_many_passes(sample: Build, cut: bool) -> None:
    """With FSDP a rank that runs one pass less than the others lets them wait for ever."""
    experts = lambda n: np.full((n - 1, 2, 2), 3, np.uint8)  # noqa: E731
    lengths = [30, 3, 3, 3, 3, 3, 3, 3]
    rollouts = [[sample(n, turns=(m,), prompt=2, experts=experts(2 + m))] for n, m in enumerate(lengths)]
    shares = leases(rollouts, 3, "rollouts")
    totals = TrainedCounts(99, 8, 8, 1) if cut else None
    collator = Collator(sampling=True, max_length=12 if cut else None, truncate=cut, multiple_of=8, pad_id=9)
    padded = [collator.pad(lease, max_rows=1, totals=totals) for lease in shares]
    packed = [collator.pack(lease, row_tokens=12 if cut else 32, totals=totals) for lease in shares]
    assert [len(lease.rollouts) for lease in shares] == [2, 3, 3]
    assert [len(batches) for batches in padded] == [3, 3, 3]
    assert [len(batches) for batches in packed] == [2, 2, 2]
    (*_, real, empty) = padded[0]
    assert (empty.token_ids.tolist(), empty.attention_mask.tolist()) == ([[9] * 8], [[1] * 8])
    assert (empty.cu_seqlens.tolist(), empty.position_ids.tolist()) == ([0, 8], [list(range(8))])
    for other in (empty, packed[0][-1] if cut else empty):
        alike = {each.name: getattr(other, each.name) for each in fields(other)}
        for name, value in alike.items():
            expected = getattr(real, name)
            if isinstance(expected, np.ndarray) and value is not None:
                assert (name, value.dtype, value.ndim) == (name, expected.dtype, expected.ndim)
            elif name != "attention_mask":
                assert (value is None) == (expected is None), name


def test_more_batches_may_be_asked_for_and_fewer_not(sample: Build) -> None:
    """A trainer that holds samples alone has counted over its ranks itself."""
    step = [sample(n) for n in range(3)]
    batches = Collator().pad(step, max_rows=2, batches=4)
    assert [batch.sample_index.tolist() for batch in batches] == [[0, 1], [2], [-1], [-1]]
    assert sum(batch.weights.sum() for batch in batches) == pytest.approx(1)
    with pytest.raises(BatchError, match="takes 2 batches, batches=1"):
        Collator().pad(step, max_rows=2, batches=1)
    with pytest.raises(BatchError, match="no samples"):
        Collator().pad([], batches=2)


def test_a_share_that_fits_no_message_is_refused_before_anyone_is_told(sample: Build) -> None:
    rewards = (0.5,) * 60_000
    long = sample(1, turns=(1,) * 60_000, rewards=rewards, gap=0, prompt=1)
    held = pool_lease([[sample(1)], [sample(2)]])
    for member in held.members():
        data = data_of(member)
        long_one = msgspec.structs.replace(long, rollout_id=member.rollout_id.hex())
        member.data = msgspec.structs.replace(data, samples=(long_one, long_one, long_one))
    say = lambda member: said_of(member, name="worker", weights_version=3)  # noqa: E731
    with pytest.raises(ConfigError, match=r"share of this step does not fit.*ask for fewer groups"):
        shares_of(held, 2, "rollouts", say)


def test_the_order_in_which_a_rank_knows_the_group_changes_nothing(sample: Build) -> None:
    """A sum of floats depends on its order, and each rank adds its own rollouts first."""
    for seed in range(20):
        rewards = np.random.default_rng(seed).random(64)
        step = [sample(n, reward=float(reward)) for n, reward in enumerate(rewards)]
        (one,) = advantages(step).groups
        (other,) = advantages(step[::-1]).groups
        assert one == other
