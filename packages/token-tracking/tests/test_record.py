import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_tracking import ChatTemplate, Conversation, GenerationRecord, RecordError
from token_tracking.media import media_ids
from token_tracking.testing import completion

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


# --- every way an engine can lie has a code, and some a repair

PROMPT = np.arange(100, 112, dtype=np.int32)
WORDS = {1: "AC", 2: "TION", 3: ": ls\n", 4: "OBS", 5: "junk", 99: "<end>"}


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def made(ids: list[int], **change: Any) -> GenerationRecord:
    values: dict[str, Any] = {
        "prompt_ids": PROMPT,
        "output_ids": np.array(ids, np.int32),
        "logprobs": -np.arange(len(ids), dtype=np.float32),
        "logprob_kind": "raw",
        "finish_reason": "stop",
        "kept_ids": np.array([i for one in ids for i in (one, 7)], np.int32),
        "kept_offsets": np.arange(0, 2 * len(ids) + 1, 2, dtype=np.int64),
    }
    return GenerationRecord(**(values | change))


def rows(count: int) -> Any:
    return np.arange(count * 4, dtype=np.int32).reshape(count, 2, 2)


def code(call: Callable[[], object]) -> str:
    with pytest.raises(RecordError) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "logprob_count"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "logprob_value"),
        ({"logprobs": np.array([-1, -9999, -1], np.float32)}, "logprob_value"),  # vLLM: none recorded
        ({"logprob_kind": "none"}, "logprob_kind"),
        ({"stop_id": 98}, "stop_missing"),
        ({"finish_reason": "length"}, "stop_reason"),
        ({"stop_id": None, "finish_reason": "length", "stop_string": "x"}, "stop_reason"),
        ({"stop_string": ""}, "stop_reason"),
        ({"output_ids": np.array([5, -6, 99], np.int32)}, "vocabulary"),
        ({"output_ids": np.array([5, 6, 99], np.int64)}, "array"),
        ({"weight_version": -1}, "version"),
        ({"completion_tokens": 4}, "counts"),  # vllm#27482, vllm#29074: a stream that loses ids
        ({"prompt_tokens": 11}, "counts"),
    ],
)
def test_each_contradiction_has_a_code(change: dict[str, Any], name: str):
    assert code(lambda: GenerationRecord(**(GOOD | change))) == name


def test_the_code_survives_a_copy():
    error = RecordError("why", code="counts")
    assert copy.copy(error).code == "counts"
    assert str(copy.copy(error)) == "why"


def test_the_engines_own_counts_are_compared():
    GenerationRecord(**GOOD, prompt_tokens=12, completion_tokens=3)


def test_a_prompt_that_was_read_twice_or_with_a_second_bos_is_named():
    twice = made([1, 99], prompt_ids=np.concatenate([PROMPT, PROMPT]))
    assert code(lambda: twice.check_prompt(PROMPT)) == "prompt_doubled"
    bos = made([1, 99], prompt_ids=np.concatenate([PROMPT[:1], PROMPT]))
    assert code(lambda: bos.check_prompt(PROMPT)) == "prompt_doubled"
    assert code(lambda: made([1, 99]).check_prompt(PROMPT[:-1])) == "prompt"


@pytest.mark.parametrize("start", [0, 11])
def test_an_echo_is_refused_and_can_be_taken_off(start: int):
    """An OpenAI route with `echo`: the output begins with the prompt, the counts do not."""
    answer = [1, 2, 99]
    record = made(
        [*PROMPT.tolist(), *answer], completion_tokens=3, routed_experts=rows(14 - start), routed_start=start
    )
    assert code(lambda: record.check_prompt(PROMPT)) == "prompt_echoed"
    repaired = record.without_echo(PROMPT)
    repaired.check_prompt(PROMPT)
    assert repaired.output_ids.tolist() == answer
    assert repaired.logprobs is not None
    assert repaired.logprobs.tolist() == [-12, -13, -14]
    assert repaired.kept is not None
    assert repaired.kept.ids.tolist() == [1, 7, 2, 7, 99, 7]
    assert np.array_equal(repaired.routed_experts, record.routed_experts)
    assert repaired.repairs == ("echo_removed",)
    assert repaired.without_echo(PROMPT) is repaired


def test_an_echo_alone_holds_no_answer():
    record = made(PROMPT.tolist(), finish_reason="stop")
    assert code(lambda: record.without_echo(PROMPT)) == "empty"


def test_a_short_prompt_may_be_repeated_by_the_model():
    record = made([1, 2, 1, 2, 99], prompt_ids=np.array([1, 2], np.int32))
    record.check_prompt(np.array([1, 2], np.int32))
    assert record.without_echo(np.array([1, 2], np.int32)) is record


