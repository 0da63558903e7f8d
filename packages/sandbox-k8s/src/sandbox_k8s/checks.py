"""Whether what Python gave is what the annotations say, which msgspec asks of decoded values alone.

A misspelt choice would otherwise be taken for another one, and a wrong type would end in a `TypeError` far
from where it was written.
"""

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from .errors import CommandRefusedError, ConfigError

_WORDS: dict[Any, str] = {
    bool: "True or False",
    float: "a number",
    bytes: "bytes",
    type(None): "None",
    Any: "anything",
}
_LONGEST = 80
_Misfit = tuple[str, object, Any]


def check_fields(settings: msgspec.Struct) -> None:
    """Compare the fields of a configuration with their annotations; for ``__post_init__``.

    Raises:
        ConfigError: A field has another type, or is none of the choices; the message says what it can be.
    """
    kind = type(settings)
    for name, hint in _hints(kind).items():
        check_value(f"{kind.__name__}.{name}", getattr(settings, name), hint)


def check_value(what: str, value: object, hint: Any) -> None:
    """Compare a value with an annotation.

    Understood are classes, `Literal`, unions, ``tuple[X, ...]``, mappings, sequences and `Any`. A truth value
    is no number, a number that is NaN is none, and a whole number does for a float.

    Args:
        what: Names the value in the message.
        value: What was given.
        hint: The annotation.

    Raises:
        ConfigError: It does not fit.
    """
    wrong = _misfit(value, hint)
    if wrong is not None:
        place, found, wanted = wrong
        raise ConfigError(f"{what}{place} is {_shown(found)}: give {_in_words(wanted)}")


def check_command(command: object, timeout_s: object, stdin: object) -> None:
    """Compare the arguments of `Sandbox.execute` with what can be run.

    Raises:
        ConfigError: One has another type, or the time-out is negative.
        CommandRefusedError: The command has no word.
    """
    check_value("the command", command, str | Sequence[str])
    check_value("stdin", stdin, bytes | bytearray | memoryview | None)
    check_timeout(timeout_s)
    if not isinstance(command, str) and not command:
        raise CommandRefusedError("the command is an empty list; its first word is the program")


def check_timeout(timeout_s: object) -> None:
    """Compare the time-out of a command with what can be waited for.

    Raises:
        ConfigError: It is no number, or negative.
    """
    check_value("timeout_s", timeout_s, float | None)
    if isinstance(timeout_s, int | float) and timeout_s < 0:
        raise ConfigError(f"timeout_s must not be negative, got {timeout_s}; None waits for ever")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _misfit(value: object, hint: Any) -> _Misfit | None:
    """Where in the value, what is there, and what should be; None when it fits."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        tried = [_misfit(value, each) for each in inside]
        if None in tried:
            return None
        # The part of a collection that does not fit tells more than that the collection is not None.
        return next((one for one in tried if one is not None and one[0]), ("", value, hint))
    if origin is None or origin is Literal:
        return None if _fits(value, hint) else ("", value, hint)
    if isinstance(value, str | bytes) or not isinstance(value, (list, tuple) if origin is tuple else origin):
        return "", value, hint
    held = cast("Any", value)
    parts = _members(held, inside) if isinstance(value, Mapping) else _items(held, inside)
    wrong = ((where, _misfit(each, wanted)) for where, each, wanted in parts)
    return next(((where + one[0], *one[1:]) for where, one in wrong if one is not None), None)


def _members(value: Mapping[Any, Any], inside: tuple[Any, ...]) -> Iterator[_Misfit]:
    for key, held in value.items():
        yield ", one of its keys,", key, inside[0]
        yield f"[{key!r}]", held, inside[1]


def _items(value: Any, inside: tuple[Any, ...]) -> Iterator[_Misfit]:
    for number, held in enumerate(value):
        yield f"[{number}]", held, inside[0]


def _fits(value: object, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    *others, last = _allowed(hint)
    return f"{', '.join(others)} or {last}" if others else last


def _allowed(hint: Any) -> list[str]:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [repr(choice) for choice in inside]
    if origin in (Union, types.UnionType):
        return [word for each in inside for word in _allowed(each)]
    if origin is not None:
        held = " to ".join(_in_words(each).removeprefix("a ") for each in inside if each is not ...)
        return [f"a {origin.__name__.lower()} of {held}"]
    return [_WORDS.get(hint) or _with_article(hint.__name__)]


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _shown(value: object) -> str:
    """A plain value as it is; of others the type, as they may be long."""
    if isinstance(value, str | int | float | None):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"of type {type(value).__qualname__}"
