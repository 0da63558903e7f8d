"""Every template of trl that prints calls: what it prints is read back, and nothing written breaks it."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_tracking import ChatTemplate, Conversation, GenerationRecord, ParsedCompletion
from token_tracking.backends.hf import HFTokenizer
from token_tracking.compiler.probe import examine
from token_tracking.compiler.rendering import JinjaTemplate
from token_tracking.messages import with_arguments
from token_tracking.parsing.parse import CompletionParser
from token_tracking.testing import family_tokenizer, trl_templates

TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "force": {"type": "boolean"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "items": {"type": "array", "items": {}},
                "options": {"type": "object", "properties": {}},
            },
        },
    },
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "text": {"path": "a b"},
    "empty": {"path": "", "text": "\n"},
    "types": {"count": -3, "ratio": 0.5, "force": True, "limit": None},
    "nested": {"items": [1, "a", None, [True, {"k": "v"}]], "options": {"k": [], "l": {"m": "n"}}},
    "unicode": {"path": "é 世界 🙂 \u2028", "items": ["ü"]},
    "newlines": {"text": "\nfirst\n\n  second\t\n"},
    "quotes": {"path": 'it\'s "so"', "text": "back\\slash \\n 'q'", "items": ["it's", '"', "\\"]},
    "json": {"text": '{"k": [1, "x"]}', "path": "null"},
    "brackets": {"text": "a) b] c} (d=[1], e={2}", "items": ["}", "]", ")"]},
}
ALL = list(ARGUMENTS)
NO_CALLS = ["cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"]
NO_CALLS += ["phi3", "phi3_5", "qwen2_5_vl", "smolvlm"]
UNREAD = {
    # Prints calls only where the content is None, the end of the section never after one call, and an end of
    # turn after each further one: no turn of its own that a model could have written.
    "deepseek_r1_distill",
}
ONE_CALL = {
    "llama3_1": "the template refuses more",
    "llama3_2": "the template refuses more",
    "gptoss": "the template prints the first alone",
}
NO_CONTENT = {*ONE_CALL, "muse_glimmer"}
"""Templates that do not print the content of a turn with calls, or print it as reasoning."""


def family(name: str) -> str:
    return name.removesuffix("_training")


NAMES = [name for name in trl_templates() if family(name) not in {*NO_CALLS, *UNREAD}]


class Printed:
    """What a template learnt and prints, without the delta program, which takes longer to prove."""

    def __init__(self, tokenizer: HFTokenizer, source: str):
        self.tokenizer = tokenizer
        jinja = JinjaTemplate(source, now=datetime(2026, 1, 1, tzinfo=UTC))
        variables = tokenizer.named_tokens

        def render(messages: Sequence[Any], generate: bool) -> str:
            return jinja.render(messages, tools=[TOOL], add_generation_prompt=generate, variables=variables)

        self._render = render
        self.facts, _ = examine(render, tokenizer, ["edit"])
        m = self.facts.markers
        self.stops = frozenset() if m.headers else tokenizer.special_ids - {m.call_close, m.section_close}
        self.parser = CompletionParser(tokenizer, m, frozenset(self.stops), [TOOL])

    def turn(self, message: dict[str, Any]) -> list[int]:
        """The ids that a model samples to say `message`, up to its stop token where it is a control token."""
        history = [{"role": "user", "content": "q"}]
        message = with_arguments(message, self.facts.arguments_form)
        prompt = self._render(history, True).removesuffix(self.facts.prefill)
        shown = self._render([*history, message], False)
        assert shown.startswith(prompt)
        text = shown[len(prompt) :]
        if self.facts.markers.prefilled:
            text = text.removeprefix(self.facts.prefill)
        ids = self.tokenizer.encode(text.rstrip("\n") if self.facts.end_text else text)
        assert self.tokenizer.decode(ids) in text
        return ids

    def parse(self, ids: list[int]) -> ParsedCompletion:
        return self.parser.parse(ids)


@pytest.fixture(scope="module")
def printed() -> Callable[[str], Printed]:
    tokenizer = family_tokenizer()
    known: dict[str, Printed] = {}

    def learn(name: str) -> Printed:
        if name not in known:
            known[name] = Printed(tokenizer, trl_templates()[name].read_text(encoding="utf-8"))
        return known[name]

    return learn


def said(kinds: Sequence[str], *, content: str = "") -> dict[str, Any]:
    calls = [
        {
            "id": f"callid{index:03}",
            "type": "function",
            "function": {"name": "edit", "arguments": json.dumps(ARGUMENTS[kind], ensure_ascii=False)},
        }
        for index, kind in enumerate(kinds)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_read_back(name: str, printed: Callable[[str], Printed]):
    template = printed(name)
    turns = [[kind] for kind in ALL]
    if family(name) not in ONE_CALL:
        turns += [ALL[at : at + size] for size in (2, 5) for at in (0, len(ALL) - size)]
    for turn in turns:
        for content in ("", "Say.") if family(name) not in NO_CONTENT else ("",):
            ids = template.turn(said(turn, content=content))
            parsed = template.parse(ids)
            found = [(call.name, json.loads(call.arguments), call.error) for call in parsed.tool_calls]
            assert found == [("edit", ARGUMENTS[kind], None) for kind in turn]
            assert (parsed.error, parsed.content) == (None, content)
            covered(template, ids, parsed)


def covered(template: Printed, ids: list[int], parsed: ParsedCompletion) -> None:
    """Spans stand in order, and what they leave is the content, blanks and control tokens aside."""
    spans = [
        *([parsed.reasoning_span] if parsed.reasoning_span else []),
        *(c.span for c in parsed.tool_calls),
    ]
    at, left = 0, list[int]()
    for start, end in spans:
        assert at <= start < end <= len(ids)
        left += ids[at:start]
        at = end
    left += ids[at:]
    assert plain(template, template.tokenizer.decode(left)) == plain(template, parsed.content)


def plain(template: Printed, text: str) -> str:
    m = template.facts.markers
    sections = [template.tokenizer.decode([i]) for i in (m.section_open, m.section_close) if i is not None]
    for token in (*template.tokenizer.special_tokens, *sections):
        text = text.replace(token, "")
    return text.strip()


@pytest.mark.parametrize("name", [name for name in NAMES if name == family(name)])
def test_a_turn_cut_anywhere_in_its_last_call_has_no_complete_last_call(
    name: str, printed: Callable[[str], Printed]
):
    """vllm#58228: a turn that was cut at max_tokens reported complete tool calls."""
    template = printed(name)
    count = 1 if family(name) in ONE_CALL else 2
    ids = template.turn(said(["text", "nested"][-count:]))
    whole = template.parse(ids)
    assert len(whole.tool_calls) == count
    start, end = whole.tool_calls[-1].span
    for cut in range(start + 1, end):
        parsed = template.parse(ids[:cut])
        good = [call for call in parsed.tool_calls if call.error is None]
        assert len(good) <= count - 1
        assert all(call.span == whole.tool_calls[0].span for call in good if count == 2)
        assert "tool_calls" not in parsed.message() or len(parsed.message()["tool_calls"]) < count


