"""The form in which a template prints one tool call, derived from the texts of probe calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from token_tracking.parsing import strict_json
from token_tracking.parsing.call_forms import ArgumentsForm, CallForm, ElementForm, JsonForm, NamedForm
from token_tracking.parsing.literal_form import LiteralForm
from token_tracking.parsing.tool_call import ToolCall

K1, K2, K3 = "qzkeyaq", "qzkeybq", "qzkeycq"
V1, V2, V3 = "qzvalueaq", "qzvaluebq", "qzvaluecq"
NAMES = ("qznameaq", "qznamebq")
_NUMBER = 7155173
_WORDS = (("true", True), ("false", False), ("null", None))


class Call(msgspec.Struct, frozen=True):
    """A probe call."""

    name: str
    arguments: Mapping[str, Any]

    def wire(self, index: int) -> dict[str, Any]:
        """In the usual chat form."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id(index), "type": "function", "function": function}

    def id(self, index: int) -> str:
        """In the form that Kimi wants; other templates print it as it is, or not at all."""
        return f"functions.{self.name}:{index}"


BodyOf = Callable[[Sequence[Call]], str | None]
"""The text between the markers for some calls; None: the template refused, or printed no such text."""


def name_at(text: str, start: int, end: int, call: Call, index: int) -> int | None:
    """Where the name (the last one before `end`), or the id that holds it, begins."""
    held, found = text.rfind(call.id(index), start, end), text.rfind(call.name, start, end)
    if found < 0:
        return None
    return held if 0 <= held <= found < held + len(call.id(index)) else found


def form_of(calls: tuple[Call, Call], body_of: BodyOf, *, listed: bool = False) -> CallForm | None:
    """The form of the first of two calls, which has the arguments `K1` and `K2`; None: none that is known.

    Args:
        calls: what was printed.
        body_of: prints others.
        listed: several calls stand between one pair of markers.
    """
    call = calls[0]
    body = body_of([call])
    if body is None or K1 not in body:
        return None
    form = None if listed else _json_form(body, call)
    if form is not None:
        return form
    at = name_at(body, 0, body.index(K1), call, 0)
    if at is None:
        return None
    by_id = body.startswith(call.id(0), at)
    end = at + len(call.id(0) if by_id else call.name)
    if call.id(0) in body and not by_id:
        return None
    for start in () if listed else (m.start() for m in re.finditer(r"\{", body[: body.index(K1)])):
        try:
            value, stop = strict_json.read_at(body, start)
        except ValueError:
            continue
        if value == call.arguments and start >= end:
            return NamedForm(
                before_name=body[:at],
                after_name=body[end:start],
                after_arguments=body[stop:],
                name_is_id=by_id,
            )
    if by_id:
        return None
    if not listed and (elements := _element_form(call, body, at, body_of)) is not None:
        return elements
    return _literal_form(calls, body, at, body_of, listed=listed)


def arguments_form(call: Call, body: str) -> ArgumentsForm | None:
    """The form of a text that is nothing but the arguments."""
    try:
        return ArgumentsForm() if strict_json.read(body) == call.arguments else None
    except ValueError:
        return None


