"""Every way an engine can lie has a code, a case here, and where there is a safe one, a counted repair."""

import copy
import enum
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_tracking import ChatTemplate, Conversation, GenerationRecord, MissingLogprobsError, RecordError
from token_tracking.answers.expert_payloads import decode_sglang_experts
from token_tracking.backends.hf import HFTokenizer
from token_tracking.errors import RecordCode
from token_tracking.media import media_ids
from token_tracking.testing import IDENTITY, completion

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


TWICE = np.concatenate([PROMPT, PROMPT])
BOS = np.concatenate([PROMPT[:1], PROMPT])
CHANGED = np.where(PROMPT == 104, 77, PROMPT).astype(np.int32)
EMPTY: dict[str, Any] = {"output_ids": np.array([], np.int32), "logprobs": np.array([], np.float32)}


def good(**change: Any) -> GenerationRecord:
    return GenerationRecord(**(GOOD | change))


def said(text: str) -> None:
    made([1, 2, 3, 99], text=text).check_text({99}, decode)


def ids_of(values: Sequence[int]) -> Any:
    return np.array(values, np.int32)


def logprobs(*values: float) -> Any:
    return np.array(values, np.float32)


LIES: list[tuple[RecordCode, str, Callable[[], object]]] = [
    ("array", "int32", lambda: good(output_ids=np.array([5, 6, 99], np.int64))),
    ("array", "got list", lambda: good(prompt_ids=[1, 2])),
    ("array", "repairs are 'x'", lambda: good(repairs="x")),
    ("array", "repairs are 'x'", lambda: GenerationRecord.without_logprobs(**(GOOD | {"repairs": "x"}))),
    ("array", "repairs are", lambda: good(repairs=("x", 5))),
    ("finish_reason", "'tool_calls' is 'stop' here", lambda: good(finish_reason="tool_calls")),  # OpenAI
    ("finish_reason", "'eos_token' is 'stop' here", lambda: good(finish_reason="eos_token")),  # TGI
    ("finish_reason", "'max_tokens' is 'length' here", lambda: good(finish_reason="max_tokens")),  # Anthropic
    ("finish_reason", "'cancelled' is 'abort' here", lambda: good(finish_reason="cancelled")),
    ("finish_reason", "ask again", lambda: good(finish_reason="error")),
    ("finish_reason", "not ended", lambda: good(finish_reason=None)),
    ("finish_reason", "pass its 'type'", lambda: good(finish_reason={"type": "stop", "matched": 99})),
    ("finish_reason", "'foo': need 'stop'", lambda: good(finish_reason="foo")),
    ("logprob_count", "2 log-probabilities for 3", lambda: good(logprobs=logprobs(0, 0))),
    ("logprob_kind", "'raw', but there are no", lambda: good(logprobs=None)),
    ("logprob_kind", "'none', but there are some", lambda: good(logprob_kind="none")),
    ("logprob_kind", "'foo': need 'none', 'raw'", lambda: good(logprob_kind="foo")),
    ("logprob_kind", "None: need 'none', 'raw'", lambda: good(logprob_kind=None)),
    ("logprob_value", "nan of output token 1", lambda: good(logprobs=logprobs(-1, np.nan, -1))),
    ("logprob_value", "-inf of output token 0", lambda: good(logprobs=logprobs(-np.inf, -1, -1))),
    ("logprob_value", "inf of output token 2", lambda: good(logprobs=logprobs(-1, -1, np.inf))),
    ("logprob_value", "1.0 of output token 1", lambda: good(logprobs=logprobs(-1, 1, -1))),
    ("logprob_value", "-9999.0 of output token 1", lambda: good(logprobs=logprobs(-1, -9999, -1))),  # vLLM
    ("sampling", "top_p is 1.5", lambda: good(top_p=1.5)),
    ("sampling", "top_p is 0", lambda: good(top_p=0)),
    ("sampling", "temperature is nan", lambda: good(temperature=float("nan"))),
    ("sampling", "top_k is -2", lambda: good(top_k=-2)),
    ("sampling", "temperature is '0.7': need a number", lambda: good(temperature="0.7")),
    ("sampling", "temperature is True", lambda: good(temperature=True)),
    ("sampling", "temperature is 1000", lambda: good(temperature=10**400)),
    ("sampling", "top_p is np.float32.nan", lambda: good(top_p=np.float32("nan"))),
    ("sampling", "top_k is 20.0: need an int", lambda: good(top_k=20.0)),
    ("sampling", "top_k is 18446744073709551616", lambda: good(top_k=2**64)),
    ("sampling", "min_p is -0.1", lambda: good(min_p=-0.1)),
    ("version", "weight version -1", lambda: good(weight_version=-1)),
    ("version", "weight_version is 'v10'", lambda: good(weight_version="v10")),  # SGLang
    ("version", "weight_version is True", lambda: good(weight_version=True)),
    ("vocabulary", "negative id -6", lambda: good(output_ids=ids_of([5, -6, 99]))),
    ("vocabulary", "output token 2 has id 99.*end at 98", lambda: good().check_vocabulary(99)),
    ("counts", "counts 4 completion_tokens, 3 ids", lambda: good(completion_tokens=4)),  # vllm#27482, #29074
    ("counts", "counts 11 prompt_tokens, 12 ids", lambda: good(prompt_tokens=11)),
    ("counts", "prompt_tokens is '12'", lambda: good(prompt_tokens="12")),
    ("empty", "without a single output id", lambda: good(stop_id=None, **EMPTY)),
    (
        "prompt",
        "id 104 at 4, id 77 was sent: it tok",
        lambda: made([1]).check_prompt(CHANGED, lambda ids: f"{ids}"),
    ),
    (
        "prompt",
        "12 ids, 11 were sent; they differ from position 11",
        lambda: made([1]).check_prompt(PROMPT[:-1]),
    ),
    ("prompt_doubled", "twice", lambda: made([1], prompt_ids=TWICE).check_prompt(PROMPT)),
    ("prompt_doubled", "add_bos", lambda: made([1], prompt_ids=BOS).check_prompt(PROMPT)),
    ("prompt_echoed", "whole prompt", lambda: made([*PROMPT.tolist(), 1]).check_prompt(PROMPT)),
    # sglang#26555: an engine that decodes the ids and tokenizes again.
    ("prompt_retokenized", "id 104 at 4, id 77", lambda: made([1]).check_prompt(CHANGED, lambda ids: "same")),
    (
        "prompt_retokenized",
        "id 100 at 0, id 101",
        lambda: made([1]).check_prompt(ids_of([*PROMPT, 7]) + 1, lambda ids: "same"),
    ),
    ("prompt_truncated", "from id 0 on", lambda: made([1], prompt_ids=PROMPT[5:]).check_prompt(PROMPT)),
    ("prompt_truncated", "from id 7 on", lambda: made([1], prompt_ids=PROMPT[:7]).check_prompt(PROMPT)),
    (
        "prompt_truncated",
        "from id 2 on",
        lambda: made([1], prompt_ids=np.delete(PROMPT, [2, 3])).check_prompt(PROMPT),
    ),
    ("stop_missing", "last output id is 99", lambda: good(stop_id=98)),
    ("stop_missing", "cut the stop token off", lambda: good(output_ids=ids_of([5, 6, 7]))),
    ("stop_missing", "do not hold a stop token", lambda: made([1, 2]).check_stop({99}, decode)),
    ("stop_missing", "stop string 'OBS'", lambda: made([1, 2], stop_string="OBS").check_stop({99}, decode)),
    ("stop_passed", "1 ids follow", lambda: made([1, 4, 5], stop_string="OBS").check_stop({99}, decode)),
    ("stop_reason", "finish reason 'length'", lambda: good(finish_reason="length")),
    ("stop_reason", "finish reason 'abort'", lambda: good(finish_reason="abort")),
    ("stop_reason", "'x' with", lambda: good(stop_id=None, finish_reason="length", stop_string="x")),
    ("stop_reason", "stop_string is empty", lambda: good(stop_string="")),
    ("stop_reason", "stop_string is 5", lambda: good(stop_string=5)),
    ("stop_reason", "stop_id is 'OBS'.*vLLM's stop_reason", lambda: good(stop_id="OBS")),
    # vllm#27482: a parser or stream that drops tokens; vllm#47616: ids go on where the text ends.
    ("text", "from character 2 on: 'AC: ls", lambda: said("AC: ls")),
    ("text", "from character 6 on: 'ACTION' and 'ACTION: ls", lambda: said("ACTION")),
    ("text", "4 output ids differ", lambda: said("ACTION: ls\nOBS")),
    ("text", "text is b'hi'", lambda: good(text=b"hi")),
    ("text", "text is 5", lambda: good(text=5)),
    ("kept_set", "come together", lambda: made([1], kept_offsets=None)),
    ("kept_set", "flat int32", lambda: made([1], kept_ids=np.array([1, 7]))),
    ("kept_set", "got a list", lambda: made([1], kept_ids=[1])),
    ("kept_offsets", "got a list", lambda: made([1], kept_offsets=[0, 2])),
    ("kept_offsets", "length 2", lambda: made([1], kept_offsets=np.array([0, 1, 2]))),
    ("kept_sampled", "id 1. is not among", lambda: made([1], kept_ids=ids_of([2, 7]))),
    ("kept_duplicate", "holds id 1 twice", lambda: made([1], kept_ids=ids_of([1, 1]))),
    ("kept_vocabulary", "negative id -1", lambda: made([1], kept_ids=ids_of([1, -1]))),
    ("kept_vocabulary", "kept_ids 1 has id 7", lambda: made([1]).check_vocabulary(7)),
    ("routed_rows", "13 rows", lambda: made([1, 2], routed_experts=rows(14)[:13], routed_start=1)),
    ("routed_rows", "routed_start is '0'", lambda: made([1], routed_experts=rows(12), routed_start="0")),
    ("routed_shape", "must have shape", lambda: made([1], routed_experts=rows(12)[0])),
    ("routed_shape", "numpy array or DeferredRows, got a str", lambda: made([1], routed_experts="abc")),
    ("routed_padding", "holds -1", lambda: made([1], routed_experts=rows(12) - 1)),
    ("routed_payload", "no base64", lambda: decode_sglang_experts("%%%", layers=2, top_k=2)),
]


