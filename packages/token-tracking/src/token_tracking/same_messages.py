"""Whether messages say the same: a harness's history beside the one that is held."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import is_
from typing import Any, cast

from token_tracking.errors import TemplateError, UnsupportedContentError
from token_tracking.messages import Message, own, with_arguments


def same(left: Message, right: Message) -> bool:
    """Whether two messages, as `own` gives them, say the same.

    A field that is absent, None, an empty string or an empty list is one and the same; tool-call arguments
    are compared as JSON values, so that a harness may hand back an object where the model wrote text. JSON
    values are compared with their types: a template prints `1`, `1.0` and `true` as three things.
    """
    return _equal(left, right) or _equal(_canonical(left), _canonical(right))


def one_form(message: Message) -> str:
    """A text that all messages have which are the `same` as this one, and no other."""
    return json.dumps(_canonical(message), sort_keys=True)


def _canonical(message: Message) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None and value not in ("", [])}
    if "tool_calls" in fields:
        fields["tool_calls"] = with_arguments(message, "object")["tool_calls"]
    return fields


def _equal(left: Any, right: Any) -> bool:
    """Whether two plain JSON values are equal, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        fields, others = cast("dict[str, Any]", left), cast("dict[str, Any]", right)
        return len(fields) == len(others) and all(
            key in others and _equal(value, others[key]) for key, value in fields.items()
        )
    if isinstance(left, list):
        items = cast("list[Any]", left)
        return len(items) == len(right) and all(map(_equal, items, right))
    # As text, NaN equals itself and 0.0 is not -0.0.
    return repr(left) == repr(right) if isinstance(left, float) else left == right


class Numbered:
    """Which of the messages that a branch holds have a number in them, found once for each message."""

    def __init__(self) -> None:
        self._seen: list[Message] = []
        self._at: list[int] = []

    def among(self, held: Sequence[Message]) -> Sequence[int]:
        """Positions in `held`; a held message is never changed in place, so that its identity is enough."""
        known = len(self._seen)
        if known > len(held) or not all(map(is_, self._seen, held)):
            self._seen, self._at, known = [], [], 0
        new = held[known:]
        self._seen += new
        self._at += [at for at, message in enumerate(new, known) if _holds_number(message)]
        return self._at


def _holds_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_number, cast("dict[str, Any]", value).values()))
    if isinstance(value, list):
        return any(map(_holds_number, cast("list[Any]", value)))
    return isinstance(value, (int, float))


def common_prefix(held: Sequence[Message], messages: Sequence[Message], numbered: Numbered) -> int:
    """How many messages at the start of both lists are the same.

    Args:
        held: all messages of a branch, as `own` gives them.
        messages: from a harness; the first one that cannot be held is not the same.
        numbered: of the branch.
    """
    shared = min(len(held), len(messages))
    given = list(messages[:shared])
    # Python's comparison takes 1 for true and for 1.0, and these few messages are compared again.
    again = [at for at in numbered.among(held) if at < shared]
    # The usual case, an unchanged history, is one comparison of lists (0.2 us a message); dictionaries can be
    # changed in place, so that the identity of a harness's message proves nothing.
    if _compare_equal(list(held[:shared]), given) and all(_same(held[at], given[at], at) for at in again):
        return shared
    retyped = set(again)
    for index, (mine, message) in enumerate(zip(held, given, strict=False)):
        alike = index not in retyped and _compare_equal([mine], [message])
        if not alike and not _same(mine, message, index):
            return index
    return shared


def _compare_equal(held: list[Message], given: list[Any]) -> bool:
    if not {dict}.issuperset(map(type, given)):
        return False
    try:
        return given == held
    except Exception:  # a value that does not compare (an array of numpy or torch): `own` refuses it by name
        return False


def _same(held: Message, given: Message, index: int) -> bool:
    try:
        (found,) = own([given], index)
    except (TemplateError, UnsupportedContentError):
        return False  # refused by name where it is asked to be held
    return same(held, found)