def common(left: Sequence[str], right: Sequence[str]) -> int:
    """How long the common start is."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def same(found: Sequence[ToolCall], calls: Sequence[Call]) -> bool:
    """Whether calls that were read are those that were printed."""
    return [(c.name, strict_json.read(c.arguments)) for c in found] == [(c.name, c.arguments) for c in calls]


def _json_form(body: str, call: Call) -> JsonForm | None:
    try:
        members = strict_json.members(body)
    except ValueError:
        return None
    fields = {value if isinstance(value, str) else "": key for key, (value, _) in members.items()}
    arguments = [key for key, (value, _) in members.items() if value == call.arguments]
    if call.name not in fields or len(arguments) != 1:
        return None
    return JsonForm(
        name_field=fields[call.name], arguments_field=arguments[0], id_field=fields.get(call.id(0))
    )


def _element_form(call: Call, body: str, name: int, body_of: BodyOf) -> ElementForm | None:
    empty = body_of([Call(call.name, {})])
    if empty is None or not empty.startswith(body[:name] + call.name):
        return None
    # Four texts that the template prints between what is known, of four unknown parts.
    ahead = body[name + len(call.name) : body.index(K1)]  # after_name + before_key
    amid = body[body.index(V1) + len(V1) : body.index(K2)]  # after_value + before_key
    final = body[body.index(V2) + len(V2) :]  # after_value + end
    alone = empty[name + len(call.name) :]  # after_name + end
    after_name = _whole_words(ahead[: common(ahead, alone)])
    before_key, end = ahead[len(after_name) :], alone[len(after_name) :]
    after_value = amid.removesuffix(before_key)
    if not before_key.strip() or amid == after_value or final != after_value + end or not after_value.strip():
        return None
    form = ElementForm(
        before_name=body[:name],
        after_name=after_name,
        before_key=before_key,
        after_key=body[body.index(K1) + len(K1) : body.index(V1)],
        after_value=after_value,
        end=end,
    )
    words: dict[str, str] = {}
    for word, value in _WORDS:
        one = body_of([Call(call.name, {K1: value})])
        start = form.before_name + call.name + after_name + before_key + K1 + form.after_key
        if one is not None and one.startswith(start) and one.endswith(after_value + end):
            words[one.removeprefix(start).removesuffix(after_value + end)] = word
    own = {text: word for text, word in words.items() if text != word and text}
    return msgspec.structs.replace(form, words=own)


def _literal_form(
    calls: tuple[Call, Call], body: str, name: int, body_of: BodyOf, *, listed: bool
) -> LiteralForm | None:
    numbered = body_of([Call(calls[0].name, {K1: _NUMBER})])
    if numbered is None or numbered.count(K1) != 1 or numbered.count(str(_NUMBER)) != 1:
        return None
    assign = numbered[numbered.index(K1) + len(K1) : numbered.index(str(_NUMBER))]
    quoted = body[body.index(K1) + len(K1) : body.index(V1)]
    quote = quoted.removeprefix(assign)
    amid = body[body.index(V1) + len(V1) : body.index(K2)]
    final = body[body.index(V2) + len(V2) :]
    if not quote.strip() or not assign.strip() or quoted == quote:
        return None
    if not (amid.startswith(quote) and final.startswith(quote)):
        return None
    # A backslash and a quote, as a text with escapes would not hold them.
    probe = f"qz{quote}q\\q"
    text = body_of([Call(calls[0].name, {K1: probe})])
    form = LiteralForm(
        before_name=body[:name],
        open=body[name + len(calls[0].name) : body.index(K1)],
        assign=assign,
        separator=amid.removeprefix(quote),
        close=final.removeprefix(quote),
        quote=quote,
        escaped=quote in {"'", '"'} and text is not None and probe not in text,
    )
    return _listed(form, calls, body_of) if listed else form


def _listed(form: LiteralForm, calls: tuple[Call, Call], body_of: BodyOf) -> LiteralForm | None:
    """`form` with what stands around and between the calls of a list."""
    both = body_of(calls)
    if both is None or both.count(V2) != 1 or both.count(calls[1].name) != 1:
        return None
    between = both[both.index(V2) + len(V2) : both.index(calls[1].name)].removeprefix(form.quote)
    close = form.close[: common(form.close, between)]
    return msgspec.structs.replace(
        form,
        before_name="",
        close=close,
        list_open=form.before_name,
        list_separator=between.removeprefix(close),
        list_close=form.close.removeprefix(close),
    )


def _whole_words(text: str) -> str:
    """`text` without the beginning of a mark at its end (`>` and the `<` of what comes next)."""
    whole = re.match(r"(?s).*[\s>\])}\"']", text)
    return whole[0] if whole else text if text.isalnum() else ""