@pytest.mark.original("A-logprob-sentinel", "A-logprob-lengths")
@pytest.mark.parametrize(
    ("name", "why", "lie"), LIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_lie_has_a_code(name: RecordCode, why: str, lie: Callable[[], object]):
    with pytest.raises(RecordError, match=why) as caught:
        lie()
    assert caught.value.code == name


def test_every_code_has_a_lie():
    assert {name for name, _, _ in LIES} == set(get_args(RecordCode))


class Reason(str, enum.Enum):  # noqa: UP042 - str() of it is not its text
    STOP = "stop"


class Version(enum.IntEnum):
    THREE = 3


def test_numpy_scalars_and_enum_members_are_held_as_plain_values(compiled: Callable[..., ChatTemplate]):
    """They passed, and `to_bytes` failed on them much later."""
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    whole = completion(conversation, "ok", logprob=-0.5)
    rows = np.zeros((len(whole.prompt_ids) + len(whole.output_ids) - 1, 2, 1), np.uint8)
    assert whole.stop_id is not None
    change: dict[str, Any] = {
        "finish_reason": Reason.STOP,
        "logprob_kind": np.str_("raw"),
        "stop_id": np.int32(whole.stop_id),
        "weight_version": Version.THREE,
        "temperature": np.float32(0.5),
        "top_p": np.float64(1),
        "top_k": np.int64(-1),
        "min_p": 0,
        "prompt_tokens": np.int64(len(whole.prompt_ids)),
        "completion_tokens": np.uint8(len(whole.output_ids)),
        "text": np.str_("ok"),
        "routed_experts": rows,
        "routed_start": np.int64(0),
        "repairs": ["echo_removed"],
    }
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    record = GenerationRecord(**(fields | change))
    plain = {name: getattr(record, name) for name in change if name != "routed_experts"}
    kinds = (str, str, int, int, float, float, int, float, int, int, str, int, tuple)
    assert tuple(map(type, plain.values())) == kinds
    assert plain["temperature"] == 0.5
    assert plain["weight_version"] == 3
    assert plain["repairs"] == ("echo_removed",)
    conversation.record(record)
    data = conversation.to_bytes()
    assert Conversation.from_bytes(data, conversation.template).to_bytes() == data


def test_a_turn_that_goes_on_inside_a_character_has_the_text_of_its_ids(
    compiled: Callable[..., ChatTemplate],
):
    """An abort between the bytes of an emoji: the rest begins with bytes that are no character."""
    template = compiled("qwen2_5")
    ids = template.tokenizer.encode_plain("abc \U0001f9a6 def")
    cut = next(at for at in range(1, len(ids)) if template.tokenizer.decode(ids[:at]).endswith("\ufffd"))
    rest = np.array([*ids[cut:], *template.turn_close], np.int32)
    assert template.tokenizer.decode(rest.tolist()).startswith("\ufffd")
    for text in (" def", "\U0001f9a6 def", "\ufffd def", template.tokenizer.decode(rest.tolist())):
        conversation = Conversation(template)
        conversation.advance(START)
        for part, reason, said_text in ((ids_of(ids[:cut]), "abort", "abc "), (rest, "stop", text)):
            prompt = conversation.prompt_ids()
            conversation.record(
                GenerationRecord(prompt_ids=prompt, output_ids=part, finish_reason=reason, text=said_text)
            )
        assert conversation.messages[-1]["content"] == "abc \U0001f9a6 def"
    for wrong in ("x def", "\U0001f9a6\U0001f9a6 def", "ef"):
        record = GenerationRecord(prompt_ids=PROMPT, output_ids=rest, finish_reason="stop", text=wrong)
        if wrong == "x def":  # one character may be the one that began before
            record.check_text(template.tokenizer.special_ids, template.tokenizer.decode)
            continue
        with pytest.raises(RecordError, match="differ from character"):
            record.check_text(template.tokenizer.special_ids, template.tokenizer.decode)


def test_the_text_of_what_is_cut_off_is_not_compared(compiled: Callable[..., ChatTemplate]):
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    whole = completion(conversation, "ok")
    ids = np.concatenate([whole.output_ids, whole.output_ids])
    text = conversation.template.tokenizer.decode(ids.tolist())
    record = GenerationRecord(prompt_ids=whole.prompt_ids, output_ids=ids, finish_reason="stop", text=text)
    assert code(lambda: conversation.record(record)) == "stop_passed"
    message = conversation.record(record.cut_at_stop(conversation.template.stop_ids))
    assert message["content"] == "ok"


def test_the_code_survives_a_copy():
    error = RecordError("why", code="counts")
    assert copy.copy(error).code == "counts"
    assert str(copy.copy(error)) == "why"


def test_the_engines_own_counts_are_compared():
    GenerationRecord(**GOOD, prompt_tokens=12, completion_tokens=3)


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


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("ACTION: ls\n<end>", {}),
        ("ACTION: ls\n", {}),  # the stop token left out, or all control tokens
        ("ACTION: ls\n", {"stop_id": 99}),
        (" ACTION: ls\n\ufffd", {}),  # a blank that the decoder keeps, a character that is not complete
    ],
)
def test_text_may_lack_what_engines_leave_out(text: str, change: dict[str, Any]):
    made([1, 2, 3, 99], text=text, **change).check_text({99}, decode)


