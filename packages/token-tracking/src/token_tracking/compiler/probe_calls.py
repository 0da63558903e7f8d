"""How a chat template prints tool calls, learnt from its render of probe calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from token_tracking.compiler import probe_headers
from token_tracking.compiler.probe_forms import (
    K1,
    K2,
    K3,
    NAMES,
    V1,
    V2,
    V3,
    Call,
    common,
    form_of,
    name_at,
    same,
)
from token_tracking.parsing.call_forms import JsonForm
from token_tracking.parsing.literal_form import LiteralForm
from token_tracking.parsing.markers import Markers
from token_tracking.parsing.parse import CompletionParser
from token_tracking.tokenizer import Tokenizer

if TYPE_CHECKING:
    from token_tracking.compiler.probe import Prober

_CONTENT = "qzcontentq"
_TEXT = ' qz "a" <b> & é\\n\n  {"k": [1]}, \n'
_TYPED = {K1: [1, "a", {"k": None}], K2: {"k": "é"}, K3: True}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the calls of a turn."""

    before_calls: str
    open: str
    close: str
    section_open: str | None
    section_close: str | None
    listed: bool = False
    """All calls of the turn stand between one pair of markers."""


class Printer:
    """Prints the calls of a turn, alone or after its content."""

    def __init__(self, prober: Prober, end_text: str | None):
        self._prober = prober
        self._end_text = end_text or ""
        self._prompt = prober.text(prober.start(), generate=True) or ""
        self.content = _CONTENT
        """Content of the turn, which the calls follow; empty: the turn is calls alone."""

    def print(self, calls: Sequence[Call]) -> str | None:
        """What stands after the content, up to the turn's end; None: the template refused, or hid it."""
        text = self.turn(self.content, calls)
        if text is None or not self.content:
            return text
        return text.split(_CONTENT)[1] if text.count(_CONTENT) == 1 else None

    def turn(self, content: str, calls: Sequence[Call]) -> str | None:
        """A turn as printed after the generation prompt, up to its end."""
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [call.wire(index) for index, call in enumerate(calls)],
        }
        text = self._prober.text([*self._prober.start(), message])
        return None if text is None else text[common(self._prompt, text) :].removesuffix(self._end_text)


def learn(
    prober: Prober,
    tokenizer: Tokenizer,
    pattern: re.Pattern[str],
    end_text: str | None,
    found: Markers,
) -> Markers:
    """`found` with the markers and the form of calls; as it is if they are not certain.

    Certain means: markers are single added tokens, or the turn is a call and nothing else, and the parser
    gives back every probe call from its render.
    """
    for names in (NAMES, (prober.tool_name, prober.tool_name)):
        calls = Call(names[0], {K1: V1, K2: V2}), Call(names[1], {K3: V3})
        printer = Printer(prober, end_text)
        follows = _call_follows_content(printer, calls[0])
        printer.content = _CONTENT if follows else ""
        markers = _between_tokens(printer, tokenizer, pattern, calls, found) or (
            None if follows else _bare(printer, pattern, calls, found)
        )
        if markers is None:
            continue
        text = Call(names[0], {K1: _TEXT})
        trials = [calls, (calls[0],), (text,), (text, calls[1]), (Call(names[0], {}),)]
        if isinstance(markers.form, LiteralForm):
            trials.append((Call(names[0], _TYPED), text))
        return markers if _proven(printer, tokenizer, markers, trials) else found
    return probe_headers.learn(prober, tokenizer, pattern, found) or found


def _call_follows_content(printer: Printer, call: Call) -> bool:
    text = printer.turn(_CONTENT, [call])
    return text is not None and text.count(_CONTENT) == 1 and text.index(_CONTENT) < text.find(V1)


