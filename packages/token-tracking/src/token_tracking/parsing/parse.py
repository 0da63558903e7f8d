"""A completion's ids, taken apart into reasoning, content and tool calls with the template's own markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.bare_calls import BareScanner
from token_tracking.parsing.call_forms import JsonForm
from token_tracking.parsing.call_scan import CallScanner, find
from token_tracking.parsing.header_scan import HeaderScanner
from token_tracking.parsing.markers import Markers
from token_tracking.parsing.tool_call import Span, ToolCall
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
        types = ArgumentTypes(tools)
        self._calls = CallScanner(tokenizer, markers, types)
        headers, form = markers.headers, markers.form
        self._headers = HeaderScanner(tokenizer, headers, form, types) if headers else None
        self._bare: BareScanner | None = None
        if markers.bare and isinstance(form, JsonForm):
            self._bare = BareScanner(tokenizer, form, types)

    def parse(self, ids: Sequence[int]) -> ParsedCompletion:
        """Take a completion apart; a stop token at its end is ignored. Never raises on what a model wrote."""
        ids = [int(i) for i in ids]
        if self._headers is not None:
            return self._parse_messages(ids, self._headers)
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        reasoning, span, start, error = self._split_reasoning(ids)
        said = self._parse_bare(ids, start, self._bare) if self._bare else self._parse_marked(ids, start)
        if reasoning is None:
            return said
        return msgspec.structs.replace(
            said,
            reasoning=reasoning,
            reasoning_span=span,
            content=said.content.lstrip("\n"),
            text=said.text.lstrip("\n"),
            error=error or said.error,
        )

    def in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends inside its reasoning."""
        ids = [int(i) for i in ids]
        if self._headers is not None:
            return self._headers.in_reasoning(ids)
        *_, error = self._split_reasoning(ids)
        return error is not None

    def _parse_marked(self, ids: list[int], start: int) -> ParsedCompletion:
        m = self.markers
        first = find(ids, m.call_open, start)
        text = self._decode(ids[start:])
        if first < 0:
            return ParsedCompletion(reasoning=None, content=text, text=text)
        end = first
        if (section := find(ids, m.section_open, start)) >= 0:
            end = min(end, section)
        before = self._decode(ids[start:end])
        calls, last, stray = self._calls.scan(ids, first, end)
        after = self._decode(_without_first(ids[last:], m.section_close))
        if m.content_after_calls:
            content = after
            stray = stray or ("text before the tool calls" if before.strip() else None)
        else:
            content = _without_end(before, m.before_calls)
            stray = stray or ("text after the tool calls" if after.strip() else None)
        return ParsedCompletion(
            reasoning=None, content=content, tool_calls=tuple(calls), error=_error(calls, stray), text=text
        )

    def _parse_bare(self, ids: list[int], start: int, scanner: BareScanner) -> ParsedCompletion:
        calls, stray = scanner.scan(ids, start)
        text = self._decode(ids[start:])
        return ParsedCompletion(
            reasoning=None,
            content="" if calls else text,
            tool_calls=tuple(calls),
            error=_error(calls, stray),
            text=text,
        )

    def _parse_messages(self, ids: list[int], scanner: HeaderScanner) -> ParsedCompletion:
        turn = scanner.scan(ids, self._stop_ids)
        end = len(ids) - (len(ids) > turn.rest and ids[-1] in self._stop_ids)
        return ParsedCompletion(
            reasoning=turn.reasoning,
            content=turn.content,
            tool_calls=turn.tool_calls,
            error=turn.error,
            reasoning_span=turn.reasoning_span,
            text=self._decode(ids[turn.rest : end]),
        )

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
            return self._reasoning(ids[start:]), (begin, len(ids)), len(ids), "the reasoning was not closed"
        return self._reasoning(ids[start:end]), (begin, end + 1), end + 1, None

    def _reasoning(self, ids: list[int]) -> str:
        return self._decode(ids).removeprefix(self.markers.reasoning_head).strip("\n")


def _without_first(ids: list[int], token: int | None) -> list[int]:
    """`ids` without the first `token`."""
    at = find(ids, token, 0)
    return ids if at < 0 else [*ids[:at], *ids[at + 1 :]]


def _error(calls: Sequence[ToolCall], stray: str | None) -> str | None:
    return next((call.error for call in calls if call.error), None) or stray


def _without_end(text: str, end: str) -> str:
    """`text` without the longest end of `end` that it has."""
    return next((text[: -len(end[at:])] for at in range(len(end)) if text.endswith(end[at:])), text)
