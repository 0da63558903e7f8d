"""JSON that a model wrote, read strictly: bounded depth, finite numbers, no key twice, nothing evaluated."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

MAX_NESTING = 64
"""Deepest arrays and objects that are accepted; reading takes no more stack than that."""

_SHAPE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]|"', re.DOTALL)


def read(text: str) -> Any:
    """The value that is all of `text`, blanks around it aside.

    Raises:
        ValueError: it is not JSON, or nested too deeply, or has a number without finite value or a key twice.
    """
    value, end = read_at(text, blank(text, 0))
    end = blank(text, end)
    if end != len(text):
        raise ValueError(f"text after the value: {text[end : end + 20]!r}")
    return value


def read_at(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends.

    Raises:
        ValueError: as `read`.
    """
    if _nested_too_deeply(text, at):
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    return _DECODER.raw_decode(text, at)


def members(text: str) -> dict[str, tuple[Any, str]]:
    """Key to (value, its text as written) of the JSON object that is all of `text`.

    Raises:
        ValueError: as `read`, or it is no object.
    """
    at = blank(text, 0)
    if _nested_too_deeply(text, at):
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    found: dict[str, tuple[Any, str]] = {}
    at = blank(text, _expect(text, at, "{"))
    if text[at : at + 1] == "}":
        return _all_of(text, at + 1, found)
    while True:
        key, at = _DECODER.raw_decode(text, blank(text, at))
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        start = blank(text, _expect(text, blank(text, at), ":"))
        value, end = _DECODER.raw_decode(text, start)
        found[key] = (value, text[start:end])
        at = blank(text, end)
        if text[at : at + 1] != ",":
            return _all_of(text, _expect(text, at, "}"), found)
        at += 1


def balanced_end(text: str, at: int) -> int:
    """Where the brackets that open at `at` are all closed, whatever stands in them; -1: nowhere."""
    depth = 0
    for match in _SHAPE.finditer(text, at):
        first = match[0][0]
        depth += (first in "[{") - (first in "]}")
        if match[0] == '"' or depth < 0:
            return -1
        if depth == 0 and first in "]}":
            return match.end()
    return -1


def encodable(text: str) -> bool:
    """Whether `text` has a UTF-8 form: JSON can spell a lone surrogate, which no tokenizer takes."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def blank(text: str, at: int) -> int:
    """The first position from `at` on that is not a JSON blank."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _all_of(text: str, at: int, found: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    at = blank(text, at)
    if at != len(text):
        raise ValueError(f"text after the object: {text[at : at + 20]!r}")
    return found


def _nested_too_deeply(text: str, at: int) -> bool:
    """Whether the value at `at` is; the text after it is not looked at."""
    if text[at : at + 1] not in {"[", "{"}:
        return False
    depth = 0
    for match in _SHAPE.finditer(text, at):
        if match[0] == '"':
            return False  # a string without end: reading stops there
        first = match[0][0]
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_NESTING:
            return True
        if depth == 0 and first != '"':
            return False
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        often = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {next(key for key in often if often[key] > 1)!r} stands twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r} at {at}, found {text[at : at + 10]!r}")
    return at + 1


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
