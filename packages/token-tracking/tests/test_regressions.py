"""Faults that a review found: each test fails without its fix."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from token_tracking import (
    AmbiguousHistoryError,
    ChatTemplate,
    ControlTokenError,
    Conversation,
    ConversationError,
    GenerationRecord,
    LedgerError,
    RecordError,
    Sample,
    SampleError,
    SnapshotError,
    TemplateError,
    TokenLedger,
    UnsupportedContentError,
)
from token_tracking.backends.hf import HFTokenizer
from token_tracking.control import ControlTokens
from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.call_forms import JsonForm, read
from token_tracking.snapshot import KIND_CONVERSATION, ConversationImage, pack, unpack
from token_tracking.testing import BASH_TOOL, IDENTITY, completion, trl_template

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
IM_END = 151645
START: list[Message] = [{"role": "user", "content": "fix it"}]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


def call_text(arguments: str) -> str:
    """A call in another spelling than a template's, so that both have to be compared by value."""
    return f'<tool_call>\n{{"name":  "bash", "arguments": {arguments}}}\n</tool_call>'


def begin(template: ChatTemplate, start: list[Message] | None = None, **kwargs: Any) -> Conversation:
    conversation = Conversation(template, **kwargs)
    conversation.advance(START if start is None else start)
    return conversation


def record(conversation: Conversation, ids: list[int], **fields: Any) -> GenerationRecord:
    values: dict[str, Any] = {"finish_reason": "stop", **fields}
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(), output_ids=np.array(ids, np.int32), **values
    )


def held_text(conversation: Conversation) -> str:
    return conversation.template.tokenizer.decode(conversation.prompt_ids().tolist())


# --- an error leaves the conversation as it was


@pytest.mark.original("A-commit-once")
@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": "x"}, ConversationError),
        ({"role": "assistant", "content": object()}, TemplateError),
        ({"role": "assistant", "content": [{"type": "image", "text": "x"}]}, UnsupportedContentError),
        ({"role": "assistant", "content": "", "tool_calls": [object()]}, TemplateError),
        ({"role": "assistant", "content": "", "tool_calls": "ls"}, TemplateError),
    ],
)
def test_a_refused_message_appends_no_token(compiled: Compile, message: Message, error: type[Exception]):
    conversation = begin(compiled("qwen2_5"))
    good = completion(conversation, "x")
    before = conversation.to_bytes()
    with pytest.raises(error):
        conversation.record(good, message)
    assert conversation.to_bytes() == before
    conversation.record(good)
    assert (conversation.turns, conversation.report().equal) == (1, 1)


@pytest.mark.original("A-commit-once")
def test_a_refused_record_counts_no_turn(compiled: Compile):
    """Ids of another model's vocabulary are what a wrong tokenizer looks like."""
    conversation = begin(compiled("qwen2_5"))
    before = (conversation.prompt_ids().copy(), conversation.to_bytes())
    for ids in ([200_000, IM_END], [1, 2**31 - 1]):
        with pytest.raises(RecordError, match="the tokenizer's ids end at 151668"):
            conversation.record(record(conversation, ids, finish_reason="length"))
    with pytest.raises(RecordError, match="without a single output id"):
        conversation.record(record(conversation, [], finish_reason="length"))
    assert np.array_equal(conversation.prompt_ids(), before[0])
    assert (conversation.to_bytes(), conversation.turns) == (before[1], 0)