def test_templates_without_calls_learn_no_form(printed: Callable[[str], Printed]):
    for name in NO_CALLS:
        assert not printed(name).facts.calls
    for name in UNREAD:
        assert printed(name).facts.markers.layout == "none"


def test_the_layouts(printed: Callable[[str], Printed]):
    layouts = {name: printed(name).facts.markers.layout for name in NAMES if name == family(name)}
    assert {name for name, layout in layouts.items() if layout == "headers"} == {"gptoss", "muse_glimmer"}
    assert {name for name, layout in layouts.items() if layout == "bare"} == {"llama3_1", "llama3_2"}
    assert "none" not in layouts.values()
    assert printed("gemma4_v5").facts.markers.content_after_calls


def harmony(template: Printed, text: str) -> ParsedCompletion:
    return template.parse(template.tokenizer.encode(text))


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.edit<|channel|>commentary json",
        "<|channel|>commentary to=functions.edit <|constrain|>json",
        "<|channel|>commentary to=functions.edit",
        "<|channel|>analysis to=functions.edit code",
    ],
)
def test_a_header_is_read_in_any_order(header: str, printed: Callable[[str], Printed]):
    """gpt-oss samples the recipient after the channel; its template prints it before."""
    template = printed("gptoss")
    thought = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    call = f'{header}<|message|>{{"path": "x"}}<|call|>'
    parsed = harmony(template, thought + call)
    (found,) = parsed.tool_calls
    assert (parsed.reasoning, parsed.content, parsed.error) == ("why", "", None)
    assert (found.name, found.arguments) == ("edit", '{"path": "x"}')
    border = len(template.tokenizer.encode(thought.removesuffix("<|start|>assistant")))
    assert parsed.reasoning_span == (0, border)
    assert found.span == (border, len(template.tokenizer.encode(thought + call)))


