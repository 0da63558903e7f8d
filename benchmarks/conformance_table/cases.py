"""One situation on one template, and the truth about it: full renders by `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from token_tracking import ChatTemplate
from token_tracking.testing import BASH_TOOL, trl_template

from conformance_table.rows import Row, Situation, T, U

TOOLS = [BASH_TOOL]
ANSWER, VALUE, THOUGHT = "qzanswerq", "qzlastvalueq", "qzthoughtq"
INLINE = f"{THOUGHT}\n</think>\n\n"


@dataclass(frozen=True)
class Dialogue:
    """Messages before a turn, the turn, and the messages after it."""

    history: list[dict[str, Any]]
    assistant: dict[str, Any]
    new: list[dict[str, Any]]
    variables: dict[str, Any]

    @property
    def whole(self) -> list[dict[str, Any]]:
        return [*self.history, self.assistant, *self.new]


@dataclass(frozen=True)
class Case:
    """One situation on one template, and the truth about it."""

    dialogue: Dialogue
    prompt: list[int]
    sampled: list[int]
    """The stop token included."""
    stop: int | None
    """None: the turn was cut off."""
    expected: list[int]
    """The next prompt if the turn is kept as sampled."""
    injected: list[int]
    """As `expected`, but control tokens written in messages are control tokens."""
    full: list[int]
    """The full render."""
    stable: bool
    """The full render prints the prompt and the turn as they are held."""
    lost: bool
    """The full render lacks something that the model said."""
    cross_stop: bool


class Model:
    """A template with its tokenizers."""

    def __init__(self, row: Row, ours: Any, hf: Any):
        self.row, self.ours, self.hf = row, ours, hf
        self.source = trl_template(row.name)
        self.templates: dict[Any, ChatTemplate] = {}
        self.specials = re.compile(
            "|".join(map(re.escape, sorted(ours.special_tokens, key=len, reverse=True)))
        )
        self.default = self.template({"bos_token": row.bos, "eos_token": row.eos or row.stop})
        self.facts = self.default.facts

    def template(self, variables: dict[str, Any]) -> ChatTemplate:
        key = json.dumps(sorted(variables.items()))
        if key not in self.templates:
            self.templates[key] = ChatTemplate.compile(
                self.ours, self.source, tools=TOOLS, template_kwargs=variables
            )
        return self.templates[key]

    def render(
        self, messages: Sequence[Any], variables: dict[str, Any], *, generate: bool, tools: Any = TOOLS
    ) -> str:
        return self.hf.apply_chat_template(
            list(map(self.shaped, messages)), chat_template=self.source, tools=tools, tokenize=False,
            add_generation_prompt=generate, **variables,
        )  # fmt: skip

    def shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """In the form that the template takes: parts, and arguments as JSON text or an object."""
        shaped = dict(message)
        if self.row.parts:
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        if "tool_calls" in message and self.facts.arguments_form == "text":
            shaped["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        return shaped

    def encode(self, text: str, plain: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Ids; a control token that starts in one of the spans `plain` is text."""
        backend, ids, at = self.hf.backend_tokenizer, [], 0
        backend.encode_special_tokens = True
        try:
            for match in self.specials.finditer(text):
                if any(start <= match.start() < end for start, end in plain):
                    continue
                ids += backend.encode(text[at : match.start()], add_special_tokens=False).ids
                ids.append(self.ours.special_tokens[match[0]])
                at = match.end()
            return [*ids, *backend.encode(text[at:], add_special_tokens=False).ids]
        finally:
            backend.encode_special_tokens = False

    def encode_all(self, text: str) -> list[int]:
        """Ids as `transformers` gives them."""
        return self.hf.backend_tokenizer.encode(text, add_special_tokens=False).ids


class NoCaseError(Exception):
    """The template has no such case."""


