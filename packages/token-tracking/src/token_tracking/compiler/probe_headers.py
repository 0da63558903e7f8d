"""Turns of several messages with headers (gpt-oss), learnt from renders of probe turns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from token_tracking.compiler.probe_forms import (
    K1,
    K2,
    K3,
    NAMES,
    V1,
    V2,
    V3,
    Call,
    arguments_form,
    form_of,
    same,
)
from token_tracking.parsing.call_forms import CallForm
from token_tracking.parsing.markers import Headers, Markers
from token_tracking.parsing.parse import CompletionParser
from token_tracking.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from token_tracking.compiler.probe import Prober

_CONTENT, _REASON = "qzcontentq", "qzreasonq"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One message as it was printed."""

    header: str
    body_token: str
    body: str
    end: str


class Teller:
    """Prints turns after the generation prompt and cuts them at control tokens."""

    def __init__(self, prober: Prober, tokenizer: Tokenizer, pattern: re.Pattern[str]):
        self._prober = prober
        self._tokenizer = tokenizer
        self._pattern = pattern
        self.prompt = prober.text(prober.start(), generate=True) or ""

    def turn(self, message: Mapping[str, Any]) -> str | None:
        """The turn; None: the template refused, or does not print the generation prompt before it."""
        text = self._prober.text([*self._prober.start(), message])
        return text[len(self.prompt) :] if text is not None and text.startswith(self.prompt) else None

    def calls(self, calls: Sequence[Call]) -> str | None:
        """A turn of calls alone."""
        wires = [call.wire(index) for index, call in enumerate(calls)]
        return self.turn({"role": "assistant", "content": "", "tool_calls": wires})

    def controls(self, text: str) -> list[re.Match[str]]:
        """The control tokens in a text."""
        special = self._tokenizer.special_tokens
        return [match for match in self._pattern.finditer(text) if match[0] in special]

    def told(self, text: str | None, mark: str) -> Told | None:
        """The first message of a turn, whose text has `mark`; None: none has."""
        if text is None or text.count(mark) != 1:
            return None
        at = text.index(mark)
        before = [match for match in self.controls(text) if match.end() <= at]
        after = [match for match in self.controls(text) if match.start() >= at + len(mark)]
        if not before or not after:
            return None
        return Told(
            header=text[: before[-1].start()],
            body_token=before[-1][0],
            body=text[before[-1].end() : after[0].start()],
            end=after[0][0],
        )

    def words(self, header: str) -> frozenset[str]:
        """Words of a header; a control token is one."""
        for match in self.controls(header):
            header = header.replace(match[0], f" {match[0]} ")
        return frozenset(header.split())


def learn(prober: Prober, tokenizer: Tokenizer, pattern: re.Pattern[str], found: Markers) -> Markers | None:
    """Markers of a template whose turns are messages with headers; None: it is none, or not certain."""
    teller = Teller(prober, tokenizer, pattern)
    content = teller.told(teller.turn({"role": "assistant", "content": _CONTENT}), _CONTENT)
    calls = Call(NAMES[0], {K1: V1, K2: V2}), Call(NAMES[1], {K3: V3})
    call = teller.told(teller.calls(calls[:1]), V1)
    opened = teller.controls(teller.prompt)
    if content is None or call is None or not opened or call.body_token != content.body_token:
        return None
    named = [word for word in teller.words(call.header) if calls[0].name in word]
    before_name = named[0].removesuffix(calls[0].name) if len(named) == 1 else ""
    form = _form(teller, calls, call)
    if form is None or not before_name or calls[0].name in before_name:
        return None
    ids = tokenizer.added_tokens
    thought = _thought(teller, prober)
    reasoning = teller.words(thought.header) if thought else frozenset[str]()
    headers = Headers(
        start=ids[opened[-1][0]],
        role=teller.prompt[opened[-1].end() :],
        body=ids[content.body_token],
        reasoning=reasoning - teller.words(content.header),
        content=teller.words(content.header),
        before_name=before_name,
        call_ends=frozenset(ids[end] for end in _call_ends(teller, calls, call)),
        ends=frozenset(ids[told.end] for told in (content, call, *([thought] if thought else []))),
    )
    headers = msgspec.structs.replace(headers, ends=headers.ends | headers.call_ends)
    markers = msgspec.structs.replace(
        found,
        headers=headers,
        form=form,
        reasoning_closing_text=_between(teller, prober) if thought else "",
    )
    return markers if _proven(teller, prober, tokenizer, markers, calls) else None


def _form(teller: Teller, calls: tuple[Call, Call], call: Told) -> CallForm | None:
    def body_of(some: Sequence[Call]) -> str | None:
        text = teller.calls(some)
        return None if text is None else text.split(call.body_token, 1)[-1].split(call.end)[0]

    return arguments_form(calls[0], call.body) or form_of(calls, body_of)


def _call_ends(teller: Teller, calls: tuple[Call, Call], call: Told) -> set[str]:
    """What ends a call that is the last, and one that another follows."""
    text = teller.calls(calls)
    first = teller.told(text, V1) if text is not None and text.count(V3) == 1 else None
    return {call.end, *([first.end] if first else [])}


def _thought(teller: Teller, prober: Prober) -> Told | None:
    return teller.told(teller.turn(prober.assistant(_CONTENT, reasoning=_REASON)), _REASON)


def _between(teller: Teller, prober: Prober) -> str:
    text = teller.turn(prober.assistant(_CONTENT, reasoning=_REASON)) or ""
    return text.partition(_REASON)[2].partition(_CONTENT)[0]


def _proven(
    teller: Teller, prober: Prober, tokenizer: Tokenizer, markers: Markers, calls: tuple[Call, Call]
) -> bool:
    """Whether parsing gives back the turns that were printed."""
    parser = CompletionParser(tokenizer, markers, frozenset())
    thinking = prober.assistant(_CONTENT, reasoning=_REASON)
    for message in ({"role": "assistant", "content": _CONTENT}, thinking):
        text = teller.turn(message)
        parsed = parser.parse(tokenizer.encode(text or ""))
        reasoning = _REASON if _REASON in (text or "") else None
        if (parsed.content, parsed.reasoning, parsed.error) != (_CONTENT, reasoning, None):
            return False
    for some in (calls[:1], calls):
        text = teller.calls(some)
        printed = [call for call in some if text is not None and call.name in text]
        parsed = parser.parse(tokenizer.encode(text or ""))
        if parsed.error is not None or parsed.content:
            return False
        if not same(parsed.tool_calls, printed):
            return False
    return True