def test_messages_of_a_headered_turn(printed: Callable[[str], Printed]):
    template = printed("gptoss")
    more = "<|start|>assistant"
    say = "<|channel|>commentary<|message|>I look.<|end|>"
    call = '<|channel|>commentary to=functions.edit<|message|>{"path": "x"}<|call|>'
    final = "<|channel|>final<|message|>done<|return|>"
    assert harmony(template, final).message() == {"role": "assistant", "content": "done"}
    parsed = harmony(template, say + more + call)
    assert (parsed.content, parsed.error, len(parsed.tool_calls)) == ("I look.", None, 1)
    for text, why in (
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "goes to no tool"),
        ("no header at all", "a header and no text"),
        (f"{call}<|start|>user<|message|>hi<|end|>", "not of this turn's role"),
        (f"{call}{more}<|channel|>final<|message|>x<|return|>", "text after a tool call"),
        (f"{final}{more}<|channel|>analysis<|message|>y<|end|>", "reasoning after the content"),
        (call.replace("<|call|>", "<|end|>"), "not closed"),
        (call.replace("<|call|>", ""), "not closed"),
        (call.replace("}", ""), "not JSON"),
    ):
        parsed = harmony(template, text)
        assert why in (parsed.error or ""), text
        assert parsed.text == text
        if "browser" in text or "no header" in text or "user" in text:
            assert parsed.message()["content"] == text
    good = harmony(template, f"{call}{more}{call.replace('}', '')}{more}{call}")
    assert [c.error is None for c in good.tool_calls] == [True, False, True]
    thinking = template.tokenizer.encode("<|channel|>analysis<|message|>wh")
    assert template.parser.in_reasoning(thinking)
    assert not template.parser.in_reasoning(template.tokenizer.encode("<|channel|>final<|message|>wh"))
    assert template.parse(thinking).error == "the reasoning was not closed"


def test_header_and_text_must_call_one_tool(printed: Callable[[str], Printed]):
    template = printed("muse_glimmer")
    ids = template.turn(said(["text"]))
    text = template.tokenizer.decode(ids).replace("to=edit", "to=other")
    (call,) = harmony(template, text).tool_calls
    assert call.error == "the header calls 'other', the text 'edit'"


CALL = '{"name": "edit", "parameters": {"path": "x"}}'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (CALL, 1),
        (f"<|python_tag|>{CALL}<|eom_id|>", 1),
        (f"{CALL}; {CALL}<|eot_id|>", 2),
        (f" \n{CALL}\n{CALL}\n", 2),
        (f"Say. {CALL}", 0),
        ('{"name": "Bob", "age": 3}', 0),
        ('{"a": [1]}', 0),
        ("{not json}", 0),
        ("", 0),
    ],
)
def test_bare_calls(text: str, count: int, printed: Callable[[str], Printed]):
    template = printed("llama3_2")
    parsed = harmony(template, text)
    assert [(c.name, c.error) for c in parsed.tool_calls] == [("edit", None)] * count
    assert parsed.error is None
    if not count:
        assert parsed.content == text


