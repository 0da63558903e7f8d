"""`Inspection`: what was learnt from a template, more than `describe()` says, for people and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from token_tracking.compiler.joints import GENERATE, STARTS
from token_tracking.errors import TemplateError
from token_tracking.inspecting.rehearsal import Leg, first_messages, rehearse, spoken
from token_tracking.template import ChatTemplate

_SAMPLES: dict[str, Any] = {
    "string": "ls -l",
    "integer": 3,
    "number": 1.5,
    "boolean": True,
    "array": ["a", 1],
}


class Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """Text that the template prints, and its ids."""

    text: str
    ids: tuple[int, ...] | None
    """None: it has no ids of its own, because it is encoded in one piece with the content beside it."""
    beside: tuple[str, ...] = ()
    """Roles whose content it is encoded with, before and after it; empty: no content touches it."""
    sampled: bool = False
    """The model samples its first token: loss mask 1. All other fixed text has mask 0."""


class JointPieces(msgspec.Struct, frozen=True, kw_only=True):
    """A joint taken apart where its ids are fixed and where they are not."""

    after: str
    before: str
    pieces: tuple[Fixed, ...]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What was learnt, beyond `ChatTemplate.describe`."""

    name: str
    described: dict[str, Any]
    vocabulary: int
    tools: tuple[str, ...]
    variables: dict[str, str]
    generation_prompt: Fixed | None
    """From the header of the assistant turn on, prefill included. None: not known."""
    turn_end: Fixed | None
    """Printed after a finished last turn. None: not found."""
    stop_is_header: tuple[str, ...]
    """Stop tokens that are also the next message's header."""
    joints: tuple[JointPieces, ...]
    legs: tuple[Leg, ...]
    call_example: str | None
    """A turn with one call as the template prints it. None: it prints none."""
    parses: bool
    """`ChatTemplate.parse` reads that example back."""

    @classmethod
    def of(cls, template: ChatTemplate, *, name: str) -> Inspection:
        """Inspect a compiled template; it is rendered some twenty times."""
        encode = template.tokenizer.encode
        prompt, end = _generation_prompt(template), template.facts.end_text
        example, parses = _call_example(template)
        return cls(
            name=name,
            described=template.describe(),
            vocabulary=template.tokenizer.vocab_size,
            tools=_tool_names(template.tools or ()),
            variables={key: str(value) for key, value in template.variables.items()},
            generation_prompt=None if prompt is None else Fixed(text=prompt, ids=tuple(encode(prompt))),
            turn_end=None if end is None else Fixed(text=end, ids=tuple(encode(end)), sampled=bool(end)),
            stop_is_header=_header_stops(template),
            joints=_joints(template),
            legs=rehearse(template),
            call_example=example,
            parses=parses,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe values: those of `describe()`, and under `inspection` what is shown besides."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {**values.pop("described"), "inspection": values}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", tool.get("function", tool))


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(str(_function(tool).get("name", "?")) for tool in tools)


def _generation_prompt(template: ChatTemplate) -> str | None:
    """What the last message is followed by only if a turn is asked for."""
    history = first_messages(template)
    try:
        whole = template.render(history, add_generation_prompt=True)
        bare = template.render(history, add_generation_prompt=False)
    except TemplateError:
        return None
    return whole[len(bare) :] if whole.startswith(bare) else None


def _header_stops(template: ChatTemplate) -> tuple[str, ...]:
    """Stop tokens of joints, where a finished last turn is followed by none."""
    if template.facts.end_text != "" or template.program is None:
        return ()
    joints = template.program.joints
    ids = {joint.ids[0] for (role, _), joint in joints.items() if role in STARTS and joint.ids}
    return tuple(template.tokenizer.decode([i]) for i in sorted(ids))


def _joints(template: ChatTemplate) -> tuple[JointPieces, ...]:
    program = template.program
    if program is None:
        return ()
    found: list[JointPieces] = []
    for (after, before), joint in program.joints.items():
        sides = (after,) if joint.ids else (after, before)
        pieces = [Fixed(text=joint.lead, ids=None, beside=sides)] if joint.lead else []
        if joint.ids:
            end = len(joint.text) - len(joint.tail)
            text = joint.text[len(joint.lead) : end]
            pieces.append(Fixed(text=text, ids=joint.ids, sampled=after in STARTS))
        if joint.tail:
            last = before == GENERATE
            ids = tuple(template.tokenizer.encode(joint.tail)) if last else None
            pieces.append(Fixed(text=joint.tail, ids=ids, beside=() if last else (before,)))
        found.append(JointPieces(after=after, before=before, pieces=tuple(pieces)))
    return tuple(found)


def _call_example(template: ChatTemplate) -> tuple[str | None, bool]:
    """A turn with one call, and whether it is parsed back."""
    if not template.facts.calls:
        return None, False
    nothing: Mapping[str, Any] = {}
    function = _function(template.tools[0]) if template.tools else nothing
    name = str(function.get("name", template.facts.tool_name))
    arguments = _sample_arguments(function) or {"command": "ls -l"}
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = spoken(template, first_messages(template), message)
    except TemplateError:
        return None, False
    if text is None:
        return None, False
    parsed = template.parse(template.tokenizer.encode(text)).tool_calls
    return text, [(c.name, c.error) for c in parsed] == [(name, None)]


def _sample_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each parameter that a tool schema declares."""
    parameters = cast("Mapping[str, Any]", function.get("parameters") or {})
    properties = cast("Mapping[str, Mapping[str, Any]]", parameters.get("properties") or {})
    return {name: _SAMPLES.get(str(schema.get("type")), {}) for name, schema in properties.items()}
