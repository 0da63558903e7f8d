"""The tool calls in a completion's ids, found by the ids of their markers."""

from __future__ import annotations

import msgspec

from token_tracking import call_forms
from token_tracking.argument_types import ArgumentTypes
from token_tracking.call_forms import CallForm, JsonForm, ReadCall
from token_tracking.tokenizer import Tokenizer

Span = tuple[int, int]
"""Start and end of a piece in the completion's ids, its markers included."""

MAX_ENDS = 4
"""Closing markers that are tried as the end of one call (its arguments may hold some as text)."""
MAX_ENCLOSING = 16
"""Calls of a completion that are tried as holding further calls as text in their arguments."""

_NOT_CLOSED = "the tool call was not closed"


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
    section_open: int | None = None
    """Stands before the first call. None: nothing does."""
    section_close: int | None = None
    """Stands after the last call."""
    before_calls: str = "\n"
    """Between the content and the first marker of the calls."""
    form: CallForm = JsonForm()
    """What stands between the markers of a call."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call as the model wrote it."""

    id: str
    """Verbatim where the template prints ids; else `call_0`, `call_1`, … by position, so that a completion
    always parses to the same ids."""
    name: str
    """Empty if it could not be read."""
    arguments: str
    """JSON text of the arguments: verbatim in JSON forms, else made of the values, numbers as written. All
    text of the call if it could not be read."""
    error: str | None = None
    """What is wrong with the call. None: name and arguments are well-formed and fit the tool's schema as far
    as it decides how they are read."""
    span: Span = (0, 0)


class CallScanner:
    """Reads the calls of one template."""

    def __init__(self, tokenizer: Tokenizer, markers: Markers, types: ArgumentTypes):
        self.markers = markers
        self._tokenizer = tokenizer
        self._types = types

    def scan(self, ids: list[int], first: int, section: int) -> tuple[list[ToolCall], str | None]:
        """The calls from the opening at `first` on, and what is wrong with the text around them."""
        m = self.markers
        calls: list[ToolCall] = []
        stray: str | None = None
        partners = _partners(ids, m.call_open, m.call_close)
        enclosing = MAX_ENCLOSING
        opened, at = first, section + (section < first)
        while opened >= 0:
            if self._tokenizer.decode(ids[at:opened]).strip():
                stray = stray or "text between tool calls"
            end, read = -1, None
            if partners.get(opened, -1) > find(ids, m.call_close, opened) and enclosing:
                enclosing -= 1
                end, read = self._read_first(ids, opened, [partners[opened]])
            if read is None:
                end, read = self._read_to_close(ids, opened, calls)
            if read is None:
                opened, at = (end if end < len(ids) else -1), end
                continue
            calls.append(_tool_call(read, len(calls), (opened, end)))
            at, opened = end, find(ids, m.call_open, end)
        after = ids[at:]
        if m.section_close is not None and m.section_close in after:
            after.remove(m.section_close)
        if self._tokenizer.decode(after).strip():
            stray = stray or "text after the tool calls"
        return calls, stray

    def _read_to_close(
        self, ids: list[int], opened: int, calls: list[ToolCall]
    ) -> tuple[int, ReadCall | None]:
        """One call and where it ends. None: calls that were not closed were added, the next one begins there.

        An opening inside a call that cannot be read to its close begins another call: a call that was not
        closed does not take the next one with it.
        """
        m = self.markers
        close = find(ids, m.call_close, opened + 1)
        limit = len(ids) if close < 0 else close
        inner = [at for at in range(opened + 1, limit) if ids[at] == m.call_open]
        if close < 0:
            inner.append(len(ids))
        elif not inner:
            following = find(ids, m.call_open, close)
            ends = _positions(ids, m.call_close, close, len(ids) if following < 0 else following, MAX_ENDS)
            end, read = self._read_first(ids, opened, ends)
            return (end, read) if read else (close + 1, self._read(ids, opened, close))
        elif self._read_first(ids, inner[-1], [close])[1] is None:
            end, read = self._read_first(ids, opened, [close])
            if read is not None:
                return end, read
        start = opened
        for end in inner:
            read = msgspec.structs.replace(self._read(ids, start, end), error=_NOT_CLOSED)
            calls.append(_tool_call(read, len(calls), (start, end)))
            start = end
        return inner[-1], None

    def _read_first(self, ids: list[int], opened: int, closes: list[int]) -> tuple[int, ReadCall | None]:
        """The call up to the first of some closings that makes it readable."""
        for close in closes:
            read = self._read(ids, opened, close)
            if read.whole:
                return close + 1, read
        return -1, None

    def _read(self, ids: list[int], opened: int, close: int) -> ReadCall:
        return call_forms.read(
            self.markers.form, self._tokenizer.decode(ids[opened + 1 : close]), self._types
        )


def _tool_call(read: ReadCall, index: int, span: Span) -> ToolCall:
    return ToolCall(
        id=read.id or f"call_{index}", name=read.name, arguments=read.arguments, error=read.error, span=span
    )


def find(ids: list[int], token: int | None, start: int) -> int:
    """Position of `token` from `start` on; -1 if it is not there."""
    try:
        return -1 if token is None else ids.index(token, start)
    except ValueError:
        return -1


def _positions(ids: list[int], token: int | None, start: int, end: int, most: int) -> list[int]:
    found: list[int] = []
    while len(found) < most and 0 <= (at := find(ids, token, start)) < end:
        found.append(at)
        start = at + 1
    return found


def _partners(ids: list[int], opening: int | None, closing: int | None) -> dict[int, int]:
    """Closing position by opening position, nested ones included."""
    waiting: list[int] = []
    found: dict[int, int] = {}
    for at, token in enumerate(ids):
        if token == opening:
            waiting.append(at)
        elif token == closing and waiting:
            found[waiting.pop()] = at
    return found
