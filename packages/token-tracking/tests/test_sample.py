from typing import Any

import numpy as np
import pytest
from token_tracking import MissingLogprobsError, Sample, SampleError, Turn


def build(**change: Any) -> Sample:
    values: dict[str, Any] = {
        "rollout_id": "0" * 32,
        "group_id": "1" * 32,
        "task_id": "t",
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "loss_mask": np.array([0, 0, 1, 1], np.uint8),
        "logprobs": np.array([np.nan, np.nan, -0.5, -1.0], np.float32),
        "versions": np.array([-1, -1, 0, 0], np.int32),
        "prompt_length": 2,
        "turns": (Turn(start=2, end=4, finish_reason="stop", logprob_kind="raw"),),
        "reward": 1.0,
        "status": "completed",
        "source": "sampled",
    }
    return Sample(**(values | change))


def test_arrays_are_held_read_only_and_the_callers_stay_writable():
    ids = np.array([1, 2, 3, 4], np.int32)
    sample = build(token_ids=ids)
    with pytest.raises(ValueError, match="read-only"):
        sample.token_ids[0] = 9
    ids[0] = 1
    assert np.shares_memory(ids, sample.token_ids)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss_mask": np.zeros(3, np.uint8)}, "3 entries for 4"),
        ({"loss_mask": np.array([1, 0, 1, 1], np.uint8)}, "only sampled tokens are trained"),
        (
            {"versions": np.array([-1, -1, -1, 0], np.int32), "loss_mask": np.zeros(4, np.uint8)},
            "exactly where",
        ),
        ({"logprobs": np.array([0, 0, 0.5, 0], np.float32)}, "<= 0"),
        ({"prompt_length": 1}, "prompt_length is 1"),
        ({"rollout_id": "x"}, "32 lower-case hex"),
        ({"reward": float("nan")}, "reward must be finite"),
        ({"part": 1}, "part"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], why: str):
    with pytest.raises(SampleError, match=why):
        build(**change)


def test_a_ratio_needs_logprobs():
    build().require_logprobs()
    with pytest.raises(MissingLogprobsError, match="replayed"):
        build(source="replayed").require_logprobs()
    with pytest.raises(MissingLogprobsError, match="1 of 2"):
        build(logprobs=np.array([np.nan, np.nan, np.nan, -1], np.float32)).require_logprobs()