def build(model: Model, situation: Situation) -> Case:
    """The case.

    Raises:
        NoCaseError: the template refuses its messages, or prints no calls or reasoning.
    """
    row = model.row
    dialogue = converse(model, situation)
    stop = row.call_stop if T in situation.roles and row.call_stop else row.stop
    try:
        prompt = model.render(dialogue.history, dialogue.variables, generate=True)
        text = turn_text(model, dialogue, prompt, stop)
        if situation.cut == "reasoning":
            text = text[: text.index(THOUGHT) + len(THOUGHT)]
            assistant = {"role": "assistant", "content": "", model.facts.reasoning_field: THOUGHT}
            dialogue = replace(dialogue, assistant=assistant)
        full = model.render(dialogue.whole, dialogue.variables, generate=True)
    except NoCaseError:
        raise
    except Exception as error:  # a template raises what it likes
        raise NoCaseError(str(error)) from error
    stable = full.startswith(prompt + text)
    if situation.cut == "reasoning":
        after = len(prompt + text) if stable else len(full)
    else:
        last = VALUE if "tool_calls" in dialogue.assistant else ANSWER
        after = full.find(stop, full.rfind(last)) if last in full else -1
        if after < 0:
            raise NoCaseError("the turn is not printed, or not with its stop token")
    sampled_stop = None if situation.cut else stopped_with(row, situation, stop)
    stop_id = None if sampled_stop is None else model.ours.special_tokens[sampled_stop]
    plain = spelled(model, dialogue.new, full, after + len(stop))
    shifted = [(start - after, end - after) for start, end in plain]
    prompt_ids, sampled = model.encode(prompt), model.encode(text)
    if stop_id is not None:
        sampled.append(stop_id)
    skip = 1 if sampled_stop == stop else 0
    tail = full[after:]
    return Case(
        dialogue=dialogue,
        prompt=prompt_ids,
        sampled=sampled,
        stop=stop_id,
        expected=[*prompt_ids, *sampled, *model.encode(tail, shifted)[skip:]],
        injected=[*prompt_ids, *sampled, *model.encode_all(tail)[skip:]],
        full=model.encode(full, plain),
        stable=stable,
        lost=any(word in text and word not in full for word in (THOUGHT, ANSWER, VALUE)),
        cross_stop=sampled_stop not in (None, stop),
    )


def stopped_with(row: Row, situation: Situation, stop: str) -> str:
    """The stop token that the model samples where the template prints `stop`."""
    if situation.cross_stop:
        return row.call_stop
    return row.sampled_stop if stop == row.stop and row.sampled_stop else stop


def converse(model: Model, situation: Situation) -> Dialogue:
    row, facts = model.row, model.facts
    roles = situation.roles
    if T in roles and not facts.calls:
        if not situation.any_role:
            raise NoCaseError("no calls")
        roles = (U,)
    if situation.variables and "enable_thinking" not in model.source:
        raise NoCaseError("no such variable")
    if situation.cross_stop and row.call_stop in ("", row.stop):
        raise NoCaseError("one stop token")
    if situation.needs_reasoning and facts.reasoning_field is None:
        raise NoCaseError("no reasoning")
    system = [{"role": "system", "content": "be terse"}] if facts.system else []
    return Dialogue(
        history=[*system, {"role": "user", "content": "the question"}],
        assistant=answer(model, roles.count(T), reasoning=situation.reasoning),
        new=[answered(role, n, situation.content, row.stop) for n, role in enumerate(roles)],
        variables={"bos_token": row.bos, "eos_token": row.eos or row.stop, **dict(situation.variables)},
    )


def answer(model: Model, calls: int, *, reasoning: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": "" if calls else ANSWER}
    if model.row.inline_reasoning:
        made["content"] = INLINE + made["content"]
    if reasoning and model.facts.reasoning_field:
        made[model.facts.reasoning_field] = THOUGHT
    if calls:
        values = [*(f"qzvalue{n}q" for n in range(calls - 1)), VALUE]
        made["tool_calls"] = [
            {
                "id": f"call_{n}",
                "type": "function",
                "function": {"name": "bash", "arguments": {"command": value}},
            }
            for n, value in enumerate(values)
        ]
    return made


def answered(role: str, n: int, content: str | None, stop: str) -> dict[str, Any]:
    text = f"result {n} here" if content is None else content.replace("{stop}", stop)
    if role == U:
        return {"role": U, "content": text}
    return {"role": T, "tool_call_id": f"call_{n}", "name": "bash", "content": text}


def turn_text(model: Model, dialogue: Dialogue, prompt: str, stop: str) -> str:
    """What the model writes before its stop token, for the template to print its message."""
    history, assistant, variables = dialogue.history, dialogue.assistant, dialogue.variables
    printed = model.render([*history, assistant], variables, generate=False)
    name = model.facts.reasoning_field
    if not printed.startswith(prompt) and name and name not in assistant:
        # A prefilled think block, which the template does not print without reasoning: the model closes it.
        printed = model.render([*history, {**assistant, name: "qzdropq"}], variables, generate=False)
        printed = printed.replace("qzdropq", "")
    header = (
        prompt if printed.startswith(prompt) else prompt.removesuffix(model.template(variables).facts.prefill)
    )
    if not printed.startswith(header):
        raise NoCaseError("a finished turn does not go on from the generation prompt")
    found = printed.find(stop, printed.rindex("qz"))
    text = printed[len(header) :] if found < 0 else printed[len(header) : found]
    if found < 0:
        text = text.removesuffix(variables["eos_token"])
    return INLINE + text if model.row.inline_reasoning else text


def spelled(model: Model, new: Sequence[dict[str, Any]], full: str, at: int) -> list[tuple[int, int]]:
    """Where a full render prints contents that spell control tokens."""
    spans: list[tuple[int, int]] = []
    for message in new:
        content = message["content"].strip()
        if model.specials.search(content) and (found := full.find(content, at)) >= 0:
            at = found + len(content)
            spans.append((found, at))
    return spans