def test_a_refused_advance_does_not_close_the_aborted_turn(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    part = conversation.record(completion(conversation, "half", finish_reason="abort"))
    before = conversation.to_bytes()
    with pytest.raises(TemplateError, match="message 2"):
        conversation.advance([*START, part, {"role": "user", "content": 3}])
    assert conversation.to_bytes() == before
    assert conversation.plan([*START, part, user("stop")]).kind == "append"
    assert conversation.open_turn


# --- values that NumPy would have bent


def test_a_version_is_an_int_and_arrays_are_arrays(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    for version in (2.7, True, "3", None):
        with pytest.raises(RecordError, match="need an int"):
            record(conversation, [1], weight_version=version)
        with pytest.raises(LedgerError, match="need an int"):
            TokenLedger().append_sampled([1], None, version)  # type: ignore[arg-type]
    TokenLedger().append_sampled([1], None, np.int64(3))  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="-inf"):
        TokenLedger().append_sampled([1], np.array([-1e300]), 0)
    good = {"prompt_ids": np.array([1], np.int32), "output_ids": np.array([1], np.int32)}
    for change, why in (
        ({"prompt_ids": [1]}, "prompt_ids must be a flat numpy array of int32, got list"),
        ({"output_ids": [1]}, "got list"),
        ({"logprobs": [-1.0]}, "got list"),
        ({"logprobs": np.array([-1e300])}, r"float32, got float64 \(1,\)"),
    ):
        kind = "raw" if "logprobs" in change else "none"
        values: dict[str, Any] = {**good, "finish_reason": "length", "logprob_kind": kind, **change}
        with pytest.raises(RecordError, match=why):
            GenerationRecord(**values)
    conversation.record(completion(conversation, "x"))
    (sample,) = conversation.samples(**IDENTITY)
    fields = {name: getattr(sample, name) for name in Sample.__struct_fields__}
    with pytest.raises(SampleError, match="loss_mask must be a numpy array, got a list"):
        Sample(**(fields | {"loss_mask": sample.loss_mask.tolist()}))


# --- the end of a turn


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_stop_token_that_was_sampled_last_ends_the_turn(compiled: Compile, reason: str):
    """The limit, or the abort, came with the stop token: no second one is written after it."""
    conversation = begin(compiled("qwen2_5"))
    conversation.record(record(conversation, [14990, IM_END], finish_reason=reason))
    assert not conversation.open_turn
    conversation.advance([*conversation.messages, user("go")])
    assert "hello<|im_end|>\n<|im_start|>user" in held_text(conversation)
    conversation.record(completion(conversation, "ok"))
    report = conversation.report()
    assert (report.equal, report.cut_off) == (2, 0)


def test_the_history_of_an_aborted_turn_sent_again_continues_it(compiled: Compile):
    """A scaffold that was restarted elsewhere asks its question again."""
    template = compiled("qwen2_5")
    conversation = begin(template)
    conversation.record(record(conversation, [14990], finish_reason="abort", weight_version=1))
    conversation = Conversation.from_bytes(conversation.to_bytes(), template)
    plan = conversation.advance(START)
    assert (plan.kind, plan.why) == ("append", "the aborted turn goes on")
    conversation.record(record(conversation, [1879, IM_END], weight_version=2))
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.token_ids[sample.loss_mask == 1].tolist() == [14990, 1879, IM_END]
    assert sample.versions[-3:].tolist() == [1, 2, 2]


# --- what a model may write into a tool call


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e400", "1" * 30, "9" * 5000, '"\\ud800"', "1.0", "{} ]", "[" * 50_000]
)
def test_hostile_arguments_end_no_rollout(name: str, value: str, compiled: Compile):
    conversation = begin(compiled(name))
    text = call_text(f'{{"command":  {value}}}')
    messages = [*START, conversation.record(completion(conversation, text))]
    messages.append(tool("out") if messages[-1].get("tool_calls") else user("not JSON"))
    conversation.advance(messages)
    messages.append(conversation.record(completion(conversation, "ok")))
    conversation.advance([*messages, user("more")])
    conversation.record(completion(conversation, "ok"))
    assert conversation.report().broken == 0
    parts = conversation.samples(**IDENTITY)
    assert sum(part.trained_tokens for part in parts) == conversation.sampled_tokens
    assert Conversation.from_bytes(conversation.to_bytes(), conversation.template).turns == 3


def test_constants_that_are_not_json_are_not_a_call():
    for value in ("NaN", "Infinity", "-Infinity"):
        call = read(JsonForm(), f'{{"name": "bash", "arguments": {{"x": [{value}]}}}}', ArgumentTypes(()))
        assert call.error == f"the tool call is not a JSON object: {value} is not JSON"


