"""What a chat template does, learnt by rendering it with sentinel messages. No family is known by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from token_tracking import probe_calls
from token_tracking.call_scan import Markers
from token_tracking.errors import TemplateError
from token_tracking.messages import Message, with_arguments
from token_tracking.parse import CompletionParser
from token_tracking.tokenizer import Tokenizer

Render = Callable[[Sequence[Message], bool], str]
"""Messages and whether to add the generation prompt, to text."""

GENERATE = "generate"
"""Stands for the generation prompt where a role stands otherwise."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
ArgumentsForm = Literal["text", "object"]

_KEY, _VALUE, _NAME = "qzkeyq", "qzvalueq", "qztoolq"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What probing found. None means the template refused, or hid what was looked for."""

    system: bool
    """A system message is accepted first."""
    arguments_form: ArgumentsForm
    """How the template wants tool-call arguments: JSON text that it prints verbatim, or an object."""
    tool_name: str
    """Name used for tool calls while probing."""
    calls: bool
    """Tool calls of an assistant message are printed."""
    reasoning_field: str | None
    """Message field whose text is printed as reasoning."""
    call_tail: str | None
    """Printed after the last argument value of the last call, before the turn's close."""
    end_text: str | None
    """Printed after the content of an assistant message that is the last message."""
    prefill: str
    """The part of the generation prompt that finished assistant turns do not begin with (`<think>` and the
    like)."""
    markers: Markers
    prints_tool_ids: bool
    """Tool messages show their `tool_call_id` or `name`: their text is not content alone."""
    prints_parts: frozenset[str]
    """Roles whose content may be a list of text parts; for the others it is given as one string."""


