"""What a chat template does, learnt by rendering it with sentinel messages. No family is known by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from token_tracking.compiler import probe_calls, probe_contents, probe_forms
from token_tracking.errors import TemplateError
from token_tracking.messages import Message, with_arguments, with_parts
from token_tracking.parsing.markers import Markers
from token_tracking.parsing.parse import CompletionParser
from token_tracking.tokenizer import Tokenizer

Render = Callable[[Sequence[Message], bool], str]
"""Messages and whether to add the generation prompt, to text."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
ArgumentsForm = Literal["text", "object"]

_KEY, _VALUE, _NAME = "qzkeyq", "qzvalueq", "qztoolq"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What probing found. None means the template refused, or hid what was looked for."""

    system: bool
    """A system message is accepted first, and printed."""
    arguments_form: ArgumentsForm
    """How the template wants tool-call arguments: JSON text that it prints verbatim, or an object."""
    tool_name: str
    """Name used for tool calls while probing."""
    calls: bool
    """Tool calls of an assistant message are printed."""
    empty_calls: bool
    """An assistant message whose `tool_calls` is an empty list or None is printed as one without."""
    reasoning_field: str | None
    """Message field whose text is printed as reasoning."""
    call_tail: str | None
    """Printed after the last argument value of the last call, before the turn's close."""
    end_text: str | None
    """Printed after the content of an assistant message that is the last message."""
    call_end_text: str | None
    """Printed after the calls of an assistant message that is the last message (gpt-oss ends those turns in
    another token)."""
    prefill: str
    """The part of the generation prompt that finished assistant turns do not begin with (`<think>` and the
    like)."""
    markers: Markers
    prints_parts: frozenset[str]
    """Roles whose content may be a list of text parts; for the others it is given as one text."""
    wrapped: frozenset[str]
    """Roles whose text is printed only as a list of text parts: a string is given as one part (SmolVLM)."""
    drops: frozenset[str]
    """Roles whose messages are printed without their content, in either form: such messages are refused."""
    drops_beside_calls: bool
    """The content of an assistant message with calls is not printed."""

    def end_of(self, message: Message) -> str | None:
        """What is printed after an assistant message that is the last message."""
        return self.call_end_text if message.get("tool_calls") else self.end_text


class Prober:
    """Builds sentinel messages in the form that a template accepts and renders them."""

    def __init__(self, render: Render, tool_names: Sequence[str]):
        self._render = render
        self.tool_name = tool_names[0] if tool_names else _NAME
        self.form: ArgumentsForm = "text"
        self.reasoning_field: str | None = None
        self.system = True
        self.wrapped: frozenset[str] = frozenset()
        """Roles whose content is given as a list of one part."""

    def text(self, messages: Iterable[Message], *, generate: bool = False) -> str | None:
        """Rendered text; None if the template refuses."""
        try:
            return self.render(messages, generate=generate)
        except TemplateError:
            return None

    def render(self, messages: Iterable[Message], *, generate: bool = False) -> str:
        """Rendered text.

        Raises:
            TemplateError: the template refuses.
        """
        shown = (with_parts(m) if m["role"] in self.wrapped else m for m in messages)
        return self._render([with_arguments(m, self.form) for m in shown], generate)

    def start(self, system: str = "qzsystemq", user: str = "qzuserq") -> list[dict[str, Any]]:
        """The first messages of a conversation."""
        first = [{"role": "system", "content": system}] if self.system else []
        return [*first, {"role": "user", "content": user}]

    def assistant(
        self,
        content: str | None,
        *,
        reasoning: str = "",
        arguments: Sequence[str] = (),
        names: Sequence[str] = (),
        ids: Sequence[str] = (),
    ) -> dict[str, Any]:
        """An assistant message.

        Args:
            content: its text.
            reasoning: its reasoning, left out where no field is known.
            arguments: the argument value of each of its calls.
            names: of the calls. Empty: all have `tool_name`.
            ids: of the calls. Empty: `call_id` of each.
        """
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning and self.reasoning_field:
            message[self.reasoning_field] = reasoning
        if arguments:
            message["tool_calls"] = [
                {
                    "id": ids[index] if ids else call_id(index),
                    "type": "function",
                    "function": {
                        "name": names[index] if names else self.tool_name,
                        "arguments": json.dumps({_KEY: value}, ensure_ascii=False),
                    },
                }
                for index, value in enumerate(arguments)
            ]
        return message

    def tool(self, content: str, index: int = 0) -> dict[str, Any]:
        """The result of call `index`."""
        return {"role": "tool", "tool_call_id": call_id(index), "name": self.tool_name, "content": content}


def call_id(index: int) -> str:
    """Nine letters and digits: Mistral's templates refuse other ids, and the rest take any."""
    return f"qzcallq{index:02d}"