@pytest.mark.parametrize("text", ["ACTION", "ACTION: ", "ACTION: ls\n"])
def test_text_may_end_before_or_after_the_stop_string(text: str):
    made([1, 2, 3], text=text, stop_string=": ").check_text((), decode)


def test_ids_past_the_text_are_found_where_the_stop_string_was_not_passed_on():
    """vllm#47616: the text ends before the stop string, the ids go on and end with a stop token."""
    record = made([1, 2, 4, 5, 99], text="ACTION")
    record.check_stop({99}, decode)
    assert code(lambda: record.check_text({99}, decode)) == "text"
    cut = made([1, 2, 4, 5, 99], text="ACTION", stop_string="OBS").cut_at_stop({99}, decode)
    cut.check_text({99}, decode)
    made([1, 2, 4], text="ACTION", stop_string="OBS").check_text({99}, decode)


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


def test_a_stop_that_was_thrown_away_is_closed_with_mask_0(compiled: Callable[..., ChatTemplate]):
    """No stop token is invented: what closes the turn is ours, and has no log-probability."""
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    made_whole = completion(conversation, "ok", logprob=-0.5)
    assert made_whole.logprobs is not None
    bad = GenerationRecord(
        prompt_ids=made_whole.prompt_ids,
        output_ids=made_whole.output_ids[:-1],
        logprobs=made_whole.logprobs[:-1],
        logprob_kind="raw",
        finish_reason="stop",
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
    )
    assert code(lambda: conversation.record(bad)) == "stop_missing"
    message = conversation.record(bad.as_cut_off())
    conversation.advance([*START, message, {"role": "user", "content": "go on"}])
    conversation.record(completion(conversation, "done", logprob=-0.5))
    assert conversation.findings() == {"stop_not_sampled": 1}
    (sample,) = conversation.samples(**IDENTITY)
    first = sample.turns[0]
    assert (first.finish_reason, first.end - first.start) == ("length", len(bad.output_ids))
    assert sample.token_ids[first.end] == made_whole.stop_id
    assert sample.loss_mask[first.end] == 0
    sample.require_logprobs()
    assert made_whole.as_cut_off() is made_whole


