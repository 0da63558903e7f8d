"""How a chat template prints tool calls, learnt from its render of probe calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from token_tracking import strict_json
from token_tracking.call_forms import CallForm, ElementForm, JsonForm, NamedForm
from token_tracking.call_scan import Markers
from token_tracking.parse import CompletionParser
from token_tracking.tokenizer import Tokenizer

if TYPE_CHECKING:
    from token_tracking.probe import Prober

_CONTENT = "qzcontentq"
_K1, _K2, _K3 = "qzkeyaq", "qzkeybq", "qzkeycq"
_V1, _V2, _V3 = "qzvalueaq", "qzvaluebq", "qzvaluecq"
_NAMES = ("qznameaq", "qznamebq")
_TEXT = ' qz "a" <b> & é\\n\n  {"k": [1]}, \n'
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


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the calls of a turn."""

    before_calls: str
    open: str
    close: str
    section_open: str | None
    section_close: str | None
    first: str
    """Text between the markers of the first call."""


def learn(
    prober: Prober,
    tokenizer: Tokenizer,
    pattern: re.Pattern[str],
    end_text: str | None,
    found: Markers,
) -> Markers:
    """`found` with the markers and the form of calls; as it is if they are not certain.

    Certain means: markers are single added tokens, and the parser gives back every probe call from its
    render.
    """
    for names in (_NAMES, (prober.tool_name, prober.tool_name)):
        calls = Call(names[0], {_K1: _V1, _K2: _V2}), Call(names[1], {_K3: _V3})
        shown = _printed(prober, calls, end_text)
        frame = None if shown is None else _frame(shown, calls, pattern)
        if shown is None or frame is None:
            continue
        form = _form(prober, calls[0], frame, end_text)
        if form is None:
            return found
        markers = msgspec.structs.replace(
            found,
            call_open=tokenizer.added_tokens[frame.open],
            call_close=tokenizer.added_tokens[frame.close],
            section_open=frame.section_open and tokenizer.added_tokens[frame.section_open],
            section_close=frame.section_close and tokenizer.added_tokens[frame.section_close],
            before_calls=frame.before_calls,
            form=form,
        )
        text = Call(names[0], {_K1: _TEXT})
        trials = (calls, (text,), (text, calls[1]), (Call(names[0], {}),))
        return markers if _proven(prober, tokenizer, markers, trials, end_text) else found
    return found


def _printed(prober: Prober, calls: Sequence[Call], end_text: str | None) -> str | None:
    """What stands after the content of a turn with these calls, up to the turn's end."""
    message = {
        "role": "assistant",
        "content": _CONTENT,
        "tool_calls": [call.wire(index) for index, call in enumerate(calls)],
    }
    text = prober.text([*prober.start(), message])
    if text is None or text.count(_CONTENT) != 1:
        return None
    return text.split(_CONTENT)[1].removesuffix(end_text or "")


def _frame(shown: str, calls: tuple[Call, Call], pattern: re.Pattern[str]) -> Frame | None:
    if any(shown.count(mark) != 1 for mark in (_K1, _V1, _K2, _V2, _K3, _V3)):
        return None
    first_end, second_end = shown.index(_V2) + len(_V2), shown.index(_V3) + len(_V3)
    names = (
        _name_at(shown, 0, shown.index(_K1), calls[0], 0),
        _name_at(shown, first_end, shown.index(_K3), calls[1], 1),
    )
    if names[0] is None or names[1] is None:
        return None
    before = [*pattern.finditer(shown, 0, names[0])]
    between = [*pattern.finditer(shown, first_end, names[1])]
    after = [*pattern.finditer(shown, second_end)]
    opening = _common([m[0] for m in reversed(before)], [m[0] for m in reversed(between)])
    if opening == 0 or len(between) == opening or len(before) > opening + 1:
        return None
    close = between[-opening - 1]
    closes = [index for index, match in enumerate(after) if match[0] == close[0]]
    if not closes or len(after) > closes[0] + 2:
        return None
    start = before[-opening]
    return Frame(
        before_calls=shown[: before[0].start()],
        open=start[0],
        close=close[0],
        section_open=before[0][0] if len(before) > opening else None,
        section_close=after[-1][0] if len(after) > closes[0] + 1 else None,
        first=shown[start.end() : close.start()],
    )