def test_a_malformed_bare_call_leaves_the_others(printed: Callable[[str], Printed]):
    template = printed("llama3_1")
    bad = '{"name": "edit", "parameters": {"path": x}}'
    text = f"{CALL}\n{bad}\n{CALL}"
    parsed = harmony(template, text)
    assert [c.error is None for c in parsed.tool_calls] == [True, False, True]
    assert parsed.message() == {"role": "assistant", "content": text}
    decode, ids = template.tokenizer.decode, template.tokenizer.encode(text)
    assert bad in decode(ids[slice(*parsed.tool_calls[1].span)])
    cut = harmony(template, f"{CALL}\n{bad[:-9]}")
    assert [c.error for c in cut.tool_calls] == [None, "the tool call was not closed"]
    assert harmony(template, f"{CALL} and more").error == "text after the tool calls"


def literal(template: Printed, text: str) -> ParsedCompletion:
    return harmony(template, f"<|tool_call_start|>{text}<|tool_call_end|>")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a\\'b\\n\\x41\\u00e9\\U0001f642\\q'", "a'b\nAé🙂\\q"),
        ('"a\'b"', "a'b"),
        ("-1.5e3", -1500.0),
        ("True", True),
        ("null", None),
        ("[1, 'a', [], {}]", [1, "a", [], {}]),
        ("{'k': None, \"l\": false}", {"k": None, "l": False}),
        ('"\\ud83d\\ude42"', "🙂"),
    ],
)
def test_python_values(written: str, value: Any, printed: Callable[[str], Printed]):
    parsed = literal(printed("lfm2_v2"), f"[edit(path={written})]")
    assert parsed.error is None
    assert json.loads(parsed.tool_calls[0].arguments) == {"path": value}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[edit(path=__import__('os').getpid())]", "no value"),
        ("[edit(path=1+1)]", "followed by neither"),
        ("[edit('x')]", "has no name"),
        ("[edit(path='x', path='y')]", "stands twice"),
        ("[edit(path='x)]", "not closed"),
        ("[edit(path='x'", "followed by neither"),
        ("[edit(path='x')", "neither a call nor"),
        ("[edit(path='x')] more", "text stands after the call"),
        ("edit(path='x')", "does not begin with"),
        ("[]", "no name"),
        ("", "does not begin with"),
        ("[edit(path=" + "[" * 5_000 + ")]", "nested deeper"),
        ("[edit(path=" + "{'k': " * 5_000 + ")]", "nested deeper"),
        ("[edit(path=" + "9" * 5_000 + ")]", "path"),
        ("[edit(path=1e999)]", "not a finite number"),
        ("[edit(path='\\U00110000')]", "no character"),
        ('[edit(path="\\ud800")]', "lone surrogate"),
        ("[edit(path={'a': 1, 'a': 2})]", "stands twice"),
        ("[edit(path=(1, 2))]", "no value"),
    ],
)
def test_malformed_literals_say_why(text: str, why: str, printed: Callable[[str], Printed]):
    """verl#6542: nothing that a model writes is evaluated."""
    parsed = literal(printed("lfm2_v2"), text)
    (call,) = parsed.tool_calls
    assert why in (call.error or "")
    assert text in parsed.message()["content"]


def test_a_malformed_call_in_a_list_leaves_the_others(printed: Callable[[str], Printed]):
    template = printed("lfm2_v2")
    text = "[edit(path='a'), edit(path=oops), edit(path='c')]"
    parsed = literal(template, text)
    assert [c.error is None for c in parsed.tool_calls] == [True, False, True]
    ids = template.tokenizer.encode(f"<|tool_call_start|>{text}<|tool_call_end|>")
    pieces = [template.tokenizer.decode(ids[slice(*call.span)]) for call in parsed.tool_calls]
    assert "".join(pieces) == f"<|tool_call_start|>{text}<|tool_call_end|>"
    assert "oops" in pieces[1]