def test_a_turn_with_impossible_logprobs_is_good_for_supervised_training(
    compiled: Callable[..., ChatTemplate],
):
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    whole = completion(conversation, "ok", logprob=-0.5)
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    fields["logprobs"] = np.full(len(whole.output_ids), -9999, np.float32)
    assert code(lambda: GenerationRecord(**fields)) == "logprob_value"
    conversation.record(GenerationRecord.without_logprobs(**fields))
    assert conversation.findings() == {"logprobs_left_out": 1}
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.trained_tokens == len(whole.output_ids)
    with pytest.raises(MissingLogprobsError, match="have no log-probability"):
        sample.require_logprobs()


def test_a_lost_token_is_found_by_the_engines_own_text(compiled: Callable[..., ChatTemplate]):
    """vllm#27482: a stream without the ids of its tool call; the engine gave no count."""
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    whole = completion(conversation, f"I look.{call}")
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    before = conversation.to_bytes()
    for lost in (slice(2, -1), slice(3, 6), slice(-3, -1)):
        ids = np.delete(whole.output_ids, np.arange(len(whole.output_ids))[lost])
        bad = GenerationRecord(**(fields | {"output_ids": ids, "text": f"I look.{call}"}))
        assert code(lambda bad=bad: conversation.record(bad)) == "text"
    assert conversation.to_bytes() == before
    conversation.record(GenerationRecord(**(fields | {"text": f"I look.{call}"})))


