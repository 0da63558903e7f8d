"""The tool calls in a completion's ids, found by the ids of their markers."""

from __future__ import annotations

import msgspec

from token_tracking.parsing import call_forms
from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.markers import Markers
from token_tracking.parsing.pieces import Pieces
from token_tracking.parsing.read_call import ReadCall
from token_tracking.parsing.tool_call import NOT_CLOSED, Span, ToolCall
from token_tracking.tokenizer import Tokenizer

MAX_ENDS = 4
"""Closing markers that are tried as the end of one call (its arguments may hold some as text)."""
MAX_ENCLOSING = 16
"""Calls of a completion that are tried as holding further calls as text in their arguments."""


class CallScanner:
    """Reads the calls of one template."""

    def __init__(self, tokenizer: Tokenizer, markers: Markers, types: ArgumentTypes):
        self.markers = markers
        self._tokenizer = tokenizer
        self._types = types

    def scan(self, ids: list[int], first: int, section: int) -> tuple[list[ToolCall], int, str | None]:
        """The calls from the opening at `first` on, where the last ends, and what is wrong between them."""
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
            calls += self._calls(ids, read, len(calls), (opened, end))
            at, opened = end, find(ids, m.call_open, end)
        return calls, at, stray

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
            found = self._calls(ids, self._read(ids, start, end), len(calls), (start, end))
            calls += [*found[:-1], msgspec.structs.replace(found[-1], error=NOT_CLOSED)]
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

    def _calls(self, ids: list[int], read: ReadCall, index: int, span: Span) -> list[ToolCall]:
        """One call, or those of a list."""
        if not read.others:
            return [tool_call(read, index, span)]
        reads = (read, *read.others)
        pieces = Pieces(self._tokenizer, ids[span[0] + 1 : span[1]])
        inner = (span[0] + 1 + pieces.id_at(one.end) for one in reads[:-1])
        ends = [span[0], *inner, span[1]]
        return [tool_call(one, index + at, (ends[at], ends[at + 1])) for at, one in enumerate(reads)]


def tool_call(read: ReadCall, index: int, span: Span) -> ToolCall:
    """A call as it was read, the `index`-th of its turn."""
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