def _name_at(text: str, start: int, end: int, call: Call, index: int) -> int | None:
    """Where the name (the last one before `end`), or the id that holds it, begins."""
    held, found = text.rfind(call.id(index), start, end), text.rfind(call.name, start, end)
    if found < 0:
        return None
    return held if 0 <= held <= found < held + len(call.id(index)) else found


def _form(prober: Prober, call: Call, frame: Frame, end_text: str | None) -> CallForm | None:
    body = frame.first
    form = _json_form(body, call)
    if form is not None:
        return form
    at = _name_at(body, 0, body.index(_K1), call, 0)
    if at is None:
        return None
    by_id = body.startswith(call.id(0), at)
    end = at + len(call.id(0) if by_id else call.name)
    if call.id(0) in body and not by_id:
        return None
    for start in (match.start() for match in re.finditer(r"\{", body[: body.index(_K1)])):
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
    return None if by_id else _element_form(prober, call, body, at, frame, end_text)


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


def _element_form(
    prober: Prober, call: Call, body: str, name: int, frame: Frame, end_text: str | None
) -> ElementForm | None:
    empty = _body(_printed(prober, [Call(call.name, {})], end_text), frame)
    if empty is None or not empty.startswith(body[:name] + call.name):
        return None
    # Four texts that the template prints between what is known, of four unknown parts.
    ahead = body[name + len(call.name) : body.index(_K1)]  # after_name + before_key
    amid = body[body.index(_V1) + len(_V1) : body.index(_K2)]  # after_value + before_key
    final = body[body.index(_V2) + len(_V2) :]  # after_value + end
    alone = empty[name + len(call.name) :]  # after_name + end
    after_name = _whole_words(ahead[: _common(ahead, alone)])
    before_key, end = ahead[len(after_name) :], alone[len(after_name) :]
    after_value = amid.removesuffix(before_key)
    if not before_key.strip() or amid == after_value or final != after_value + end or not after_value.strip():
        return None
    form = ElementForm(
        before_name=body[:name],
        after_name=after_name,
        before_key=before_key,
        after_key=body[body.index(_K1) + len(_K1) : body.index(_V1)],
        after_value=after_value,
        end=end,
    )
    words: dict[str, str] = {}
    for word, value in _WORDS:
        one = _body(_printed(prober, [Call(call.name, {_K1: value})], end_text), frame)
        start = form.before_name + call.name + after_name + before_key + _K1 + form.after_key
        if one is not None and one.startswith(start) and one.endswith(after_value + end):
            words[one.removeprefix(start).removesuffix(after_value + end)] = word
    own = {text: word for text, word in words.items() if text != word and text}
    return msgspec.structs.replace(form, words=own)


def _body(shown: str | None, frame: Frame) -> str | None:
    if shown is None or shown.count(frame.open) != 1 or shown.count(frame.close) != 1:
        return None
    return shown.split(frame.open)[1].split(frame.close)[0]


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """How long the common start is."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _whole_words(text: str) -> str:
    """`text` without the beginning of a mark at its end (`>` and the `<` of what comes next)."""
    whole = re.match(r"(?s).*[\s>\])}\"']", text)
    return whole[0] if whole else text if text.isalnum() else ""


def _proven(
    prober: Prober,
    tokenizer: Tokenizer,
    markers: Markers,
    trials: Sequence[Sequence[Call]],
    end_text: str | None,
) -> bool:
    """Whether parsing gives back what was printed; renders that the template refuses prove nothing."""
    unprefilled = msgspec.structs.replace(markers, prefilled=False)
    parser = CompletionParser(tokenizer, unprefilled, frozenset())
    for calls in trials:
        shown = _printed(prober, calls, end_text)
        if shown is None:
            continue
        parsed = parser.parse(tokenizer.encode(_CONTENT + shown))
        if parsed.error is not None or parsed.content != _CONTENT:
            return False
        if [(c.name, strict_json.read(c.arguments)) for c in parsed.tool_calls] != [
            (c.name, c.arguments) for c in calls
        ]:
            return False
    return True