def test_kept_ids_of_another_vocabulary_are_refused_and_nothing_is_appended(
    compiled: Callable[..., ChatTemplate],
):
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    whole = completion(conversation, "ok")
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    sets = np.repeat(whole.output_ids, 2)
    sets[1::2] = 200_000
    offsets = np.arange(0, len(sets) + 1, 2, dtype=np.int64)
    bad = GenerationRecord(**(fields | {"kept_ids": sets, "kept_offsets": offsets}))
    before = conversation.to_bytes()
    assert code(lambda: conversation.record(bad)) == "kept_vocabulary"
    assert conversation.to_bytes() == before


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


def test_a_prompt_that_was_tokenized_again_is_told_from_another_one(qwen3: HFTokenizer):
    """sglang#26555, rllm#272: ids that were sampled, and the ids that a tokenizer gives to their text."""
    sent, again = np.array([53122, 316], np.int32), np.array([393, 30002], np.int32)
    assert qwen3.encode(qwen3.decode(sent.tolist())) == again.tolist()
    record = made([1], prompt_ids=again)
    assert code(lambda: record.check_prompt(sent, qwen3.decode)) == "prompt_retokenized"
    assert code(lambda: record.check_prompt(sent + 1, qwen3.decode)) == "prompt"
    assert code(lambda: record.check_prompt(sent)) == "prompt"


