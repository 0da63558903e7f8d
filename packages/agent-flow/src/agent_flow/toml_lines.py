"""The line of every key of a TOML text, for error messages; `tomllib` keeps none."""

from __future__ import annotations

import bisect
import re
import tomllib
from typing import cast

Keys = tuple[str | int, ...]
"""The way to a value: names of tables and keys, and places in lists from zero."""

_SPACE = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})|' + r"'''.*?'''(?:'{0,2})|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def toml_lines(text: str) -> dict[Keys, int]:
    """Every table, key and list item with its line, from one.

    Args:
        text: A text that `tomllib` has accepted; of any other the answer means nothing.
    """
    scan = _Scan(text)
    scan.document()
    return scan.lines


class _Scan:
    """One walk over a text that is known to be TOML, so that nothing has to be checked again."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._ends = [match.start() for match in re.finditer("\n", self._text)]
        self._items: dict[Keys, int] = {}
        """How many tables an array of tables has so far."""
        self.lines: dict[Keys, int] = {}

    def document(self) -> None:
        table: Keys = ()
        before = -1
        while self._skip() and self._at > before:  # in a text that is not TOML a step may lead nowhere
            before = self._at
            if self._take("[["):
                table = self._resolved(self._key())
                number = self._items[table] = self._items.get(table, 0) + 1
                self._note(table, first=True)
                table = (*table, number - 1)
                self._note(table)
                self._skip()
                self._take("]]")
            elif self._take("["):
                table = self._resolved(self._key())
                self._note(table)
                self._skip()
                self._take("]")
            else:
                self._pair(table)

    def _resolved(self, header: Keys) -> Keys:
        """The way a header means: through the last table of each array of tables before its end."""
        way: Keys = ()
        for place, key in enumerate(header):
            way = (*way, key)
            if way in self._items and place < len(header) - 1:
                way = (*way, self._items[way] - 1)
        return way

    def _pair(self, table: Keys) -> None:
        way = (*table, *self._key())
        self._note(way)
        self._skip()
        self._take("=")
        self._value(way)

    def _value(self, way: Keys) -> None:
        self._skip()
        if self._take("["):
            number = 0
            while self._skip() and not self._take("]"):
                self._note((*way, number))
                self._value((*way, number))
                number += 1
                self._skip()
                if not self._take(",") and not self._text.startswith("]", self._at):
                    return
        elif self._take("{"):
            while self._skip() and not self._take("}"):
                self._pair(way)
                self._skip()
                if not self._take(",") and not self._text.startswith("}", self._at):
                    return
        else:
            if not self._match(_STRING):
                self._match(_SCALAR)

    def _key(self) -> Keys:
        parts: list[str] = []
        while True:
            self._skip()
            quoted = self._match(_STRING)
            parts.append(_unquoted(quoted) if quoted else self._match(_BARE_KEY))
            self._skip()
            if not self._take("."):
                return tuple(parts)

    def _note(self, way: Keys, *, first: bool = False) -> None:
        line = bisect.bisect_left(self._ends, self._at) + 1
        for end in range(1, len(way)):
            self.lines.setdefault(way[:end], line)
        if first:
            self.lines.setdefault(way, line)
        else:
            self.lines[way] = line

    def _skip(self) -> bool:
        """Go over space, line ends and comments; whether there is anything more."""
        self._match(_SPACE)
        return self._at < len(self._text)

    def _take(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match.group()


def _unquoted(key: str) -> str:
    try:
        return cast("str", tomllib.loads(f"k={key}")["k"])
    except tomllib.TOMLDecodeError:  # the text is not TOML, and nobody will ask for this key
        return key
