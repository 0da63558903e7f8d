"""How much tokens count: named rules, by hand and by property."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking.sample import Sample
from trainer_bridge.errors import BatchError
from trainer_bridge.weights import TrainedCounts, count_trained, loss_weights

Build = Callable[..., Sample]


def totals(samples: list[Sample], rule: str, **options: int) -> list[float]:
    return [float(weights.sum()) for weights in loss_weights(samples, rule, **options)]


def test_a_rollout_in_three_samples_counts_once(miles_2378: list[Sample]) -> None:
    """radixark/miles#2378."""
    a1, a2, a3, b = totals(miles_2378, "rollout")
    assert a1 + a2 + a3 == pytest.approx(b) == pytest.approx(0.5)
    assert (a1, a2, a3) == pytest.approx((0.5 / 6, 0.5 / 3, 0.5 / 2)), "by its tokens, not by its samples"


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("token", {}, [0.1, 0.2, 0.3, 0.4]),
        ("sample", {}, [0.25, 0.25, 0.25, 0.25]),
        ("group", {}, [0.1, 0.2, 0.3, 0.4]),
        ("constant", {"length_norm": 50}, [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_the_other_rules(
    miles_2378: list[Sample], rule: str, options: dict[str, int], expected: list[float]
) -> None:
    assert totals(miles_2378, rule, **options) == pytest.approx(expected)


def test_groups_count_the_same_whatever_their_size(sample: Build) -> None:
    step = [sample(1, group=1, turns=(30,)), sample(2, group=1, turns=(10,)), sample(3, group=2, turns=(5,))]
    assert totals(step, "group") == pytest.approx([0.375, 0.125, 0.5])


@pytest.mark.parametrize("rule", ["token", "sample", "rollout", "group"])
def test_samples_out_of_the_loss_change_nothing(sample: Build, miles_2378: list[Sample], rule: str) -> None:
    evidence = sample(9, group=7, turns=(99,), in_loss=False)
    alone, together = loss_weights(miles_2378, rule), loss_weights([*miles_2378, evidence], rule)
    for a, b in zip(alone, together, strict=False):
        np.testing.assert_array_equal(a, b)
    assert not together[-1].any()


def test_ranks_that_share_their_counts_weigh_as_one(sample: Build, miles_2378: list[Sample]) -> None:
    first, second = miles_2378, [sample(5, group=3, turns=(7,)), sample(6, group=3, turns=(1, 2))]
    summed = TrainedCounts(*map(sum, zip(count_trained(first), count_trained(second), strict=True)))
    for rule in ("token", "sample", "rollout", "group"):
        whole = loss_weights([*first, *second], rule)
        ranks = (*loss_weights(first, rule, totals=summed), *loss_weights(second, rule, totals=summed))
        for a, b in zip(whole, ranks, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_sequences_first_token_is_never_trained(sample: Build) -> None:
    """No model gives it a log-probability, so it must not take a share either."""
    (weights,) = loss_weights([sample(1, prompt=0, turns=(4,))], "token")
    np.testing.assert_allclose(weights, [0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


def test_what_is_refused(sample: Build, miles_2378: list[Sample]) -> None:
    with pytest.raises(BatchError, match=r"parts \[0, 2\] were given"):
        loss_weights([miles_2378[0], miles_2378[2]])
    with pytest.raises(BatchError, match=r"parts \[0, 0\] were given"):
        loss_weights([sample(1, parts=2), sample(1, parts=2)])
    with pytest.raises(BatchError, match="disagree on attempt"):
        loss_weights([sample(1), sample(1, attempt=1)])
    with pytest.raises(BatchError, match="disagree on reward"):
        loss_weights([sample(1, parts=2, reward=1.0), sample(1, part=1, parts=2, reward=None)])
    with pytest.raises(BatchError, match="'constant' needs a length"):
        loss_weights([sample(1)], "constant")
    with pytest.raises(BatchError, match="rule is 'tokens': give 'token', 'sample'"):
        loss_weights([sample(1)], "tokens")  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rule=st.sampled_from(["token", "sample", "rollout", "group"]))
def test_weights_add_up_to_one_or_nothing_trains(sample: Build, data: st.DataObject, rule: str) -> None:
    step = []
    for rollout in range(data.draw(st.integers(1, 6))):
        parts = data.draw(st.integers(1, 3))
        group = data.draw(st.integers(0, 2))
        step += [
            sample(
                rollout,
                group=group,
                part=part,
                parts=parts,
                turns=data.draw(st.lists(st.integers(1, 9), max_size=3).map(tuple)),
                prompt=data.draw(st.integers(0, 3)),
                in_loss=data.draw(st.booleans()),
            )
            for part in range(parts)
        ]
    weights = loss_weights(step, rule)
    total = sum(float(each.sum()) for each in weights)
    assert total == pytest.approx(1, abs=1e-5) or (total == 0 and count_trained(step).tokens == 0)
    for each, weight in zip(step, weights, strict=True):
        assert weight.dtype == np.float32
        assert not weight[(each.loss_mask == 0)].any()