# --- what real engines answered

ANSWERS = Path(__file__).with_name("data") / "engines"


def answer(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    recorded = json.loads((ANSWERS / f"{name}.json").read_text())
    return recorded["request"]["body"], recorded["response"]


def check(record: GenerationRecord, sent: Any, tokenizer: HFTokenizer) -> None:
    record.check_prompt(sent, tokenizer.decode)
    record.check_vocabulary(tokenizer.vocab_size)
    record.check_stop({134159}, tokenizer.decode)
    record.check_text(tokenizer.special_ids, tokenizer.decode)


@pytest.mark.parametrize("name", ["sglang_stop_token", "sglang_length", "sglang_after_update"])
def test_a_recorded_sglang_answer_passes(name: str, qwen3: HFTokenizer):
    """SGLang 0.5.23, POST /generate. `weight_version` is text there; the engine adapter reads it."""
    body, response = answer(name)
    meta = response["meta_info"]
    finish = meta["finish_reason"]
    triples = meta["output_token_logprobs"]
    record = GenerationRecord(
        prompt_ids=np.array(body["input_ids"], np.int32),
        output_ids=np.array(response["output_ids"], np.int32),
        logprobs=np.array([triple[0] for triple in triples], np.float32),
        finish_reason=finish["type"],
        stop_id=finish.get("matched"),
        weight_version=10 if meta["weight_version"] == "v10" else -2,
        logprob_kind="raw",
        temperature=body["sampling_params"]["temperature"],
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
        text=response["text"],
    )
    assert [triple[1] for triple in triples] == record.output_ids.tolist()
    check(record, np.array(body["input_ids"], np.int32), qwen3)
    assert record.finish_reason == ("stop" if name == "sglang_stop_token" else "length")


@pytest.mark.parametrize("name", ["vllm_stop", "vllm_length"])
def test_a_recorded_vllm_answer_passes(name: str, qwen3: HFTokenizer):
    """vLLM 0.32, POST /inference/v1/generate."""
    body, response = answer(name)
    (choice,) = response["choices"]
    content = choice["logprobs"]["content"]
    record = GenerationRecord(
        prompt_ids=np.array(body["token_ids"], np.int32),
        output_ids=np.array(choice["token_ids"], np.int32),
        logprobs=np.array([entry["logprob"] for entry in content], np.float32),
        finish_reason=choice["finish_reason"],
        stop_id=choice["stop_reason"],
        logprob_kind="raw",
        temperature=body["sampling_params"]["temperature"],
        prompt_tokens=response["usage"]["prompt_tokens"],
        completion_tokens=response["usage"]["completion_tokens"],
    )
    assert [entry["token_id"] for entry in content] == record.output_ids.tolist()
    check(record, np.array(body["token_ids"], np.int32), qwen3)
    assert choice["routed_experts"] is None
    assert choice["sampling_mask"] is None