def test_gemma_prints_content_after_calls(printed: Callable[[str], Printed]):
    template = printed("gemma4_v5")
    call = '<|tool_call>call:edit{path:<|"|>x<|"|>}<tool_call|>'
    assert harmony(template, f"{call}Say.").content == "Say."
    before = harmony(template, f"Say.{call}")
    assert (before.error, len(before.tool_calls)) == ("text before the tool calls", 1)
    assert before.message()["content"] == f"Say.{call}"
    thought = harmony(template, f"<|channel>thought\nwhy\n<channel|>{call}<|tool_response>")
    assert (thought.reasoning, thought.error) == ("why", None)


FORMS = [
    "qwen3",
    "qwen3_6",
    "glm4moe",
    "llama3_1",
    "lfm2_v2",
    "lfm2_2_5",
    "gemma4_v5",
    "gptoss",
    "muse_glimmer",
]
"""One template of each form and layout."""
QUICK = ("qwen3", "qwen3_6", "glm4moe")
"""Those whose long inputs are tried by default."""
FRAGMENTS = [
    *("[", '{"name":', '{"name": "edit", "parameters": {}};', "edit(path=", "', x='", "'", '"', "\\", "\n"),
    *(
        "<function=edit>\n",
        "<parameter=path>\n",
        "\n</parameter>\n",
        "</function>\n",
        "<arg_key>",
        "<arg_value>",
    ),
    *(
        '<|"|>',
        "call:edit{",
        "a:",
        "}",
        "to=edit",
        "<|channel|>commentary to=functions.edit",
        "9",
        "é",
        "\U00013000",
    ),
    *('<atem:function_calls>\n<atem:invoke name="edit">\n', '<atem:parameter name="path">', "</atem:invoke>"),
]


def pieces(template: Printed) -> list[list[int]]:
    """Runs of ids that completions of a template are made of, its own markers among them."""
    m = template.facts.markers
    ids = [m.reasoning_open, m.reasoning_close, m.call_open, m.call_close]
    ids += [m.headers.start, m.headers.body, *m.headers.ends] if m.headers else []
    found = [[i] for i in ids if i is not None]
    return [*found, *(template.tokenizer.encode(text) for text in FRAGMENTS), template.turn(said(["text"]))]


def kept(template: Printed, ids: list[int]) -> None:
    """Everything that was written is in the reasoning's span or in the text, and spans are in order."""
    parsed = template.parse(ids)
    decode = template.tokenizer.decode
    begin, rest = parsed.reasoning_span or (0, 0)
    assert not decode(ids[:begin]).strip()
    end = len(ids) - (len(ids) > rest and ids[-1] in template.stops)
    written = decode(ids[rest:end])
    assert parsed.text == (written if parsed.reasoning is None else written.lstrip("\n")) or (
        template.facts.markers.headers and parsed.text == written
    )
    for left, right in zip(parsed.tool_calls, parsed.tool_calls[1:], strict=False):
        assert left.span[1] <= right.span[0]
    assert all(rest <= call.span[0] <= call.span[1] <= len(ids) for call in parsed.tool_calls)
    message = parsed.message()
    headers = template.facts.markers.headers is not None
    if (parsed.error and parsed.tool_calls) or not (headers or parsed.tool_calls):
        assert message["content"] == parsed.text
    elif not headers:
        covered(template, ids, parsed)
    template.parser.in_reasoning(ids)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_nothing_written_raises_or_is_lost(name: str, printed: Callable[[str], Printed], data: st.DataObject):
    template = printed(name)
    known = pieces(template)
    token = st.integers(0, template.tokenizer.vocab_size - 1).map(lambda i: [i])
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(template.tokenizer.encode_plain)
    runs = data.draw(st.lists(st.one_of(st.sampled_from(known), token, text), max_size=25))
    kept(template, [i for run in runs for i in run])


