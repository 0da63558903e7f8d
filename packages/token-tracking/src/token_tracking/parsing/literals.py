"""Argument values in the notations of Python (lfm2) and Gemma, read into JSON text. Nothing is evaluated."""

from __future__ import annotations

import json
import re

from token_tracking.parsing import strict_json

_ESCAPED = re.compile(
    r"'[^'\\]*+(?:\\.[^'\\]*+)*+'|" + r'"[^"\\]*+(?:\\.[^"\\]*+)*+"',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(\n|.))", re.DOTALL)
_LETTERS = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "\\": "\\",
    "/": "/",
    "'": "'",
    '"': '"',
    "\n": "",
}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_KEY = re.compile(r"[^:,{}\[\]'\"\s][^:,{}\[\]\n]*")


class LiteralReader:
    """Reads values that stand in a text, each from where it begins to where it ends."""

    def __init__(self, text: str, quote: str, *, escaped: bool, closing: re.Pattern[str] | None = None):
        """Read `text`.

        Args:
            text: what the model wrote.
            quote: stands on both sides of text.
            escaped: a backslash in quoted text escapes.
            closing: a quote without escapes that closes text; None: the next quote does.
        """
        self.text = text
        self.quote = quote
        self.escaped = escaped
        self._closing = closing

    def argument(self, at: int) -> tuple[str, int]:
        """JSON text of the argument that begins at `at`, and where it ends.

        Raises:
            ValueError: it is no value, is nested too deeply, has a key twice, or a number that is not finite.
        """
        if not self.escaped and self.text.startswith(self.quote, at):
            start = at + len(self.quote)
            closed = self._closing.search(self.text, start) if self._closing else None
            end = closed.start() if closed else self.text.find(self.quote, start)
            if end < 0:
                raise ValueError("its text is not closed")
            return _json_text(self.text[start:end]), end + len(self.quote)
        return self._value(at, 0)

    def _value(self, at: int, depth: int) -> tuple[str, int]:
        if depth > strict_json.MAX_NESTING:
            raise ValueError(f"it is nested deeper than {strict_json.MAX_NESTING}")
        first = self.text[at : at + 1]
        if first == "[":
            return self._items(at + 1, depth)
        if first == "{":
            return self._members(at + 1, depth)
        if self.text.startswith(self.quote, at) or first in {"'", '"'}:
            text, at = self._quoted(at)
            return _json_text(text), at
        if number := _NUMBER.match(self.text, at):
            strict_json.read(number[0])
            return number[0], number.end()
        word = _WORD.match(self.text, at)
        if word is None or word[0] not in _WORDS:
            raise ValueError(f"it is no value: {self.text[at : at + 20]!r}")
        return _WORDS[word[0]], word.end()

    def _quoted(self, at: int) -> tuple[str, int]:
        if self.quote not in {"'", '"'} and self.text.startswith(self.quote, at):
            start = at + len(self.quote)
            end = self.text.find(self.quote, start)
            if end < 0:
                raise ValueError("its text is not closed")
            return self.text[start:end], end + len(self.quote)
        found = _ESCAPED.match(self.text, at)
        if found is None:
            raise ValueError("its text is not closed")
        return _ESCAPE.sub(_unescape, found[0][1:-1]), found.end()

    def _items(self, at: int, depth: int) -> tuple[str, int]:
        items: list[str] = []
        at = strict_json.blank(self.text, at)
        if self.text.startswith("]", at):
            return "[]", at + 1
        while True:
            item, at = self._value(strict_json.blank(self.text, at), depth + 1)
            items.append(item)
            at, done = self._next(at, "]")
            if done:
                return "[" + ", ".join(items) + "]", at

    def _members(self, at: int, depth: int) -> tuple[str, int]:
        members: dict[str, str] = {}
        at = strict_json.blank(self.text, at)
        if self.text.startswith("}", at):
            return "{}", at + 1
        while True:
            at = strict_json.blank(self.text, at)
            key, at = self._key(at)
            if key in members:
                raise ValueError(f"the key {key[:40]!r} stands twice")
            at = strict_json.blank(self.text, at)
            if not self.text.startswith(":", at):
                raise ValueError(f"expected ':', found {self.text[at : at + 10]!r}")
            members[key], at = self._value(strict_json.blank(self.text, at + 1), depth + 1)
            at, done = self._next(at, "}")
            if done:
                return object_text(members), at

    def _key(self, at: int) -> tuple[str, int]:
        if self.text.startswith((self.quote, "'", '"'), at):
            return self._quoted(at)
        found = _KEY.match(self.text, at)
        if found is None:
            raise ValueError(f"expected a key, found {self.text[at : at + 10]!r}")
        return found[0].rstrip(), found.end()

    def _next(self, at: int, close: str) -> tuple[int, bool]:
        at = strict_json.blank(self.text, at)
        if self.text.startswith(close, at):
            return at + 1, True
        if not self.text.startswith(",", at):
            raise ValueError(f"expected ',' or {close!r}, found {self.text[at : at + 10]!r}")
        return at + 1, False


def object_text(members: dict[str, str]) -> str:
    """JSON text of an object, from its keys and the JSON texts of their values."""
    return "{" + ", ".join(f"{_json_text(key)}: {value}" for key, value in members.items()) + "}"


def _json_text(text: str) -> str:
    if not strict_json.encodable(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if not strict_json.encodable(text):
            raise ValueError("its text has a lone surrogate")
    return json.dumps(text, ensure_ascii=False)


def _unescape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return _LETTERS.get(match[4], match[0])
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise ValueError(f"{match[0]} is no character")
    return chr(code)
