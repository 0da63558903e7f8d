"""Who is compared with whom, and what a turn is credited with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from token_tracking.sample import Sample
from trainer_bridge.advantages import advantages
from trainer_bridge.credit import token_rewards
from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import group_samples

Build = Callable[..., Sample]


def values(samples: list[Sample], rule: str = "grpo", **options: object) -> list[list[float]]:
    """The different advantages on each sample's trained tokens, in order."""
    out = []
    for sample, tokens in zip(samples, advantages(samples, rule, **options).tokens, strict=True):
        trained = tokens[(sample.loss_mask == 1) & sample.in_loss].tolist()
        out.append([v for i, v in enumerate(trained) if i == 0 or v != trained[i - 1]])
    return out


def test_mean_over_rollouts_not_samples(miles_2378: list[Sample]) -> None:
    """radixark/miles#2378: by sample the mean would be 0.75."""
    (group,) = advantages(miles_2378, "dr_grpo").groups
    assert (group.mean, group.rollouts) == (0.5, 2)
    assert values(miles_2378, "dr_grpo") == [[0.5], [0.5], [0.5], [-0.5]], "every part gets its rollout's"


def test_the_rules_by_hand(sample: Build) -> None:
    step = [sample(n, reward=reward) for n, reward in enumerate((1.0, 0.0, 0.0, 2.0))]
    deviation = np.std([1, 0, 0, 2], ddof=1)
    grpo = [[pytest.approx((r - 0.75) / deviation, rel=1e-4)] for r in (1, 0, 0, 2)]
    assert values(step, "grpo") == grpo
    assert values(step, "dr_grpo") == [[0.25], [-0.75], [-0.75], [1.25]]
    assert values(step, "rloo") == [[pytest.approx(v)] for v in (1 - 2 / 3, -1, -1, 2 - 1 / 3)]
    assert values(step, "reward") == [[1.0], [0.0], [0.0], [2.0]]


@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo"])
def test_an_infrastructure_failure_shifts_nothing(sample: Build, rule: str) -> None:
    """Promise 8: neither in the mean nor in the loss, graded by accident or not."""
    step = [sample(1, reward=1.0), sample(2, reward=0.0)]
    clean = values(step, rule)
    for reward in (None, 0.0):
        failed = sample(3, reward=reward, in_loss=False, in_baseline=False, status="failed")
        assert values([*step, failed], rule) == [*clean, []]


def test_outside_the_baseline_but_in_the_loss(sample: Build) -> None:
    step = [sample(1, reward=1.0), sample(2, reward=0.0), sample(3, reward=0.0, in_baseline=False)]
    assert values(step, "dr_grpo") == [[0.5], [-0.5], [-0.5]]
    assert values(step, "rloo") == [[1.0], [-1.0], [-0.5]]


def test_groups_without_signal(sample: Build) -> None:
    """One member; equal rewards, whose deviation is rounding dust; nobody who counts."""
    alone = sample(1, group=1, reward=1.0)
    equal = [sample(n, group=2, reward=0.1) for n in (2, 3, 4)]
    outside = sample(5, group=3, reward=1.0, in_baseline=False)
    got = advantages([alone, *equal, outside], "grpo")
    assert not any(tokens.any() for tokens in got.tokens)
    assert [(g.rollouts, g.has_signal) for g in got.groups] == [(1, False), (3, False), (0, False)]
    assert values([alone], "rloo") == [[0.0]]
    assert values([alone], "reward") == [[1.0]]


def test_not_graded_and_in_the_loss_is_refused(sample: Build) -> None:
    with pytest.raises(BatchError, match=r"rollout 0{31}2 is in the loss but not graded"):
        advantages([sample(1, reward=1.0), sample(2, reward=None)])


def test_turn_rewards_do_not_collapse_to_the_last(sample: Build) -> None:
    """areal-project/AReaL#1661: two turns with rewards of their own, overwritten by one number."""
    step = [
        sample(1, turns=(2, 3), rewards=(-0.2, 1.0), reward=None),
        sample(2, turns=(2, 3), rewards=(0.4, 0.0), reward=None),
    ]
    with pytest.raises(BatchError, match="has turn rewards: say what to do with them"):
        advantages(step)
    # From each turn on: A earns 0.8 then 1.0, B 0.4 then 0.0; means 0.9 and 0.2, so the baseline is 0.55.
    assert values(step, "dr_grpo", credit="turn") == [
        [pytest.approx(0.25), pytest.approx(0.45)],
        [pytest.approx(-0.15), pytest.approx(-0.55)],
    ]
    assert values(step, "dr_grpo", credit="turn", discount=0.5)[0][0] == pytest.approx(0.3 - 0.425)
    rewards = token_rewards(step, group_samples(step).rollouts, "turn")
    np.testing.assert_allclose(rewards[0], [0, 0, 0, 0, -0.2, 0, 0, 0, 0, 1.0], rtol=1e-6)


def test_turn_rewards_and_an_outcome(sample: Build) -> None:
    step = [
        sample(1, turns=(2, 2), rewards=(0.5, None), reward=1.0),
        sample(2, turns=(2, 2), reward=0.0),
    ]
    assert values(step, "reward", credit="turn_and_rollout") == [[1.5, 1.0], [0.0]]
    assert values(step, "reward", credit="rollout") == [[1.0], [0.0]]
    rewards = token_rewards(step, group_samples(step).rollouts, "turn_and_rollout")
    assert rewards[0].nonzero()[0].tolist() == [4, 8]


def test_a_turn_counts_once_over_parts_and_resumes(sample: Build) -> None:
    """A later part repeats a turn (mask 0, no reward); an aborted turn goes on in a second piece."""
    first = sample(1, turns=(2,), rewards=(1.0,), parts=2, reward=None)
    again = sample(1, turns=(2, 3, 4), gap=0, rewards=(None, None, 2.0), part=1, parts=2, reward=None)
    repeated, aborted, resumed = again.turns
    again = msgspec.structs.replace(
        again,
        loss_mask=np.array([0] * 5 + [1] * 7, np.uint8),
        turns=(repeated, msgspec.structs.replace(aborted, finish_reason="abort"), resumed),
    )
    assert values([first, again], "reward", credit="turn", discount=0.5) == [[2.0], [2.0]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rule=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_of_a_group_add_up_to_zero(sample: Build, data: st.DataObject, rule: str) -> None:
    """By rollout, whatever their parts and turns; and without turn rewards both credits say the same."""
    number = st.floats(-5, 5, allow_nan=False).map(lambda v: round(v, 3))
    step: list[Sample] = []
    rollouts = data.draw(st.integers(2, 5))
    for rollout in range(rollouts):
        parts = data.draw(st.integers(1, 3))
        reward = data.draw(number)
        for part in range(parts):
            lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
            step.append(sample(rollout, turns=lengths, part=part, parts=parts, reward=reward))
    plain = advantages(step, rule)
    firsts = {s.rollout_id: float(t[s.loss_mask == 1][0]) for s, t in zip(step, plain.tokens, strict=True)}
    assert len(firsts) == rollouts
    assert sum(firsts.values()) == pytest.approx(0, abs=1e-4 * max(1, *map(abs, firsts.values())))
    assume(plain.groups[0].has_signal)
    by_turn = advantages(step, rule, credit="turn_and_rollout")
    for a, b in zip(plain.tokens, by_turn.tokens, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
