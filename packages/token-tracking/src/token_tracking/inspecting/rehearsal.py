"""Small conversations played through a template, to see which road each situation takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from token_tracking.conversation import Conversation
from token_tracking.errors import TokenTrackingError
from token_tracking.messages import Message
from token_tracking.record import GenerationRecord
from token_tracking.template import ChatTemplate

Road = Literal["program", "marker", "full render", "refused"]


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the held tokens in one situation."""

    situation: str
    road: Road
    """`program`: the compiled joints, no render. `marker`: two full renders, compared. `full render`: the
    text is rendered whole, as a branch. `refused`: the template does not take these messages."""
    why: str
    """Empty: nothing to explain."""
    kept: tuple[str, ...] = ()
    """Rewrites of template tokens in earlier turns that are kept as held and reported, by name."""


def rehearse(template: ChatTemplate) -> tuple[Leg, ...]:
    """Play the situations that tool-using rollouts are made of."""
    user, other = ({"role": "user", "content": text} for text in ("qzuserq", "qzotherq"))
    legs = [
        _play(template, "a user message", _assistant(template), [user]),
        _play(template, "two user messages", _assistant(template), [user, other]),
    ]
    one, two = (_assistant(template, calls=count) for count in (1, 2))
    legs += [
        _play(template, "a tool result", one, _results(template, 1)),
        _play(template, "two tool results", two, _results(template, 2)),
        _play(template, "a tool result, then a user message", one, [*_results(template, 1), user]),
    ]
    if template.facts.reasoning_field is not None:
        thinking = _assistant(template, reasoning=True)
        acting = _assistant(template, reasoning=True, calls=1)
        legs += [
            _play(template, "a user message after reasoning", thinking, [user]),
            _play(template, "a tool result after reasoning", acting, _results(template, 1)),
        ]
    return tuple(legs)


def first_messages(template: ChatTemplate) -> list[dict[str, Any]]:
    """A system message, if the template takes one, and a user message."""
    system = [{"role": "system", "content": "qzsystemq"}] if template.facts.system else []
    return [*system, {"role": "user", "content": "qzqueryq"}]


def spoken(template: ChatTemplate, history: Sequence[Message], assistant: Message) -> str | None:
    """What a model samples, its stop token aside, for the template to print this message next.

    None: the printed turn does not go on from the generation prompt.

    Raises:
        TemplateError: the template refuses the messages.
    """
    prompt = template.render(history, add_generation_prompt=True)
    text = template.render([*history, assistant], add_generation_prompt=False)
    header = next(
        (h for h in (prompt, prompt.removesuffix(template.facts.prefill)) if text.startswith(h)), None
    )
    if header is None:
        return None
    turn = text[len(header) :]
    ends = [template.facts.end_text or "", *map(template.tokenizer.decode, template.closings.runs)]
    return next((turn.removesuffix(end) for end in ends if end and turn.endswith(end)), turn)


def _assistant(template: ChatTemplate, *, calls: int = 0, reasoning: bool = False) -> dict[str, Any]:
    facts = template.facts
    message: dict[str, Any] = {"role": "assistant", "content": "" if calls else "qzanswerq"}
    if reasoning and facts.reasoning_field is not None:
        message[facts.reasoning_field] = "qzthoughtq"
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{n}",
                "type": "function",
                "function": {"name": facts.tool_name, "arguments": {"qzkeyq": f"qzvalue{n}q"}},
            }
            for n in range(calls)
        ]
    return message


def _results(template: ChatTemplate, count: int) -> list[dict[str, Any]]:
    name = template.facts.tool_name
    return [
        {"role": "tool", "tool_call_id": f"call_{n}", "name": name, "content": f"qzresult{n}q"}
        for n in range(count)
    ]


def _play(template: ChatTemplate, situation: str, assistant: dict[str, Any], new: Sequence[Message]) -> Leg:
    if assistant.get("tool_calls") and not template.facts.calls:
        return Leg(situation=situation, road="refused", why="the template prints no tool calls")
    try:
        return _walk(template, situation, assistant, new)
    except TokenTrackingError as error:
        why = str(error).partition("\n")[0]
        return Leg(situation=situation, road="refused", why=why)


def _walk(template: ChatTemplate, situation: str, assistant: dict[str, Any], new: Sequence[Message]) -> Leg:
    history = first_messages(template)
    text = spoken(template, history, assistant)
    if text is None:
        why = "a finished turn is printed otherwise than its generation prompt begins it"
        return Leg(situation=situation, road="refused", why=why)
    policy = "escape" if template.tokenizer.splits_at_specials else "keep"
    conversation = Conversation(template, control_tokens=policy)
    conversation.advance(history)
    found = template.delta([*history, assistant], new, conversation.control)
    stop = _last_stop(template)
    if found is not None and (not stop or "tool_calls" in assistant):
        ids = found[0].ids.tolist()
        stop = ids[: template.closings.printed(ids)]
    conversation.record(_answer(conversation, text, stop), assistant)
    plan = conversation.advance([*history, assistant, *new])
    conversation.record(_answer(conversation, "qzlastq", _last_stop(template) or template.turn_close))
    branch = conversation.branches[conversation.current]
    if plan.kind == "branch":
        return Leg(situation=situation, road="full render", why=plan.why)
    checks = [c for c in conversation.report().prompts if c.branch == conversation.current]
    return Leg(
        situation=situation,
        road="program" if branch.turns[-1].found_by == "program" else "marker",
        why="",
        kept=tuple(sorted({rewrite.name for rewrite in checks[-1].rewrites})),
    )


def _last_stop(template: ChatTemplate) -> Sequence[int]:
    """The close of a turn that is the last (gpt-oss prints another one before a message)."""
    ids = template.tokenizer.encode(template.facts.end_text or "")
    close = ids[: template.closings.printed(ids)]
    return close if template.closings.close_ids.issuperset(close) else ()


def _answer(conversation: Conversation, text: str, stop: Sequence[int]) -> GenerationRecord:
    ids = [*conversation.template.tokenizer.encode(text), *stop]
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(ids, np.int32),
        finish_reason="stop" if stop else "length",
        stop_id=stop[-1] if stop else None,
    )