def test_a_snapshot_holds_any_integer(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": {"n": 10**30}}}
    conversation.record(
        completion(conversation, "x"), {"role": "assistant", "content": "", "tool_calls": [call]}
    )
    again = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    assert again.messages == conversation.messages


# --- messages


def test_text_without_utf_8_is_refused_by_message(compiled: Compile):
    """A tool's bytes, decoded with `surrogateescape`."""
    with pytest.raises(TemplateError, match=r"message 1 \(user\): U\+DCFF at 2 .* errors=\"replace\""):
        begin(compiled("qwen2_5"), [user("ok"), user("ab\udcff")])


def test_a_harness_cannot_change_what_is_held(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    message = conversation.record(completion(conversation, call_text('{"command": "ls"}')))
    history = [*START, copy.deepcopy(message), {**tool("out"), "extra": {"n": [1]}}]
    conversation.advance(history)
    conversation.record(completion(conversation, "done"))
    message["tool_calls"][0]["function"]["arguments"] = '{"command": "rm -rf /"}'
    history[-1]["extra"]["n"].append(2)
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'
    assert conversation.messages[2]["extra"] == {"n": [1]}
    edited = [*START, message, tool("out"), conversation.messages[-1], user("x")]
    assert conversation.plan(edited).kind == "branch"


def test_content_parts_are_printed_or_refused_never_dropped(compiled: Compile):
    """Qwen3's template prints nothing at all for a list."""
    part = {"type": "text", "text": "HELLO"}
    for name in ("qwen3", "qwen3_6"):
        assert "HELLO" in held_text(begin(compiled(name), [user([part])]))
    with pytest.raises(UnsupportedContentError, match="2 content parts"):
        begin(compiled("qwen3"), [user([part, part])]).prompt_ids()
    with pytest.raises(UnsupportedContentError, match="not text"):
        begin(compiled("qwen3"), [user([{"type": "output_audio", "text": "HELLO"}])])


def test_under_error_the_models_own_control_tokens_do_not_end_the_rollout(compiled: Compile):
    conversation = begin(compiled("qwen2_5"), control_tokens="error")
    spelled = [*conversation.template.tokenizer.encode_plain("say <|im_end|>"), IM_END]
    conversation.record(record(conversation, spelled))
    conversation.advance([*conversation.messages, user("ok")])
    conversation.record(completion(conversation, "bye"))
    assert conversation.report().equal == 2
    with pytest.raises(ControlTokenError):
        conversation.advance([*conversation.messages, user("<|im_end|>")])


def test_escaping_keeps_the_blanks_that_control_tokens_swallow(qwen3: HFTokenizer):
    """Phi-4's control tokens are `rstrip`; one escaped token must not change all others."""
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(qwen3.to_json())
    backend.add_tokens([AddedToken("<|end|>", rstrip=True, special=True, normalized=False)])
    tokenizer = HFTokenizer(backend, name="phi-like", fingerprint="0", named_tokens={})
    control = ControlTokens(tokenizer, "escape")
    text = "a<|end|>\n " + control.mark("b <|im_end|>") + "<|end|> \n"
    expected = [*tokenizer.encode("a<|end|>\n "), *tokenizer.encode_plain("b <|im_end|>")]
    assert control.encode(text) == [*expected, *tokenizer.encode("<|end|> \n")]


def test_ids_above_a_gap_are_in_the_vocabulary():
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 9}, []))
    backend.add_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer = HFTokenizer(backend, name="gap", fingerprint="0", named_tokens={})
    assert (tokenizer.encode("ab<end>"), tokenizer.vocab_size) == ([0, 1, 9], 10)


# --- deltas


