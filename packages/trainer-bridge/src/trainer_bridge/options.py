"""`check_options`: whether what was given for options is what their annotations allow.

Misspelt choices (`commit_on="checkpoints"`) would otherwise do nothing, or something else, hours later.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainer_bridge.errors import BridgeError

_WORDS = {
    bool: ("True", "False"),
    int: ("an int",),
    float: ("a number",),
    str: ("a str",),
    type(None): ("None",),
}


def check_options(owner: Callable[..., Any], values: Mapping[str, object], error: type[BridgeError]) -> None:
    """Compare values with the annotations of a class's fields or a function's parameters.

    Understood are `Literal`, `bool`, `int`, `float` (whole numbers too, NaN not), `str`, `None`, unions of
    them, and classes. A truth value is no number. numpy's integers are none of Python's: the wire cannot
    carry them.

    Args:
        owner: the class or function.
        values: by name; each name is one of the owner's.
        error: what to raise.

    Raises:
        BridgeError: of the type `error`, with the name, the value and what can be given.
    """
    hints = _hints(owner)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise error(f"{name} is {_shown(value)}: give {described(hints[name])}")


def described(hint: Any) -> str:
    """What an annotation allows, in words."""
    *others, last = _allowed(hint)
    return f"{', '.join(others)} or {last}" if others else last


def _allowed(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [repr(choice) for choice in get_args(hint)]
    if get_origin(hint) in (Union, types.UnionType):
        return [word for each in get_args(hint) for word in _allowed(each)]
    return [*_WORDS.get(hint, (f"a {hint.__name__}",))]


@cache
def _hints(owner: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(owner)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint)


def _shown(value: object) -> str:
    known = isinstance(value, str | int | float | None)
    return repr(value) if known else f"{value!r} ({type(value).__module__}.{type(value).__qualname__})"
