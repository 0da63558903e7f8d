"""Turns that the model did not end: aborted under changing weights, cut off anywhere, closed by us."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from token_tracking import ChatTemplate, Conversation, GenerationRecord, TokenSource, turn_samples
from token_tracking.testing import IDENTITY

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "qwen3_6": "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm4moe": "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
}
# What the generation prompt prefills is not sampled again.
OPENS = {"qwen3": "<think>\n", "qwen3_6": "", "glm4moe": "\n<think>"}
WHERE = ["start of reasoning", "reasoning", "end of reasoning", "text", "call", "end of call"]


def said(name: str, where: str) -> str:
    """The beginning of a turn with reasoning, text and a call, cut where the name says."""
    reasoning, text, calls = f"{OPENS[name]}think about it", "\n</think>\n\nI look", CALLS[name]
    if name == "glm4moe":
        text = "</think>\nI look"
    return {
        "start of reasoning": OPENS[name] + "th",
        "reasoning": reasoning,
        "end of reasoning": reasoning + text.removesuffix("I look"),
        "text": reasoning + text,
        "call": f"{reasoning}{text}\n{calls[:30]}",
        "end of call": f"{reasoning}{text}\n{calls}",
    }[where]


def sample(
    conversation: Conversation, ids: list[int], reason: Any, version: int, logprob: float = -0.5
) -> Message:
    return dict(
        conversation.record(
            GenerationRecord(
                prompt_ids=conversation.prompt_ids(),
                output_ids=np.array(ids, np.int32),
                logprobs=np.full(len(ids), logprob, np.float32),
                finish_reason=reason,
                weight_version=version,
                logprob_kind="raw",
            )
        )
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe"])
@pytest.mark.parametrize(
    ("where", "answer"), [*((where, "user") for where in WHERE), ("end of call", "tool")]
)
def test_a_turn_cut_anywhere_is_closed_and_the_next_prompt_agrees(
    name: str, where: str, answer: str, compiled: Compile
):
    """renderers#139, SkyRL#758: reasoning and turn are closed with mask 0; what the model said is kept."""
    template = compiled(name, family=name == "glm4moe")
    conversation = Conversation(template)
    encode = template.tokenizer.encode_plain
    ids = encode(said(name, where))
    history: list[Message] = [{"role": "user", "content": "fix it"}]
    conversation.advance(history)
    history.append(sample(conversation, ids, "length", 3))
    role: Message = {"role": "user", "content": "go on"}
    if answer == "tool":
        assert history[-1]["tool_calls"]
        role = {"role": "tool", "tool_call_id": "call_0", "content": "go on"}
    history.append(role)
    plan = conversation.advance(history)
    assert plan.cause in ("append", "thinking_stripped"), plan.why
    end = encode(f"{OPENS[name]}ok\n</think>\n\nok" if name != "glm4moe" else "\n<think>ok</think>\nok")
    stop = template.close_id
    assert stop is not None
    sample(conversation, [*end, stop], "stop", 4)
    report = conversation.report()
    assert report.broken == 0, report.lines()
    assert report.cut_off == 1
    parts = conversation.samples(**IDENTITY)
    trained = [i for part in parts for i in part.token_ids[part.loss_mask == 1].tolist()]
    assert trained == [*ids, *end, stop]
    first = conversation.branches[0]
    repaired = first.ledger.sources == TokenSource.REPAIR
    assert not first.ledger.mask[repaired].any()
    assert np.isnan(first.ledger.logprobs[repaired]).all()
    assert (first.ledger.versions[repaired] == -1).all()
    if plan.cause == "append":
        text = template.tokenizer.decode(first.ledger.ids.tolist())
        closed = text.split("fix it")[1].split("go on")[0]
        assert closed.count("</think>") == 1
        assert repaired.any()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe"])
@pytest.mark.parametrize("cuts", [(1,), (1, 2), (2, 3, 5, 8)])
def test_a_turn_aborted_under_other_weights_and_then_cut_off(
    name: str, cuts: tuple[int, ...], compiled: Compile
):
    """slime#1440, slime#2092: every piece keeps its version and numbers; the limit then ends the turn."""
    template = compiled(name, family=name == "glm4moe")
    ids = template.tokenizer.encode_plain(said(name, "call"))
    conversation = Conversation(template)
    history: list[Message] = [{"role": "user", "content": "fix it"}]
    conversation.advance(history)
    borders = [0, *cuts, len(ids)]
    for version, (start, end) in enumerate(pairwise(borders)):
        conversation = Conversation.from_bytes(conversation.to_bytes(), template)
        reason = "length" if end == len(ids) else "abort"
        message = sample(conversation, ids[start:end], reason, version, -0.125 * (version + 1))
    assert conversation.turns == 1
    history += [message, {"role": "user", "content": "go on"}]
    conversation.advance(history)
    conversation.prompt_ids()
    part = conversation.samples(**IDENTITY)[0]
    wanted = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    assert part.versions[part.loss_mask == 1].tolist() == wanted.tolist()
    assert np.array_equal(part.logprobs[part.loss_mask == 1], -0.125 * (wanted + 1).astype(np.float32))
    assert [turn.finish_reason for turn in part.turns] == [*["abort"] * len(cuts), "length"]
    (step,) = turn_samples((part,))
    assert len(step.turns) == len(borders) - 1
    assert conversation.report().broken == 0
