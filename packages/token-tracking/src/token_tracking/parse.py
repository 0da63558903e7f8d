"""A completion's ids, taken apart into reasoning, content and tool calls with the template's own markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.tokenizer import Tokenizer

MAX_NESTING = 64
"""Deepest arrays and objects accepted in tool-call arguments."""


class Markers(msgspec.Struct, frozen=True, kw_only=True):
    """What a template writes around reasoning and tool calls, as ids of added tokens."""

    reasoning_open: int | None = None
    """None: the template prints no reasoning, or not between single tokens."""
    reasoning_close: int | None = None
    reasoning_closing_text: str = ""
    """From the end of the reasoning to the start of the content, blanks included."""
    prefilled: bool = False
    """The generation prompt ends inside the reasoning: a completion starts there."""
    call_open: int | None = None
    """None: the template prints no tool calls that this package can read."""
    call_close: int | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call as the model wrote it."""

    id: str
    """`call_0`, `call_1`, … by position: a completion always parses to the same ids."""
    name: str
    """Empty if the call could not be read."""
    arguments: str
    """JSON text of the arguments, verbatim; all text of the call if it could not be read."""
    error: str | None = None
    """What is wrong with the call. None: name and arguments are well-formed."""


class ParsedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn, as text."""

    reasoning: str | None
    """None: no reasoning was written. The blanks that the template puts around it are taken off."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    """The first thing that is wrong (reasoning not closed, a malformed call). None: nothing."""
    raw_calls: str = ""
    """The text from the first tool call on, verbatim."""

    def message(self) -> dict[str, Any]:
        """The turn as an assistant message in the usual chat form.

        A turn with a malformed call keeps all of its calls as content: a template would print them
        differently.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if any(call.error for call in self.tool_calls):
            message["content"] = f"{self.content}\n{self.raw_calls}" if self.content else self.raw_calls
        elif self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


class CompletionParser:
    """Parses completions of one template."""

    def __init__(self, tokenizer: Tokenizer, markers: Markers, stop_ids: frozenset[int]):
        self.markers = markers
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids

    def parse(self, ids: Sequence[int]) -> ParsedCompletion:
        """Take a completion apart; a stop token at its end is ignored. Never raises on what a model wrote."""
        ids = [int(i) for i in ids]
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        reasoning, rest, error = self._split_reasoning(ids)
        at = _find(rest, self.markers.call_open, 0)
        at = len(rest) if at < 0 else at
        content = self._tokenizer.decode(rest[:at])
        if reasoning is not None:
            content = content.lstrip("\n")
        if at == len(rest):
            return ParsedCompletion(reasoning=reasoning, content=content, error=error)
        calls, after = self._calls(rest[at:])
        raw = self._tokenizer.decode(rest[at:])
        if after.strip():
            last = calls[-1]
            problem = "text after the tool calls"
            calls[-1] = msgspec.structs.replace(last, error=last.error or problem)
        error = error or next((call.error for call in calls if call.error), None)
        return ParsedCompletion(
            reasoning=reasoning,
            content=content.removesuffix("\n"),
            tool_calls=tuple(calls),
            error=error,
            raw_calls=raw,
        )

    def in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends inside its reasoning."""
        _, _, error = self._split_reasoning([int(i) for i in ids])
        return error is not None

    def _split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int], str | None]:
        m = self.markers
        if m.reasoning_open is None or m.reasoning_close is None:
            return None, ids, None
        start = 0
        # More than once where the prompt opened it already and the model opens it again (verl#2189).
        while (at := _find(ids, m.reasoning_open, start)) >= 0:
            if self._tokenizer.decode(ids[start:at]).strip():
                break
            start = at + 1
        if start == 0 and not m.prefilled:
            return None, ids, None
        end = _find(ids, m.reasoning_close, start)
        if end < 0:
            reasoning = self._tokenizer.decode(ids[start:]).strip("\n")
            return reasoning, [], "the reasoning was not closed"
        return self._tokenizer.decode(ids[start:end]).strip("\n"), ids[end + 1 :], None

    def _calls(self, ids: list[int]) -> tuple[list[ToolCall], str]:
        """The calls in `ids`, which start with an opening, and the text after the last of them."""
        m = self.markers
        calls: list[ToolCall] = []
        at = 0
        while (opened := _find(ids, m.call_open, at)) >= 0:
            start = opened + 1
            between = self._tokenizer.decode(ids[at:opened])
            end = _find(ids, m.call_close, start)
            closed = end >= 0
            end = end if closed else len(ids)
            call = read_json_call(self._tokenizer.decode(ids[start:end]), call_id=f"call_{len(calls)}")
            if not closed:
                call = msgspec.structs.replace(call, error=call.error or "the tool call was not closed")
            if between.strip():
                call = msgspec.structs.replace(call, error=call.error or "text between tool calls")
            calls.append(call)
            at = min(end + 1, len(ids))
        return calls, self._tokenizer.decode(ids[at:])


def _find(ids: list[int], token: int | None, start: int) -> int:
    """Position of `token` from `start` on; -1 if it is not there."""
    try:
        return -1 if token is None else ids.index(token, start)
    except ValueError:
        return -1


def read_json_call(text: str, *, call_id: str) -> ToolCall:
    """Read `{"name": …, "arguments": …}` (the Hermes form); the arguments' text is kept as it stands."""
    problem: str | None
    try:
        members = _members(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(
            id=call_id, name="", arguments=text, error=f"the tool call is not a JSON object: {error}"
        )
    name = members.get("name", (None, ""))[0]
    value, verbatim = members.get("arguments", (None, ""))
    if not isinstance(name, str) or not name:
        problem = "the tool call has no name"
    elif not isinstance(value, dict):
        problem = "the tool call's arguments are not an object"
    elif len(members) != 2:
        extra = ", ".join(sorted(set(members) - {"name", "arguments"}))
        problem = f"the tool call has unknown fields: {extra}"
    else:
        return ToolCall(id=call_id, name=name, arguments=verbatim)
    return ToolCall(
        id=call_id, name=name if isinstance(name, str) else "", arguments=verbatim or text, error=problem
    )


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Key to (value, its text) of a JSON object that is all of `text`."""
    if _nesting(text) > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    members: dict[str, tuple[Any, str]] = {}
    at = _expect(text, _blank(text, 0), "{")
    while True:
        key, at = decoder.raw_decode(text, _blank(text, at))
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        if key in members:
            raise ValueError(f"the key {key!r} stands twice")
        start = _blank(text, _expect(text, _blank(text, at), ":"))
        value, end = decoder.raw_decode(text, start)
        members[key] = (value, text[start:end])
        at = _blank(text, end)
        if text[at : at + 1] == ",":
            at += 1
            continue
        at = _blank(text, _expect(text, at, "}"))
        if at != len(text):
            raise ValueError(f"text after the object: {text[at : at + 20]!r}")
        return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _nesting(text: str) -> int:
    deepest = depth = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r} at {at}, found {text[at : at + 10]!r}")
    return at + 1
