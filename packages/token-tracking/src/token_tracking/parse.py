"""A completion's ids, taken apart into reasoning, content and tool calls with the template's own markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.argument_types import ArgumentTypes
from token_tracking.call_scan import CallScanner, Markers, Span, ToolCall, find
from token_tracking.tokenizer import Tokenizer


class ParsedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn, as text."""

    reasoning: str | None
    """None: no reasoning was written. The blanks that the template puts around it are taken off."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """All calls in order; a malformed one has an error and leaves the others as they are."""
    error: str | None = None
    """The first thing that is wrong (reasoning not closed, a malformed call, text after the calls). None:
    nothing."""
    reasoning_span: Span | None = None
    """None: no reasoning was written."""
    text: str = ""
    """Content and calls together, verbatim: everything after the reasoning."""

    def message(self) -> dict[str, Any]:
        """The turn as an assistant message in the usual chat form.

        A turn with a malformed call, or with text between or after calls, has all of its text as content:
        printed as calls it would not be what the model wrote. Take well-formed calls of such a turn from
        `tool_calls`.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls and self.error is not None:
            message["content"] = self.text
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

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: Markers,
        stop_ids: frozenset[int],
        tools: Sequence[Any] = (),
    ):
        self.markers = markers
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._scanner = CallScanner(tokenizer, markers, ArgumentTypes(tools))

    def parse(self, ids: Sequence[int]) -> ParsedCompletion:
        """Take a completion apart; a stop token at its end is ignored. Never raises on what a model wrote."""
        ids = [int(i) for i in ids]
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        reasoning, span, start, error = self._split_reasoning(ids)
        first = find(ids, self.markers.call_open, start)
        end = len(ids) if first < 0 else first
        if first >= 0 and (section := find(ids, self.markers.section_open, start)) >= 0:
            end = min(end, section)
        content, text = self._decode(ids[start:end]), self._decode(ids[start:])
        if reasoning is not None:
            content, text = content.lstrip("\n"), text.lstrip("\n")
        calls: list[ToolCall] = []
        if first >= 0:
            content = _without_end(content, self.markers.before_calls)
            calls, stray = self._scanner.scan(ids, first, end)
            error = error or next((call.error for call in calls if call.error), None) or stray
        return ParsedCompletion(
            reasoning=reasoning,
            content=content,
            tool_calls=tuple(calls),
            error=error,
            reasoning_span=span,
            text=text,
        )

    def in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends inside its reasoning."""
        *_, error = self._split_reasoning([int(i) for i in ids])
        return error is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def _split_reasoning(self, ids: list[int]) -> tuple[str | None, Span | None, int, str | None]:
        """Reasoning, its span, where the rest begins, and what is wrong."""
        m = self.markers
        if m.reasoning_open is None or m.reasoning_close is None:
            return None, None, 0, None
        start = 0
        begin: int | None = 0 if m.prefilled else None
        # More than once where the prompt opened it already and the model opens it again (verl#2189).
        while (at := find(ids, m.reasoning_open, start)) >= 0:
            if self._decode(ids[start:at]).strip():
                break
            begin = at if begin is None else begin
            start = at + 1
        if begin is None:
            return None, None, 0, None
        end = find(ids, m.reasoning_close, start)
        if end < 0:
            reasoning = self._decode(ids[start:]).strip("\n")
            return reasoning, (begin, len(ids)), len(ids), "the reasoning was not closed"
        return self._decode(ids[start:end]).strip("\n"), (begin, end + 1), end + 1, None


def _without_end(text: str, end: str) -> str:
    """`text` without the longest end of `end` that it has."""
    return next((text[: -len(end[at:])] for at in range(len(end)) if text.endswith(end[at:])), text)