@pytest.mark.parametrize(
    ("ids", "change", "end"),
    [
        ([1, 2, 3, 4, 5], {"stop_string": "OBS"}, 4),  # vllm#47616
        ([1, 2, 3, 4, 5, 5, 5, 5], {"stop_string": "ION: "}, 3),  # it ends inside a token
        ([1, 2, 99, 5], {}, 3),
        ([1, 99, 5, 99], {"stop_id": 99}, 2),
    ],
)
def test_ids_past_the_stop_are_refused_and_can_be_cut(ids: list[int], change: dict[str, Any], end: int):
    """vllm#47616: speculative decoding accepts tokens past the stop string; text is cut, ids are not."""
    record = made(ids, routed_experts=rows(11 + len(ids)), completion_tokens=len(ids), **change)
    assert code(lambda: record.check_stop({99}, decode)) == "stop_passed"
    cut = record.cut_at_stop({99}, decode)
    cut.check_stop({99}, decode)
    assert cut.output_ids.tolist() == ids[:end]
    assert cut.stop_id == (99 if ids[end - 1] == 99 else None)
    assert cut.logprobs is not None
    assert len(cut.logprobs) == end
    assert cut.kept is not None
    assert cut.kept.offsets.tolist() == list(range(0, 2 * end + 1, 2))
    assert np.array_equal(cut.routed_experts, rows(11 + end))
    assert cut.repairs == ("cut_at_stop",)
    assert cut.cut_at_stop({99}, decode) is cut


@given(
    ids=st.lists(st.sampled_from(sorted(WORDS)), min_size=1, max_size=12),
    stop=st.sampled_from([None, "OBS", "TION:", "kj", "A", "\n", "<end>"]),
)
def test_a_cut_ends_in_the_first_token_that_ends_the_stop(ids: list[int], stop: str | None):
    record = made(ids, stop_string=stop)
    ends = [n for n in range(1, len(ids) + 1) if 99 in ids[:n] or (stop and stop in decode(ids[:n]))]
    cut = record.cut_at_stop({99}, decode)
    assert cut.output_ids.tolist() == (ids[: ends[0]] if ends else ids)


def test_a_stop_that_is_not_there_is_refused():
    """Finish reason `stop`, and the ids show neither stop token nor stop string."""
    assert code(lambda: made([1, 2]).check_stop({99}, decode)) == "stop_missing"
    assert code(lambda: made([1, 2], stop_string="OBS").check_stop({99}, decode)) == "stop_missing"
    made([1, 2]).check_stop((), decode)  # no stop token is known: nothing can be said
    made([1, 2], finish_reason="length").check_stop({99}, decode)
    made([1, 2, 0], stop_id=0).check_stop({99}, lambda ids: "")


IDENTITY: dict[str, Any] = {
    "rollout_id": "0" * 32,
    "group_id": "1" * 32,
    "task_id": "task",
    "reward": 1.0,
    "status": "completed",
    "source": "sampled",
}
START = [{"role": "user", "content": "fix it"}]


def test_repairs_are_counted_and_survive_a_snapshot(compiled: Callable[..., ChatTemplate]):
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    prompt = conversation.prompt_ids()
    good = completion(conversation, "ok", logprob=-0.5)
    ids = np.concatenate([prompt, good.output_ids, good.output_ids[:1]])
    bad = GenerationRecord(prompt_ids=prompt, output_ids=ids, finish_reason="stop")
    before = conversation.to_bytes()
    assert code(lambda: conversation.record(bad)) == "prompt_echoed"
    bad = bad.without_echo(prompt)
    assert code(lambda: conversation.record(bad)) == "stop_passed"
    assert conversation.to_bytes() == before
    conversation.record(bad.cut_at_stop(conversation.template.stop_ids))
    conversation = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    assert conversation.findings() == {"cut_at_stop": 1, "echo_removed": 1}
    (sample,) = conversation.samples(**IDENTITY)
    assert np.array_equal(sample.token_ids, np.concatenate([prompt, good.output_ids]))


def test_a_sampled_media_placeholder_is_kept_flagged_and_not_trained(compiled: Callable[..., ChatTemplate]):
    """verl#7038: Qwen's 151655 in sampled text; no image stands behind it, embedding code looks for one."""
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    prompt = conversation.prompt_ids()
    good = completion(conversation, "look here")
    ids = np.concatenate([good.output_ids[:1], [151655], good.output_ids[1:]]).astype(np.int32)
    first = conversation.record(GenerationRecord(prompt_ids=prompt, output_ids=ids, finish_reason="stop"))
    conversation.advance([*START, first, {"role": "user", "content": "and <|image_pad|> as text?"}])
    conversation.record(completion(conversation, "ok"))
    conversation = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    assert conversation.findings() == {"media_placeholder": 1}
    assert [turn.segments[0].media for turn in conversation.branches[0].turns] == [(151655,), ()]
    (sample,) = conversation.samples(**IDENTITY)
    assert np.array_equal(sample.token_ids[len(prompt) : len(prompt) + len(ids)], ids)
    assert np.count_nonzero(sample.token_ids == 151655) == 1
    assert not sample.in_loss
    assert sample.provenance["media_placeholder"] == "turn 0 sampled id 151655"
    assert conversation.samples(**IDENTITY, media_in_loss=True)[0].in_loss
    assert not conversation.samples(**IDENTITY, media_in_loss=True, in_loss=False)[0].in_loss


def test_the_placeholders_to_ban_are_known(compiled: Callable[..., ChatTemplate]):
    assert media_ids(compiled("qwen2_5").tokenizer) == {151654, 151655, 151656}