def _between_tokens(
    printer: Printer,
    tokenizer: Tokenizer,
    pattern: re.Pattern[str],
    calls: tuple[Call, Call],
    found: Markers,
) -> Markers | None:
    shown = printer.print(calls)
    frame = None if shown is None else _frame(shown, calls, pattern)
    if frame is None:
        return None

    def body_of(some: Sequence[Call]) -> str | None:
        text = printer.print(some)
        if text is None or text.count(frame.open) != 1 or text.count(frame.close) != 1:
            return None
        return text.split(frame.open)[1].split(frame.close)[0]

    form = form_of(calls, body_of, listed=frame.listed)
    if form is None:
        return None
    content_after = False
    if not printer.content:
        turn = printer.turn(_CONTENT, calls)
        content_after = turn is not None and turn.rfind(frame.close) < turn.find(_CONTENT)
    return msgspec.structs.replace(
        found,
        call_open=tokenizer.added_tokens[frame.open],
        call_close=tokenizer.added_tokens[frame.close],
        section_open=frame.section_open and tokenizer.added_tokens[frame.section_open],
        section_close=frame.section_close and tokenizer.added_tokens[frame.section_close],
        before_calls=frame.before_calls,
        content_after_calls=content_after,
        form=form,
    )


def _bare(
    printer: Printer, pattern: re.Pattern[str], calls: tuple[Call, Call], found: Markers
) -> Markers | None:
    """Markers of a template whose turn with a call is the call; it may refuse several."""
    text = printer.print(calls[:1])
    if text is None or pattern.search(text):
        return None
    form = form_of(calls, printer.print)
    return msgspec.structs.replace(found, bare=True, form=form) if isinstance(form, JsonForm) else None


def _frame(shown: str, calls: tuple[Call, Call], pattern: re.Pattern[str]) -> Frame | None:
    if any(shown.count(mark) != 1 for mark in (K1, V1, K2, V2, K3, V3)):
        return None
    first_end, second_end = shown.index(V2) + len(V2), shown.index(V3) + len(V3)
    names = (
        name_at(shown, 0, shown.index(K1), calls[0], 0),
        name_at(shown, first_end, shown.index(K3), calls[1], 1),
    )
    if names[0] is None or names[1] is None:
        return None
    before = [*pattern.finditer(shown, 0, names[0])]
    between = [*pattern.finditer(shown, first_end, names[1])]
    after = [*pattern.finditer(shown, second_end)]
    if before and after and not between:
        return _list_frame(shown, before, after)
    opening = common([m[0] for m in reversed(before)], [m[0] for m in reversed(between)])
    if opening == 0 or len(between) == opening or len(before) > opening + 1:
        return None
    close = between[-opening - 1]
    closes = [index for index, match in enumerate(after) if match[0] == close[0]]
    if not closes or len(after) > closes[0] + 2:
        return None
    return Frame(
        before_calls=shown[: before[0].start()],
        open=before[-opening][0],
        close=close[0],
        section_open=before[0][0] if len(before) > opening else None,
        section_close=after[-1][0] if len(after) > closes[0] + 1 else None,
    )


def _list_frame(shown: str, before: list[re.Match[str]], after: list[re.Match[str]]) -> Frame | None:
    if len(before) > 1 or len(after) > 1:
        return None
    return Frame(
        before_calls=shown[: before[0].start()],
        open=before[0][0],
        close=after[0][0],
        section_open=None,
        section_close=None,
        listed=True,
    )


def _proven(
    printer: Printer, tokenizer: Tokenizer, markers: Markers, trials: Sequence[Sequence[Call]]
) -> bool:
    """Whether parsing gives back what was printed; renders that the template refuses prove nothing."""
    unprefilled = msgspec.structs.replace(markers, prefilled=False)
    parser = CompletionParser(tokenizer, unprefilled, frozenset())
    for calls in trials:
        shown = printer.print(calls)
        if shown is None:
            continue
        parsed = parser.parse(tokenizer.encode(printer.content + shown))
        if parsed.error is not None or parsed.content != printer.content:
            return False
        if not same(parsed.tool_calls, calls):
            return False
    return True
