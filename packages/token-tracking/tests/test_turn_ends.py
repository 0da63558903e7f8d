"""How turns end: closes of several control tokens, closes of turns with calls, turns cut off in a close."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from token_tracking import ChatTemplate, Conversation, GenerationRecord
from token_tracking.testing import completion

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
CLOSE = ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def begin(template: ChatTemplate, **kwargs: Any) -> Conversation:
    conversation = Conversation(template, **kwargs)
    conversation.advance([user("q")])
    return conversation


def sample(conversation: Conversation, ids: Sequence[int], reason: Any, stop: int | None = None) -> Message:
    record = GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(ids, np.int32),
        finish_reason=reason,
        stop_id=stop,
    )
    return dict(conversation.record(record))


def go_on(conversation: Conversation) -> list[int]:
    conversation.advance([*conversation.messages, user("more")])
    return conversation.prompt_ids().tolist()


def rendered(conversation: Conversation) -> list[int]:
    control = conversation.control
    text = conversation.template.render_marked(conversation.messages, control, generate=True)
    return control.encode(text)


@pytest.fixture
def cohere(compiled: Compile) -> ChatTemplate:
    return compiled("cohere2", family=True, tools=False)


def close_of(template: ChatTemplate) -> list[int]:
    return [i for token in CLOSE if (i := template.tokenizer.token_to_id(token)) is not None]


def test_a_close_of_two_tokens_that_was_sampled_stands_once(cohere: ChatTemplate):
    end = close_of(cohere)
    assert cohere.turn_close == tuple(end)
    assert end[1] in cohere.stop_ids
    assert end[0] not in cohere.stop_ids
    conversation = begin(cohere, cross_stop="branch")
    start = len(conversation.prompt_ids())
    message = sample(conversation, [*cohere.tokenizer.encode("yes"), *end], "stop")
    assert message["content"] == "yes"
    assert go_on(conversation) == rendered(conversation)
    mask = conversation.branches[0].ledger.mask
    assert mask[start : start + 3].all()
    assert not mask[start + 3 :].any()
    conversation.record(completion(conversation, "bye"))
    report = conversation.report()
    assert (report.equal, report.cross_stops, len(report.branches)) == (2, 0, 1)
    assert conversation.branches[0].turn_text(1).sampled == "bye"


@pytest.mark.parametrize(("reason", "stopped"), [("stop", True), ("length", False)])
def test_half_of_a_close_is_completed(reason: str, stopped: bool, cohere: ChatTemplate):
    """An engine that stops at the first token of the close, or that ran out of tokens there."""
    end = close_of(cohere)
    conversation = begin(cohere)
    start = len(conversation.prompt_ids())
    ids = [*cohere.tokenizer.encode("yes"), end[0]]
    assert sample(conversation, ids, reason, end[0] if stopped else None)["content"] == "yes"
    assert go_on(conversation) == rendered(conversation)
    mask = conversation.branches[0].ledger.mask
    assert mask[start : start + 3].tolist() == [1, 1, 0]
    conversation.record(completion(conversation, "bye"))
    report = conversation.report()
    assert (report.equal, report.cut_off, report.cross_stops) == (2, int(not stopped), 0)


def test_an_abort_inside_a_close_changes_nothing(cohere: ChatTemplate):
    end = close_of(cohere)
    whole, parts = begin(cohere), begin(cohere)
    ids = [*cohere.tokenizer.encode("yes"), *end]
    sample(whole, ids, "stop")
    sample(parts, ids[:-1], "abort")
    assert parts.open_turn
    sample(parts, ids[-1:], "stop")
    assert go_on(parts) == go_on(whole)
    one, other = whole.branches[0].ledger, parts.branches[0].ledger
    assert one.mask.tolist() == other.mask.tolist()


def test_another_stop_than_the_close_is_a_cross_stop(cohere: ChatTemplate):
    eos = cohere.tokenizer.token_to_id("<eos>")
    conversation = begin(cohere)
    assert eos is not None
    sample(conversation, [*cohere.tokenizer.encode("yes"), eos], "stop")
    go_on(conversation)
    conversation.record(completion(conversation, "bye"))
    report = conversation.report()
    assert (report.cross_stops, report.broken) == (1, 0)


def test_the_end_of_a_turn_with_calls_is_learnt(compiled: Compile):
    """Gemma 4 ends such a turn in `<|tool_response>`, other turns in `<turn|>`."""
    template = compiled("gemma4_v5", family=True)
    stop = template.tokenizer.token_to_id("<|tool_response>")
    assert stop in template.stop_ids
    assert (template.facts.call_end_text, template.facts.markers.section_close) == ("<|tool_response>", None)
    assert template.program is not None
    assert not template.program.refused.keys() & {("calls", "tool"), ("tool", "tool"), ("tool", "user")}
    conversation = begin(template)
    call = '<|tool_call>call:bash{command:<|"|>ls<|"|>}<tool_call|>'
    message = sample(conversation, [*template.tokenizer.encode(call), stop or 0], "stop")
    assert message["tool_calls"][0]["function"]["name"] == "bash"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a\nb"}
    assert conversation.advance([*conversation.messages, result]).kind == "append"
    assert conversation.prompt_ids().tolist() == rendered(conversation)
    # With content, which the template prints after the results, the turn is left to renders.
    spoken = {**message, "content": "I look"}
    assert not template.program.covers(spoken, [result])


@pytest.mark.parametrize("kept", [True, False])
def test_what_the_template_cuts_is_a_branch_and_what_the_harness_cuts_is_not(kept: bool, compiled: Compile):
    """DeepSeek's template prints an answer from `</think>` on; a harness may have taken the thinking out."""
    template = compiled("deepseekv3", family=True, tools=False)
    conversation = begin(template)
    text = "why not\n</think>\n\nyes"
    stop = template.close_id
    ids = [*template.tokenizer.encode(text), stop or 0]
    record = GenerationRecord(
        prompt_ids=conversation.prompt_ids(), output_ids=np.array(ids, np.int32), finish_reason="stop"
    )
    given = {"role": "assistant", "content": text if kept else "\n\nyes"}
    conversation.record(record, given)
    plan = conversation.advance([*conversation.messages, user("more")])
    held = conversation.prompt_ids().tolist()
    conversation.record(completion(conversation, "bye"))
    report = conversation.report()
    assert report.broken == 0
    if kept:
        assert (plan.kind, plan.cause) == ("branch", "thinking_stripped")
        assert "why not" not in template.tokenizer.decode(held)
    else:
        assert plan.kind == "append"
        assert "why not" in template.tokenizer.decode(held)
        assert report.rewrites["message differs from its tokens"] == 1


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_6", "glm4moe"])
def test_no_switch_in_a_text_costs_the_program(name: str, compiled: Compile):
    program = compiled(name, family=name == "glm4moe").program
    assert program is not None
    assert (program.refused, program.triggers) == ({}, {})