def test_a_turn_with_calls_that_a_user_answers_ends_as_it_is_printed(many: HFTokenizer):
    """gpt-oss ends a turn with calls in `<|call|>`, another one in `<|end|>`."""
    template = ChatTemplate.compile(many, trl_template("gptoss"), tools=[BASH_TOOL])
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    history = [*START, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = template.delta(history, [user("no")], template.control("escape"))
    full = template.render([*history, user("no")], add_generation_prompt=True)
    assert found is None or full.endswith("<|message|>{}" + found[0].text)


def test_a_template_that_looks_into_message_text(many: HFTokenizer, qwen3: HFTokenizer):
    """GLM appends `/nothink` unless the message ends with it."""
    template = ChatTemplate.compile(
        many, trl_template("glm4moe"), tools=[BASH_TOOL], template_kwargs={"enable_thinking": False}
    )
    named = ChatTemplate.compile(
        qwen3,
        "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    for compiled_template, message in ((template, user("no /nothink")), (named, user("x") | {"name": "bob"})):
        history = [*START, {"role": "assistant", "content": "say"}]
        control = compiled_template.control("escape")
        found = compiled_template.delta(history, [message], control)
        full = compiled_template.render([*history, message], add_generation_prompt=True)
        assert found is None or full.endswith("say" + found[0].text)


# --- branches


def test_a_branch_that_returns_to_one_of_two_tokenizations_is_not_guessed(compiled: Compile):
    """Also when both branches went on since."""
    conversation = begin(compiled("qwen2_5"))
    encode = conversation.template.tokenizer.encode
    for ids, question in ((encode("hello"), "a"), ([*encode("hel"), *encode("lo")], "b")):
        conversation.advance(START)
        message = conversation.record(record(conversation, [*ids, IM_END]))
        if question == "a":
            conversation.advance([*START, message, user(question)])
            conversation.record(completion(conversation, "ok"))
    with pytest.raises(AmbiguousHistoryError):
        conversation.advance([*START, {"role": "assistant", "content": "hello"}, user("c")])


def test_a_template_says_which_of_two_branches_is_meant(compiled: Compile):
    with_tools, without = compiled("qwen2_5"), compiled("qwen2_5", tools=False)
    conversation = begin(with_tools)
    message = conversation.record(completion(conversation, "same"))
    conversation.advance(START, template=without)
    conversation.record(completion(conversation, "same"))
    assert conversation.current == 1
    plan = conversation.advance([*START, message, user("go")], template=with_tools)
    assert (plan.kind, conversation.current, len(conversation.branches)) == ("append", 0, 2)


def test_another_tokenizer_is_refused(compiled: Compile, many: HFTokenizer):
    conversation = begin(compiled("qwen2_5"))
    other = ChatTemplate.compile(many, trl_template("qwen2_5"))
    with pytest.raises(ConversationError, match="same tokenizer"):
        conversation.advance(START, template=other)


def test_a_shared_turn_has_its_reward_once(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    first = conversation.record(completion(conversation, "one"))
    for question in ("a", "b"):
        conversation.advance([*START, first, user(question)])
        conversation.record(completion(conversation, "two"))
    parts = conversation.samples(**IDENTITY, turn_rewards=[0.25, 0.5, 1.0])
    assert [[turn.reward for turn in part.turns] for part in parts] == [[0.25, 0.5], [None, 1.0]]


# --- the report sees every token


def test_no_wrong_token_is_called_equal(compiled: Compile):
    conversation = begin(compiled("qwen3_training"))
    for text, reason, answer in (
        ("<think>\nx\n</think>\n\n" + call_text("{}").replace("  ", " "), "stop", tool("out")),
        ("<think>\nlong", "length", user("go on")),
        ("<think>\nok\n</think>\n\ndone", "stop", None),
    ):
        message = conversation.record(completion(conversation, text, finish_reason=reason))
        if answer is not None:
            conversation.advance([*conversation.messages[:-1], message, answer])
    clean = conversation.report()
    assert (clean.equal, clean.broken, clean.final[0].verdict) == (3, 0, "equal")
    ids = conversation.branches[0].ledger._block.arrays["ids"]
    for at in range(len(conversation.branches[0].ledger)):
        held, ids[at] = ids[at], ids[at] - 1
        report = conversation.report()
        assert report.equal < 3 or report.final[0].verdict != "equal", at
        ids[at] = held


@pytest.mark.original("A-model-state")
def test_a_snapshot_that_contradicts_itself_is_refused(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    conversation.record(completion(conversation, "one"))
    image = unpack(KIND_CONVERSATION, conversation.to_bytes(), ConversationImage)
    (branch,) = image.branches
    shifted = copy.deepcopy(branch.turns)
    shifted[0]["segments"][0]["end"] -= 1
    replace = msgspec.structs.replace
    for bad in (
        replace(branch, turns=shifted),
        replace(branch, inherited=5),
        replace(branch, ledger_base=3),
        replace(branch, messages=b"[1]"),
        replace(branch, messages=b"["),
        replace(branch, ledger=replace(branch.ledger, ids=b"123")),
        replace(branch, ledger=replace(branch.ledger, mask=b"")),
    ):
        data = pack(KIND_CONVERSATION, replace(image, branches=[bad]))
        with pytest.raises(SnapshotError):
            Conversation.from_bytes(data, conversation.template)


@pytest.mark.parametrize(
    "choice",
    [{"control_tokens": "bogus"}, {"control_tokens": None}, {"cross_stop": "Branch"}, {"cross_stop": []}],
)
def test_a_choice_that_is_none_is_refused(compiled: Compile, choice: dict[str, Any]):
    """It was taken, did what another choice does, and made snapshots that could not be opened."""
    with pytest.raises(ConversationError, match=f"{next(iter(choice))} is .*: need one of (escape|keep)"):
        Conversation(compiled("qwen3"), **choice)
