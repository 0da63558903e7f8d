"""A turn of several messages with headers (gpt-oss), taken apart into reasoning, content and tool calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from token_tracking.parsing import call_forms
from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.call_forms import CallForm
from token_tracking.parsing.call_scan import tool_call
from token_tracking.parsing.markers import Headers
from token_tracking.parsing.tool_call import NOT_CLOSED, Span, ToolCall
from token_tracking.tokenizer import Tokenizer

Kind = Literal["reasoning", "content", "call", "stray"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the turn."""

    span: Span
    """Header and end token included."""
    body: Span
    kind: Kind
    name: str = ""
    """Of the tool that is called."""
    end: int | None = None
    """The token after the text. None: the message was cut."""
    error: str | None = None


class HeaderedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the messages of a turn say."""

    reasoning: str | None
    reasoning_span: Span | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    error: str | None
    rest: int
    """Where what follows the reasoning begins."""


class HeaderScanner:
    """Reads the turns of one template."""

    def __init__(self, tokenizer: Tokenizer, headers: Headers, form: CallForm, types: ArgumentTypes):
        self._tokenizer = tokenizer
        self._headers = headers
        self._form = form
        self._types = types

    def scan(self, ids: list[int], stop_ids: frozenset[int]) -> HeaderedTurn:
        """Take a turn apart; what stands in no message of a known kind is an error, and in no field."""
        parts = self._parts(ids, self._headers.ends | stop_ids)
        leading = 0
        while leading < len(parts) and parts[leading].kind == "reasoning":
            leading += 1
        thoughts, rest = parts[:leading], parts[leading:]
        begin = thoughts[-1].span[1] if thoughts else 0
        calls: list[ToolCall] = []
        error = "the reasoning was not closed" if thoughts and thoughts[-1].end is None else None
        for part in rest:
            if part.kind == "call":
                calls.append(self._call(ids, part, len(calls)))
                error = error or calls[-1].error
            elif part.kind == "reasoning":
                error = error or "reasoning after the content"
            error = error or part.error
        for left, right in pairwise(rest):
            if left.kind == "call" and right.kind == "content":
                error = error or "text after a tool call"
        return HeaderedTurn(
            reasoning="\n".join(self._text(ids, part.body) for part in thoughts) if thoughts else None,
            reasoning_span=(0, begin) if thoughts else None,
            content=self._content(ids, rest, begin),
            tool_calls=tuple(calls),
            error=error,
            rest=begin,
        )

    def in_reasoning(self, ids: list[int]) -> bool:
        """Whether the turn ends inside its reasoning."""
        parts = self._parts(ids, self._headers.ends)
        return bool(parts) and parts[-1].kind == "reasoning" and parts[-1].end is None

    def _content(self, ids: list[int], parts: list[Part], begin: int) -> str:
        """Everything, verbatim, if some of it is no message: no text is lost."""
        if any(part.error for part in parts):
            return self._text(ids, (begin, len(ids)))
        return "".join(self._text(ids, part.body) for part in parts if part.kind == "content")

    def _parts(self, ids: list[int], ends: frozenset[int]) -> list[Part]:
        """The messages in order; together they hold every id."""
        parts: list[Part] = []
        at = 0
        while at < len(ids):
            part = self._part(ids, at, ends, first=not parts)
            parts.append(part)
            at = part.span[1]
        return parts

    def _part(self, ids: list[int], at: int, ends: frozenset[int], *, first: bool) -> Part:
        h = self._headers
        opened = not first and ids[at] == h.start
        begin = at + opened
        stops = ends | {h.start}
        head = begin
        while head < len(ids) and ids[head] != h.body and ids[head] not in stops:
            head += 1
        if head == len(ids) or ids[head] != h.body:
            end = min(head + (head < len(ids) and ids[head] != h.start), len(ids))
            end = max(end, at + 1)
            blank = not self._text(ids, (begin, head)).strip()
            why = None if blank and not opened else "a message has a header and no text"
            return Part(span=(at, end), body=(begin, head), kind="stray", error=why)
        last = head + 1
        while last < len(ids) and ids[last] not in stops:
            last += 1
        closed = last < len(ids) and ids[last] != h.start
        kind, name, why = self._kind(ids[begin:head], opened=opened, first=first)
        return Part(
            span=(at, last + closed),
            body=(head + 1, last),
            kind=kind,
            name=name,
            end=ids[last] if closed else None,
            error=why,
        )

    def _kind(self, header: list[int], *, opened: bool, first: bool) -> tuple[Kind, str, str | None]:
        h = self._headers
        words = self._words(header)
        if not first:
            if not opened or not self._tokenizer.decode(header).startswith(h.role):
                return "stray", "", "a message is not of this turn's role"
            words -= {h.role}
        new = words - h.reasoning - h.content
        named = [word for word in new if word.startswith(h.before_name)]
        others = [word for word in new if "=" in word]
        if len(named) == 1 and named[0] != h.before_name:
            return "call", named[0].removeprefix(h.before_name), None
        if named or others:
            wrong = min(named or others)
            return "stray", "", f"a message goes to no tool: {wrong[:40]!r}"
        if h.reasoning and h.reasoning <= words:
            return "reasoning", "", None
        return "content", "", None

    def _words(self, header: list[int]) -> set[str]:
        """Words between blanks; every control token is a word."""
        words: list[str] = []
        start = 0
        for at, number in enumerate([*header, -1]):
            if number == -1 or number in self._tokenizer.special_ids:
                words += self._text(header, (start, at)).split()
                words += [self._tokenizer.decode([number])] if number >= 0 else []
                start = at + 1
        return set(words)

    def _call(self, ids: list[int], part: Part, index: int) -> ToolCall:
        read = call_forms.read(self._form, self._text(ids, part.body), self._types)
        error = read.error
        if part.end is None or part.end not in self._headers.call_ends:
            error = NOT_CLOSED
        elif error is None and read.name not in {"", part.name}:
            error = f"the header calls {part.name[:40]!r}, the text {read.name[:40]!r}"
        read = msgspec.structs.replace(read, name=part.name, error=error)
        return tool_call(read, index, part.span)

    def _text(self, ids: list[int], span: Span) -> str:
        return self._tokenizer.decode(ids[span[0] : span[1]]) if span[0] < span[1] else ""
