"""Exact Python values in the fields of a `Sample` and its turns: a codec refuses NumPy's scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from token_tracking.errors import SampleError
from token_tracking.scalars import plain_bool, plain_float, plain_int, plain_text


class Field(NamedTuple):
    """What a field may hold."""

    exact: frozenset[type]
    """Types that are held as they come."""
    plain: Callable[[object], object]
    """Gives the exact value; None: it has none."""
    need: str
    words: frozenset[str] = frozenset()
    """The only values it may have; none: any of its types."""


WHOLE = Field(frozenset({int}), plain_int, "an int")
WHOLE_OR_NONE = Field(frozenset({int, type(None)}), plain_int, "an int or None")
NUMBER_OR_NONE = Field(frozenset({float, type(None)}), plain_float, "a finite number or None")
TEXT = Field(frozenset({str}), plain_text, "a str")
TRUTH = Field(frozenset({bool}), plain_bool, "a bool")


def one_of(choices: tuple[str, ...]) -> Field:
    """A field that holds one of some words."""

    def plain(value: object) -> object:
        text = plain_text(value)
        return text if text in choices else None

    return Field(frozenset({str}), plain, f"one of {', '.join(choices)}", frozenset(choices))


def hold_exact(struct: msgspec.Struct, fields: Mapping[str, Field]) -> None:
    """Replace what is not of an exact type by the value that is.

    Raises:
        SampleError: there is none.
    """
    for name, field in fields.items():
        value = getattr(struct, name)
        if type(value) not in field.exact or (field.words and value not in field.words):
            plain = field.plain(value)
            if plain is None:
                raise SampleError(f"{name} is {value!r:.80}: need {field.need}")
            msgspec.structs.force_setattr(struct, name, plain)