def examine(render: Render, tokenizer: Tokenizer, tool_names: Sequence[str]) -> tuple[Facts, Prober]:
    """Probe a template.

    Raises:
        TemplateError: it renders not even one user message (the template's own words are in the message), or
            prints a user message without its text.
    """
    prober = Prober(render, tool_names)
    probe_contents.learn_first(prober)
    printed = {"assistant": probe_contents.learn(prober, "assistant", calls=False)}
    calls = _learn_arguments_form(prober)
    prober.reasoning_field = _reasoning_field(prober)
    end_text = _after(prober.text([*prober.start(), prober.assistant("qzcontentq")]), "qzcontentq")
    printed["tool"] = probe_contents.learn(prober, "tool", calls=calls)
    printed["system"] = prober.system or probe_contents.learn(prober, "system", calls=calls)
    call_tail, call_end = _call_tail(prober, tokenizer, end_text) if calls else (None, None)
    beside = prober.text([*prober.start(), prober.assistant("qzcontentq", arguments=(_VALUE,))])
    facts = Facts(
        system=prober.system,
        arguments_form=prober.form,
        tool_name=prober.tool_name,
        calls=calls,
        empty_calls=_takes_empty_calls(prober),
        reasoning_field=prober.reasoning_field,
        call_tail=call_tail,
        end_text=end_text,
        call_end_text=call_end,
        prefill=_prefill(prober, tokenizer),
        markers=_markers(prober, tokenizer, end_text if call_end is None else call_end),
        prints_parts=probe_contents.takes_parts(prober, calls=calls),
        wrapped=prober.wrapped,
        drops=frozenset(role for role, found in printed.items() if found is False),
        drops_beside_calls=calls and beside is not None and "qzcontentq" not in beside,
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
        text = prober.text([*prober.start(), call, *after]) or ""
        # Gemma 4 prints text as it is, in the brackets that its own notation of an object has: `{{"k": …}}`.
        if verbatim in text and f"{{{verbatim}}}" not in text:
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


def _call_tail(prober: Prober, tokenizer: Tokenizer, end_text: str | None) -> tuple[str | None, str | None]:
    """What is printed after the last argument value: up to the turn's close, and the close."""
    tail = _after(prober.text([*prober.start(), prober.assistant("", arguments=(_VALUE,))]), _VALUE)
    if tail is None or end_text is None:
        return None, None
    if tail.endswith(end_text):
        return tail.removesuffix(end_text), end_text
    # A turn with calls may have a close of its own: the one control token that does not stand after a call
    # which another follows (gpt-oss's `<|call|>`, Gemma 4's `<|tool_response>`).
    controls = _controls(tokenizer, tail)
    two = prober.text([*prober.start(), prober.assistant("", arguments=(_VALUE, "qzlastq"))])
    amid, next_call, _ = (two or "").partition(_VALUE)[2].partition("qzlastq")
    between = _controls(tokenizer, amid) if next_call else []
    if len(controls) - probe_forms.common(controls, between) != 1:
        return None, None
    close = tail.rindex(controls[-1])
    return tail[:close], tail[close:]


def _controls(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = (control for _, control in tokenizer.split(text))
    return [tokenizer.decode([i]) for i in ids if i is not None]


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


def _takes_empty_calls(prober: Prober) -> bool:
    plain, later = prober.assistant("qzcontentq"), {"role": "user", "content": "qzlaterq"}
    absent: list[list[Any] | None] = [None, []]
    return all(
        prober.text([*prober.start(), plain | {"tool_calls": empty}, *after])
        == prober.text([*prober.start(), plain, *after])
        for empty in absent
        for after in ((), (later,))
    )


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
    if not opens or len(closes) != 1:
        return Markers()
    plain = prober.text([*prober.start(), prober.assistant("qzcontentq")]) or ""
    if opens[-1] in tokenizer.special_tokens and opens[-1] in prompt + plain:
        return Markers()  # a control token that stands elsewhere too opens messages, not reasoning
    last = ["", *pattern.findall(prompt)][-1]
    markers = Markers(
        reasoning_open=tokenizer.added_tokens[opens[-1]],
        reasoning_head="" if last == opens[-1] else before.rpartition(opens[-1])[2].strip(),
        reasoning_close=tokenizer.added_tokens[closes[0]],
        reasoning_closing_text=closing,
        prefilled=last == opens[-1],
    )
    written = before[before.rindex(opens[-1]) + (len(opens[-1]) if markers.prefilled else 0) :]
    parsed = CompletionParser(tokenizer, markers, frozenset()).parse(
        tokenizer.encode(f"{written}qzreasonq{closing}qzcontentq")
    )
    return markers if (parsed.reasoning, parsed.content) == ("qzreasonq", "qzcontentq") else Markers()