def hostile(template: Printed, size: int, *, few: bool = False) -> Iterator[tuple[str, list[int]]]:
    """Completions of about `size` characters that repeat one thing, alone and inside a call."""
    m = template.facts.markers
    turn = template.turn(said(["text"]))
    lead = [m.reasoning_close] if m.prefilled and m.reasoning_close is not None else []
    nested = (
        "[",
        '{"name":',
        "<function=edit>\n<parameter=path>\n",
        "{'k': ",
        '{"name": "a", "parameters": {}};',
    )
    units = [template.tokenizer.encode(text) for text in nested]
    units += [[i] for i in (m.call_open, m.call_close) if i is not None]
    units += [[m.call_open, m.call_close]] if m.call_open and m.call_close else []
    if m.headers:
        units += [[m.headers.start], [m.headers.body], [m.headers.start, m.headers.body]]
    if not few:
        others = ("edit(a=b), ", "', x='", '\\"', " \n", "9")
        units += [*(template.tokenizer.encode(text) for text in others), turn]
    for unit in units:
        text = template.tokenizer.decode(unit)
        run = unit * (size // len(text))
        yield f"{text!r:.40}", lead + run
        yield f"{text!r:.40} in a call", turn[: len(turn) // 2] + run


def seconds(template: Printed, ids: list[int]) -> float:
    """CPU time of one parse, without the collector, whose passes cost more the more is alive."""
    gc.collect()
    gc.disable()
    try:
        started = time.thread_time()
        template.parse(ids).message()
        template.parser.in_reasoning(ids)
        return time.thread_time() - started
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORMS]
)
def test_time_is_linear_in_what_was_written(name: str, printed: Callable[[str], Printed]):
    """Eight times as much takes about eight times as long; quadratic would be 64 times."""
    template = printed(name)
    for (shape, short), (_, long) in zip(hostile(template, 1_500), hostile(template, 12_000), strict=True):
        spent = seconds(template, long)
        if spent < 0.02:  # a quadratic one of this length takes more
            continue
        rate = min(seconds(template, long) for _ in range(2)) / min(
            seconds(template, short) for _ in range(3)
        )
        assert rate < 8 * 3, (shape, rate)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FORMS)
def test_a_megabyte_is_parsed_in_linear_time(name: str, printed: Callable[[str], Printed]):
    template = printed(name)
    for (shape, short), (_, long) in zip(
        hostile(template, 250_000, few=True), hostile(template, 1_000_000, few=True), strict=True
    ):
        spent = min(seconds(template, long) for _ in range(2))
        rate = spent / max(min(seconds(template, short) for _ in range(2)), 0.005)
        assert rate < 8, (shape, rate)


def test_a_turn_cut_in_its_reasoning_is_closed_with_the_templates_header(printed: Callable[[str], Printed]):
    tokenizer = printed("muse_glimmer").tokenizer
    source = trl_templates()["muse_glimmer"].read_text(encoding="utf-8")
    template = ChatTemplate.compile(tokenizer, source, tools=[TOOL], now=datetime(2026, 1, 1, tzinfo=UTC))
    assert template.describe()["call_headers"]["before_name"] == "to="
    conversation = Conversation(template)
    messages: list[Any] = [{"role": "user", "content": "q"}]
    conversation.advance(messages)
    record = GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(tokenizer.encode(" to=self<|message|>because"), np.int32),
        finish_reason="length",
    )
    message = conversation.record(record)
    assert (message["reasoning_content"], message["content"]) == ("because", "")
    messages += [message, {"role": "user", "content": "go on"}]
    conversation.advance(messages)
    full = template.render(messages, add_generation_prompt=True)
    assert conversation.prompt_ids().tolist() == tokenizer.encode(full)
    assert len(conversation.branches) == 1
