"""`LiteralForm`: calls as a name and `key=value` in brackets, alone (Gemma 4) or in a list (lfm2)."""

from __future__ import annotations

import re

import msgspec

from token_tracking.parsing import strict_json
from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.literals import LiteralReader, object_text
from token_tracking.parsing.read_call import MalformedCallError, ReadCall

MAX_RECOVERIES = 8
"""Places in a list at which reading is tried again after a malformed call."""

_NAME = r"[^\s()\[\]{}'\"=,<>]+"
_KEY = r"[^\s()\[\]{}'\"=:,<>]+"


class LiteralForm(msgspec.Struct, frozen=True, kw_only=True, tag="literals"):
    """`before_name NAME open KEY assign VALUE separator … close`; values carry their own types."""

    before_name: str
    open: str
    assign: str
    separator: str
    close: str
    quote: str
    escaped: bool
    """A backslash escapes in an argument's text. False: text ends at the quote after which the form goes
    on."""
    list_open: str = ""
    """Empty: one call stands between the markers, not a list."""
    list_separator: str = ""
    list_close: str = ""

    def read(self, text: str, types: ArgumentTypes) -> ReadCall:
        """Read a call, or the calls of a list: the first, with the `others`.

        Raises:
            MalformedCallError: it is no such call; a list does not begin as one.
        """
        if self.list_open:
            return self._read_list(text)
        call, end = self._read_one(text, 0)
        _expect_end(text, end, call.name)
        return call

    def _read_list(self, text: str) -> ReadCall:
        separator, close = self.list_separator.strip(), self.list_close.strip()
        at = _expect(text, 0, self.list_open, "the list of tool calls does not begin with")
        next_call = re.compile(rf"{re.escape(separator)}\s*(?={_NAME}{re.escape(self.open)})")
        calls: list[ReadCall] = []
        recoveries = MAX_RECOVERIES
        while True:
            try:
                call, at = self._read_one(text, at)
                at = strict_json.blank(text, at)
                if text.startswith(separator, at):
                    at += len(separator)
                    calls.append(msgspec.structs.replace(call, end=at))
                    continue
                at = _expect(text, at, close, "the list of tool calls goes on with neither a call nor")
                _expect_end(text, at, call.name)
                calls.append(msgspec.structs.replace(call, end=len(text)))
                break
            except MalformedCallError as error:
                begin = calls[-1].end if calls else 0
                found = next_call.search(text, max(at, begin + 1)) if recoveries else None
                recoveries -= 1
                at = found.end() if found else len(text)
                calls.append(_malformed(error, text[begin:at], at))
                if found is None:
                    break
        return msgspec.structs.replace(calls[0], others=tuple(calls[1:]), whole=all(c.whole for c in calls))

    def _read_one(self, text: str, at: int) -> tuple[ReadCall, int]:
        at = _expect(text, at, self.before_name, "the tool call does not begin with")
        found = re.compile(rf"\s*({_NAME})\s*{_words(self.open)}").match(text, at)
        if found is None:
            raise MalformedCallError("the tool call has no name")
        name, at = found[1], found.end()
        keyed = re.compile(rf"\s*({_KEY})\s*{_words(self.assign)}\s*")
        reader = LiteralReader(text, self.quote, escaped=self.escaped, closing=self._closing())
        values: dict[str, str] = {}
        at = strict_json.blank(text, at)
        if text.startswith(self.close, at):
            return ReadCall(name=name, arguments="{}"), at + len(self.close)
        while True:
            opened = keyed.match(text, at)
            if opened is None:
                raise MalformedCallError("an argument has no name", name=name)
            key = opened[1]
            if key in values:
                raise MalformedCallError(f"parameter {key[:40]!r} stands twice", name=name)
            try:
                values[key], at = reader.argument(opened.end())
            except ValueError as error:
                raise MalformedCallError(f"parameter {key[:40]!r}: {error}", name=name) from error
            at = strict_json.blank(text, at)
            if text.startswith(self.close, at):
                return ReadCall(name=name, arguments=object_text(values)), at + len(self.close)
            at = _expect(text, at, self.separator, f"parameter {key[:40]!r} is followed by neither", name)

    def _closing(self) -> re.Pattern[str] | None:
        """The quote that closes text without escapes: the form goes on after it."""
        if self.escaped:
            return None
        argument = rf"{_words(self.separator)}\s*{_KEY}\s*{_words(self.assign)}"
        ends = [r"\Z", *([_words(self.list_separator), _words(self.list_close)] if self.list_open else [])]
        call_end = rf"{_words(self.close)}\s*(?:{'|'.join(ends)})"
        return re.compile(rf"{re.escape(self.quote)}(?=\s*(?:{argument}|{call_end}))")


def _malformed(error: MalformedCallError, text: str, end: int) -> ReadCall:
    return ReadCall(name=error.name, arguments=text, error=str(error), whole=False, end=end)


def _words(literal: str) -> str:
    return re.escape(literal.strip())


def _expect(text: str, at: int, literal: str, why: str, name: str = "") -> int:
    at = strict_json.blank(text, at)
    wanted = literal.strip()
    if not text.startswith(wanted, at):
        raise MalformedCallError(f"{why} {wanted!r}: {text[at : at + 20]!r}", name=name)
    return at + len(wanted)


def _expect_end(text: str, at: int, name: str) -> None:
    at = strict_json.blank(text, at)
    if at < len(text):
        raise MalformedCallError(f"text stands after the call: {text[at : at + 20]!r}", name=name)