class Prober:
    """Builds sentinel messages in the form that a template accepts and renders them."""

    def __init__(self, render: Render, tool_names: Sequence[str]):
        self._render = render
        self.tool_name = tool_names[0] if tool_names else _NAME
        self.form: ArgumentsForm = "text"
        self.reasoning_field: str | None = None
        self.system = True

    def text(self, messages: Iterable[Message], *, generate: bool = False) -> str | None:
        """Rendered text; None if the template refuses."""
        try:
            return self._render([with_arguments(m, self.form) for m in messages], generate)
        except TemplateError:
            return None

    def start(self, system: str = "qzsystemq", user: str = "qzuserq") -> list[dict[str, Any]]:
        """The first messages of a conversation."""
        first = [{"role": "system", "content": system}] if self.system else []
        return [*first, {"role": "user", "content": user}]

    def assistant(
        self, content: str, *, reasoning: str = "", arguments: Sequence[str] = ()
    ) -> dict[str, Any]:
        """An assistant message; `arguments` holds the argument value of each of its calls."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning and self.reasoning_field:
            message[self.reasoning_field] = reasoning
        if arguments:
            message["tool_calls"] = [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {
                        "name": self.tool_name,
                        "arguments": json.dumps({_KEY: value}, ensure_ascii=False),
                    },
                }
                for index, value in enumerate(arguments)
            ]
        return message

    def tool(self, content: str, index: int = 0) -> dict[str, Any]:
        """The result of call `index`."""
        return {"role": "tool", "tool_call_id": f"call_{index}", "name": self.tool_name, "content": content}


def examine(render: Render, tokenizer: Tokenizer, tool_names: Sequence[str]) -> tuple[Facts, Prober]:
    """Probe a template.

    Raises:
        TemplateError: it renders not even one user message; the template's own words are in the message.
    """
    prober = Prober(render, tool_names)
    if prober.text(prober.start()) is None:
        prober.system = False
        render(prober.start(), False)
    calls = _learn_arguments_form(prober)
    prober.reasoning_field = _reasoning_field(prober)
    end_text = _after(prober.text([*prober.start(), prober.assistant("qzcontentq")]), "qzcontentq")
    call_tail = _call_tail(prober, end_text) if calls else None
    facts = Facts(
        system=prober.system,
        arguments_form=prober.form,
        tool_name=prober.tool_name,
        calls=calls,
        reasoning_field=prober.reasoning_field,
        call_tail=call_tail,
        end_text=end_text,
        prefill=_prefill(prober, tokenizer),
        markers=_markers(prober, tokenizer, end_text),
        prints_tool_ids=_prints_tool_ids(prober),
        prints_parts=_prints_parts(prober),
    )
    return facts, prober


def _after(text: str | None, sentinel: str) -> str | None:
    if text is None or text.count(sentinel) != 1:
        return None
    return text.split(sentinel)[1]


def _learn_arguments_form(prober: Prober) -> bool:
    call = prober.assistant("", arguments=(_VALUE,))
    verbatim = call["tool_calls"][0]["function"]["arguments"]
    for after in ((), (prober.tool("qzresultq"),)):
        prober.form = "text"
        if (text := prober.text([*prober.start(), call, *after])) and verbatim in text:
            return True
        prober.form = "object"
        text = prober.text([*prober.start(), call, *after])
        if text and _KEY in text and _VALUE in text and json.dumps(verbatim) not in text:
            return True
    prober.form = "text"
    return False


def _reasoning_field(prober: Prober) -> str | None:
    for field in REASONING_FIELDS:
        prober.reasoning_field = field
        for after in ((), (prober.tool("qzresultq"),)):
            message = prober.assistant(
                "qzcontentq", reasoning="qzreasonq", arguments=(_VALUE,) if after else ()
            )
            if "qzreasonq" in (prober.text([*prober.start(), message, *after]) or ""):
                return field
    return None


def _call_tail(prober: Prober, end_text: str | None) -> str | None:
    tail = _after(prober.text([*prober.start(), prober.assistant("", arguments=(_VALUE,))]), _VALUE)
    if tail is None or end_text is None or not tail.endswith(end_text):
        return None
    return tail.removesuffix(end_text)


def _added_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    longest_first = sorted(tokenizer.added_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _prefill(prober: Prober, tokenizer: Tokenizer) -> str:
    prompt = prober.text(prober.start(), generate=True)
    if prompt is None:
        return ""
    plain, thinking = prober.assistant("qzcontentq"), prober.assistant("qzcontentq", reasoning="qzreasonq")
    later = {"role": "user", "content": "qzlaterq"}
    histories = ([plain], [thinking], [plain, later], [thinking, later])
    texts = [text for history in histories if (text := prober.text([*prober.start(), *history]))]
    header = prompt
    while not all(text.startswith(header) for text in texts):
        header = header[:-1]
    # A reasoning marker that every form happens to begin with still belongs to the turn, not to the header.
    pattern = _added_pattern(tokenizer)
    last = [*pattern.finditer(header)][-1:] if pattern else []
    if last and last[0][0] not in tokenizer.special_tokens and not header[last[0].end() :].strip():
        header = header[: last[0].start()]
    return prompt[len(header) :]


def _prints_tool_ids(prober: Prober) -> bool:
    tool = prober.tool("qzresultq") | {"tool_call_id": "qzidq", "name": "qzothernameq"}
    text = prober.text([*prober.start(), prober.assistant("", arguments=(_VALUE,)), tool])
    return text is None or "qzidq" in text or "qzothernameq" in text


def _prints_parts(prober: Prober) -> frozenset[str]:
    """Roles for which a list of one text part prints as its text does (others drop it, or print Python)."""
    found: set[str] = set()
    system = [{"role": "system", "content": "qzpartq"}] if prober.system else []
    call = [prober.assistant("", arguments=(_VALUE,)), prober.tool("qzpartq")]
    for messages, at in (
        ([*system, {"role": "user", "content": "qzpartq"}], 0),
        ([*prober.start(), prober.assistant("qzpartq")], -1),
        ([*prober.start(), {"role": "user", "content": "qzpartq"}], -1),
        ([{"role": "user", "content": "qzpartq"}], 0),
        ([*prober.start(), *call], -1),
    ):
        parts: list[dict[str, Any]] = [dict(message) for message in messages]
        parts[at]["content"] = [{"type": "text", "text": "qzpartq"}]
        text = prober.text(messages)
        if text is not None and "qzpartq" in text and prober.text(parts) == text:
            found.add(messages[at]["role"])
    return frozenset(found)


def _markers(prober: Prober, tokenizer: Tokenizer, end_text: str | None) -> Markers:
    """Markers that are single added tokens, kept only if parsing the probe with them gives the probe back."""
    prompt = prober.text(prober.start(), generate=True)
    pattern = _added_pattern(tokenizer)
    if prompt is None or pattern is None:
        return Markers()
    found = _reasoning_markers(prober, tokenizer, pattern, prompt)
    return probe_calls.learn(prober, tokenizer, pattern, end_text, found)


def _reasoning_markers(
    prober: Prober, tokenizer: Tokenizer, pattern: re.Pattern[str], prompt: str
) -> Markers:
    message = prober.assistant("qzcontentq", reasoning="qzreasonq")
    text = prober.text([*prober.start(), message])
    if text is None or text.count("qzreasonq") != 1 or text.count("qzcontentq") != 1:
        return Markers()
    before, rest = text.split("qzreasonq")
    closing, _, _ = rest.partition("qzcontentq")
    opens, closes = pattern.findall(before), pattern.findall(closing)
    if not opens or len(closes) != 1 or opens[-1] in tokenizer.special_tokens:
        return Markers()
    last = ["", *pattern.findall(prompt)][-1]
    markers = Markers(
        reasoning_open=tokenizer.added_tokens[opens[-1]],
        reasoning_close=tokenizer.added_tokens[closes[0]],
        reasoning_closing_text=closing,
        prefilled=last == opens[-1],
    )
    written = before[before.rindex(opens[-1]) + (len(opens[-1]) if markers.prefilled else 0) :]
    parsed = CompletionParser(tokenizer, markers, frozenset()).parse(
        tokenizer.encode(f"{written}qzreasonq{closing}qzcontentq")
    )
    return markers if (parsed.reasoning, parsed.content) == ("qzreasonq", "qzcontentq") else Markers()
