"""Joints: the fixed text between the contents of two neighbouring messages, with slots for their fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from token_tracking.control import ControlTokens
from token_tracking.messages import Message

GENERATE = "generate"
"""Stands for the generation prompt where a role stands otherwise."""
CALLS = "calls"
"""Stands for an assistant turn with tool calls; `assistant` is one without."""
STARTS = ("assistant", CALLS)

Hole = Literal["verbatim", "stripped", "left stripped", "right stripped", "in JSON"]
PRINTS: dict[Hole, Callable[[str], str]] = {
    "verbatim": lambda text: text,
    "stripped": str.strip,
    "left stripped": str.lstrip,
    "right stripped": str.rstrip,
    # As `tojson` writes it, without the quotes, which are the template's.
    "in JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
}
"""How a content is printed."""

Source = Literal["tool_call_id", "name", "call by id", "call by place", "first call", "last call"]
_PLAIN = re.compile(r"[A-Za-z0-9_.:/-]+")


class Slot(msgspec.Struct, frozen=True):
    """A place in a joint where something other than a content is printed."""

    source: Source
    """A field of a tool result, or the name of a call of the turn that the results answer."""
    of: Literal["next", "previous"]
    """The tool result that stands after the joint, or before it."""

    def value(self, assistant: Message, results: Sequence[Message], place: int) -> str | None:
        """What is printed for the result at `place`; None if it is not a plain word, or not certain."""
        if self.source in ("tool_call_id", "name"):
            value = results[place].get(self.source)
        else:
            calls = assistant.get("tool_calls")
            value = _name(self._call(calls, results[place], place)) if calls else None
        return value if isinstance(value, str) and _PLAIN.fullmatch(value) else None

    def _call(self, calls: Sequence[Mapping[str, Any]], result: Message, place: int) -> Mapping[str, Any]:
        match self.source:
            case "first call":
                return calls[0]
            case "last call":
                return calls[-1]
            case "call by place":
                return calls[place] if place < len(calls) else {}
            case _:
                found = [call for call in calls if call.get("id") == result.get("tool_call_id")]
                return found[0] if len(found) == 1 else {}


def _name(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    return cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None


class Joint(msgspec.Struct, frozen=True):
    """Fixed text between the contents of two neighbouring messages."""

    text: str
    """With slots, these in braces."""
    lead: str
    """Up to the first control token: encoded together with the content before it."""
    ids: tuple[int, ...]
    """From the first control token to the last before any slot, whatever the contents are."""
    tail: str
    """After the last control token: encoded together with the content that follows."""
    parts: tuple[str, ...] = ()
    """The text between the slots; empty if there are none."""
    slots: tuple[Slot, ...] = ()

    def fill(self, values: Sequence[str]) -> str:
        """The text with values for its slots."""
        pieces = [self.parts[0]]
        for value, part in zip(values, self.parts[1:], strict=True):
            pieces += (value, part)
        return "".join(pieces)


def joint(text: str, control: ControlTokens, fields: Mapping[str, Slot] | None = None) -> Joint:
    """Take text between two contents apart; `fields` are sentinel words in it and what they stand for."""
    parts, slots = [text], list[Slot]()
    if fields:
        pieces = re.split("(" + "|".join(map(re.escape, fields)) + ")", text)
        parts, slots = pieces[::2], [fields[word] for word in pieces[1::2]]
        names = [f"{{{slot.source} of {slot.of}}}" for slot in slots]
        text = "".join(piece for pair in zip(parts, [*names, ""], strict=True) for piece in pair)
    found = list(control.find(parts[0]))
    kept = (tuple(parts), tuple(slots)) if slots else ((), ())
    if not found:
        return Joint(text, text, (), "", *kept)
    (start, _), (_, end) = found[0], found[-1]
    ids = tuple(control.tokenizer.encode(parts[0][start:end]))
    return Joint(text, parts[0][:start], ids, text[end:], *kept)
