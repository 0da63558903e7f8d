from typing import Any

import numpy as np
import pytest
from token_tracking import GenerationRecord, RecordError

GOOD: dict[str, Any] = {
    "prompt_ids": np.arange(12, dtype=np.int32),
    "output_ids": np.array([5, 6, 99], np.int32),
    "logprobs": np.array([-0.5, 0.0, -2.0], np.float32),
    "logprob_kind": "raw",
    "finish_reason": "stop",
    "stop_id": 99,
    "weight_version": 3,
}


def test_a_consistent_answer_is_taken():
    GenerationRecord(**GOOD).check_prompt(GOOD["prompt_ids"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "2 log-probabilities for 3"),  # vllm#27482
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "log-probability nan of output token 1"),
        ({"logprobs": np.array([-1, -np.inf, -1], np.float32)}, "log-probability -inf"),
        ({"logprobs": np.array([-1, 1.0, -1], np.float32)}, "log-probability 1"),
        ({"logprobs": None}, "logprob_kind is 'raw'"),
        ({"logprob_kind": "none"}, "logprob_kind is 'none'"),
        ({"stop_id": 98}, "last output id is 99"),  # vllm#47616
        ({"finish_reason": "length"}, "finish reason 'length'"),
        ({"finish_reason": "abort"}, "finish reason 'abort'"),
        ({"output_ids": np.array([5, 6, 7], np.int32)}, "cut the stop token off"),
        ({"output_ids": np.array([5, -6, 99], np.int32)}, "negative"),
        ({"output_ids": np.array([5, 6, 99], np.int64)}, "int32"),
        (
            {"output_ids": np.array([], np.int32), "logprobs": np.array([], np.float32), "stop_id": None},
            "without",
        ),
        ({"weight_version": -1}, "weight version"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], why: str):
    with pytest.raises(RecordError, match=why):
        GenerationRecord(**(GOOD | change))


def test_the_prompt_must_be_the_one_that_was_sent():
    """sglang#26555: an engine that decodes the ids and tokenizes again."""
    record = GenerationRecord(**GOOD)
    other = GOOD["prompt_ids"].copy()
    other[4] = 77
    with pytest.raises(RecordError, match="id 4 at 4, id 77 was sent"):
        record.check_prompt(other)
    with pytest.raises(RecordError, match="12 ids, 11 were sent"):
        record.check_prompt(other[:-1])


def test_a_repeated_prompt_is_refused():
    prompt = GOOD["prompt_ids"]
    record = GenerationRecord(
        prompt_ids=prompt, output_ids=np.concatenate([prompt, [5]]).astype(np.int32), finish_reason="length"
    )
    with pytest.raises(RecordError, match="whole prompt"):
        record.check_prompt(prompt)
