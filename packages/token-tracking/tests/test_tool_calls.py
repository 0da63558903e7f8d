"""Tool calls in every form that is learnt: read back, typed by schema, malformed, cut, over three turns."""

import ast
import itertools
import json
import logging
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_tracking import ChatTemplate, Conversation, ParsedCompletion
from token_tracking.backends.hf import HFTokenizer, with_added_tokens
from token_tracking.parsing import strict_json
from token_tracking.parsing.argument_types import ArgumentTypes, decode
from token_tracking.parsing.call_forms import ElementForm, JsonForm, NamedForm
from token_tracking.testing import completion, trl_template

EDIT_TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "force": {"type": "boolean"},
                "items": {"type": "array", "items": {}},
                "options": {"$ref": "#/$defs/Options"},
                "mode": {"enum": ["a", "b"]},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "array", "null"]},
            },
            "$defs": {"Options": {"type": "object"}},
        },
    },
}
GLM_MARKUP = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KIMI_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
FORMS = ["qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "nemotron_3_nano", "deepseekv3", "kimi"]
Compile = Callable[..., ChatTemplate]


@pytest.fixture(scope="session")
def speaking(many: HFTokenizer) -> Compile:
    """A template by name, with the `edit` tool."""
    tokenizer = with_added_tokens(many, control=KIMI_TOKENS, markup=GLM_MARKUP)
    known: dict[str, ChatTemplate] = {}

    def compile_once(name: str) -> ChatTemplate:
        if name not in known:
            source = KIMI if name == "kimi" else trl_template(name)
            known[name] = ChatTemplate.compile(tokenizer, source, tools=[EDIT_TOOL])
        return known[name]

    return compile_once


def wire(name: str, arguments: str, call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sampled(template: ChatTemplate, message: dict[str, Any]) -> str:
    """What a model writes after the generation prompt to say `message`, as the template prints it."""
    history = [{"role": "user", "content": "q"}]
    prompt = template.render(history, add_generation_prompt=True)
    shown = template.render([*history, message], add_generation_prompt=False)
    head = prompt.removesuffix(template.facts.prefill)
    assert shown.startswith(head)
    text = shown[len(head) :].removesuffix(template.facts.end_text or "")
    return text.removeprefix(template.facts.prefill) if template.facts.markers.prefilled else text


def parse(template: ChatTemplate, text: str) -> ParsedCompletion:
    return template.parse(template.tokenizer.encode(text))


def test_the_form_is_learnt_from_the_render(speaking: Compile):
    kinds = {name: type(speaking(name).facts.markers.form) for name in FORMS}
    assert kinds == {
        "qwen3": JsonForm,
        "qwen3_5_think": ElementForm,
        "qwen3_6": ElementForm,
        "glm4moe": ElementForm,
        "nemotron_3_nano": ElementForm,
        "deepseekv3": NamedForm,
        "kimi": NamedForm,
    }
    assert speaking("qwen3_6").describe()["call_form"] == {
        "type": "elements",
        "before_name": "\n<function=",
        "after_name": ">\n",
        "before_key": "<parameter=",
        "after_key": ">\n",
        "after_value": "\n</parameter>\n",
        "end": "</function>\n",
        "words": {},
    }
    printed = speaking("qwen3_5_think").facts.markers.form
    assert isinstance(printed, ElementForm)
    assert printed.words == {"True": "true", "False": "false", "None": "null"}
    glm = speaking("glm4moe").facts.markers.form
    assert isinstance(glm, ElementForm)
    assert (glm.before_key, glm.after_key) == ("<arg_key>", "</arg_key>\n<arg_value>")
    assert speaking("kimi").describe()["around_calls"] == [KIMI_TOKENS[0], KIMI_TOKENS[1]]


TEXT = st.one_of(
    st.sampled_from(
        [
            "",
            "\n",
            "\nls\n",
            " x ",
            "a\n\n",
            "True",
            "null",
            "3",
            "[1]",
            '{"k": "v"}',
            "</parameter>",
            "a < b > c",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\ufdd0"), max_size=20),
).map(lambda text: unicodedata.normalize("NFC", text))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": TEXT,
        "count": st.integers(-(10**20), 10**20),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "force": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "options": st.dictionaries(TEXT, JSON, max_size=3),
        "mode": st.sampled_from(["a", "b"]),
        "limit": st.none() | st.integers(0, 9),
        "free": TEXT,
    },
)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.sampled_from(["", "Say.", "é\n\n- a"]))
def test_printed_calls_are_read_back(name: str, speaking: Compile, calls: list[dict[str, Any]], content: str):
    """parse(encode(render)) is the message, and its message prints the same text."""
    template = speaking(name)
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            wire("edit", json.dumps(a, ensure_ascii=False), f"functions.edit:{n + 7}")
            for n, a in enumerate(calls)
        ],
    }
    if template.facts.reasoning_field:
        message[template.facts.reasoning_field] = "why"
    text = sampled(template, message)
    ids = (
        template.tokenizer.encode_plain(text)
        if name not in {"deepseekv3", "kimi"}
        else template.tokenizer.encode(text)
    )
    parsed = template.parse(ids)
    assert parsed.error is None
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("edit", a) for a in calls]
    assert parsed.content == content
    assert sampled(template, parsed.message()) == text
    spans = [
        *([parsed.reasoning_span] if parsed.reasoning_span else []),
        *(c.span for c in parsed.tool_calls),
    ]
    assert spans == sorted(spans)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    for call in parsed.tool_calls:
        assert ids[call.span[0]] == template.facts.markers.call_open
        assert ids[call.span[1] - 1] == template.facts.markers.call_close


@pytest.mark.parametrize("name", FORMS)
@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 151_999), st.sampled_from(["open", "close", "body"])), max_size=40))
def test_no_ids_make_any_form_raise(name: str, speaking: Compile, pieces: list[int | str]):
    template = speaking(name)
    m = template.facts.markers
    body = template.tokenizer.encode_plain("<function=edit>\n<parameter=count>\n1\n</parameter>\n</function>")
    parts: dict[Any, list[int]] = {"open": [m.call_open or 0], "close": [m.call_close or 0], "body": body}
    ids = [i for piece in pieces for i in parts.get(piece, [piece])]
    ids = [i for i in ids if i < template.tokenizer.vocab_size]
    parsed = template.parse(ids)
    parsed.message()
    assert all(0 <= c.span[0] < c.span[1] <= len(ids) for c in parsed.tool_calls)


def xml(**arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=edit>\n{values}</function>\n</tool_call>"


def only(template: ChatTemplate, text: str) -> Any:
    parsed = parse(template, f"why\n</think>\n\n{text}<|im_end|>")
    (call,) = parsed.tool_calls
    return call


def test_values_of_array_type_are_never_evaluated(speaking: Compile):
    """verl#6542: array parameters were evaluated as Python, in the trainer's process."""
    template = speaking("qwen3_6")
    code = '__import__("os").getpid()'
    call = only(template, xml(items=code))
    assert json.loads(call.arguments) == {"items": code}
    assert "'items' is declared array, but is not JSON" in call.error
    call = only(template, xml(items="[1, 2, 3]"))
    assert (json.loads(call.arguments), call.error) == ({"items": [1, 2, 3]}, None)
    started = time.thread_time()
    call = only(template, xml(items="[" * 50_000))
    assert "nested deeper" in call.error
    assert "nested deeper" in only(template, xml(items="[" * 50_000 + "]" * 50_000)).error
    assert only(template, xml(items='["' + '\\"' * 200_000)).error
    assert only(template, xml(items="1" * 50_000)).error
    assert time.thread_time() - started < 5


def test_nothing_that_evaluates_is_reachable_from_parse():
    """verl#6542, for every module of this package that `parse` imports."""
    waiting, seen = ["token_tracking.parsing.parse", "token_tracking.compiler.probe_calls"], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        spec = util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            waiting += [name for name in _imports(node) if name.startswith("token_tracking.")]
            banned = {"eval", "exec", "literal_eval", "__import__", "import_module"}
            if isinstance(node, ast.Name):
                assert node.id != "compile", (module, node.lineno)
            if isinstance(node, ast.Name | ast.Attribute):
                assert (node.id if isinstance(node, ast.Name) else node.attr) not in banned, (
                    module,
                    node.lineno,
                )
            for name in _imports(node):
                assert name.split(".")[0] not in {"pickle", "marshal", "shelve", "ast", "yaml", "dill"}, (
                    module
                )
    assert {
        "token_tracking.parsing.call_forms",
        "token_tracking.parsing.strict_json",
        "token_tracking.parsing.argument_types",
        "token_tracking.parsing.literals",
        "token_tracking.parsing.bare_calls",
        "token_tracking.parsing.header_scan",
    } <= seen


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (
            f"{node.module}.{alias.name}"
            for alias in node.names
            if _is_package(node.module) and util.find_spec(f"{node.module}.{alias.name}")
        )


def _is_package(module: str) -> bool:
    spec = util.find_spec(module) if module.startswith("token_tracking") else None
    return spec is not None and spec.submodule_search_locations is not None


@pytest.mark.parametrize(
    ("key", "written", "value", "problem"),
    [
        ("path", "3", "3", None),
        ("path", "  [1]\n", "  [1]\n", None),
        ("free", "true", "true", None),
        ("count", "3", 3, None),
        ("count", " 3 ", 3, None),
        ("count", "3.5", "3.5", "another type"),
        ("count", "three", "three", "not JSON"),
        ("count", "NaN", "NaN", "not JSON"),
        ("count", "0x10", "0x10", "not JSON"),
        ("ratio", "1e3", 1000.0, None),
        ("ratio", "1e999", "1e999", "not a finite number"),
        ("force", "true", True, None),
        ("force", "True", True, None),
        ("force", "TRUE", "TRUE", "not JSON"),
        ("force", "1", "1", "another type"),
        ("items", "[1, 'a']", "[1, 'a']", "not JSON"),
        ("items", '{"a": 1}', '{"a": 1}', "another type"),
        ("options", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}', "stands twice"),
        ("options", '{"a": [true]}', {"a": [True]}, None),
        ("limit", "None", None, None),
        ("limit", "null", None, None),
        ("either", "3", "3", None),
        ("either", "[3]", [3], None),
        ("either", "[3", "[3", None),
        ("mode", "a", "a", None),
    ],
)
def test_values_by_schema(key: str, written: str, value: Any, problem: str | None, speaking: Compile):
    call = only(speaking("qwen3_5_think"), xml(**{key: written}))
    assert json.loads(call.arguments) == {key: value}
    assert (call.error is None) if problem is None else (problem in call.error)


def test_odd_schemas_declare_nothing():
    loop = {"$ref": "#/properties/a"}
    tools: list[Any] = [
        {"function": {"name": "t", "parameters": {"properties": {"a": loop, "b": 3, "c": {"type": "file"}}}}},
        {"name": "u", "parameters": {"properties": {"a": {"allOf": [{"type": "array"}]}}}},
        {"name": 3},
        {},
    ]
    types = ArgumentTypes(tools)
    assert all("string" in types.of("t", key) for key in "abcd")
    assert types.of("u", "a") == {"array"}
    assert decode("x", types.of("t", "a"), {}) == ('"x"', None)


GOOD = xml(path="ls")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("<tool_call>\n<function=edit>\n<parameter=path>\nls\n</function>\n</tool_call>", "is not closed"),
        (
            "<tool_call>\n<function=edit>\n<parameter=path>\nls\n</parameter>\n</tool_call>",
            "does not end with",
        ),
        ("<tool_call>\n<function=edit>\n<parameter=path\nls\n</tool_call>", "not closed"),
        ("<tool_call>\n<func=edit>\n</tool_call>", "does not begin with '<function='"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "no name"),
        ("<tool_call>\n<function=edit>\nls\n</function>\n</tool_call>", "does not end with"),
        ("<tool_call>\n<function=edit", "missing after the name"),
        ('<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>', "does not begin with"),
        ("<tool_call></tool_call>", "does not begin with"),
        (xml(count="three"), "is declared integer"),
        (GOOD.replace("</function>", "<parameter=path>\nx\n</parameter>\n</function>"), "stands twice"),
    ],
)
def test_a_malformed_call_leaves_the_others(bad: str, why: str, speaking: Compile):
    template = speaking("qwen3_6")
    encode = template.tokenizer.encode
    if not bad.endswith("</tool_call>"):
        bad += "</tool_call>"
    head, text = "why\n</think>\n\n", f"{GOOD}\n{bad}\n{GOOD}"
    parsed = parse(template, f"{head}{text}<|im_end|>")
    first, wrong, last = parsed.tool_calls
    assert (first.error, last.error, first.name, last.name) == (None, None, "edit", "edit")
    assert why in wrong.error
    assert parsed.error == wrong.error
    start = len(encode(f"{head}{GOOD}\n"))
    assert wrong.span == (start, start + len(encode(bad)))
    assert parsed.message() == {"role": "assistant", "content": text, "reasoning_content": "why"}
    history = [{"role": "user", "content": "q"}, parsed.message()]
    assert text in template.render(history, add_generation_prompt=False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe"])
def test_a_call_cut_at_the_token_limit_is_no_call(name: str, speaking: Compile):
    """vllm#58228: a turn cut at max_tokens reported tool_calls. Every place to cut is tried."""
    template = speaking(name)
    calls = [wire("edit", '{"path": "a b"}'), wire("edit", '{"count": 3}')]
    text = sampled(
        template, {"role": "assistant", "content": "Say.", "reasoning_content": "why", "tool_calls": calls}
    )
    ids = template.tokenizer.encode_plain(text)
    whole = template.parse(ids)
    assert whole.error is None
    second = whole.tool_calls[1].span
    for cut in range(second[0] + 1, second[1]):
        parsed = template.parse(ids[:cut])
        assert [c.error for c in parsed.tool_calls] == [None, "the tool call was not closed"]
        assert parsed.tool_calls[1].span == (second[0], cut)
        assert parsed.error == "the tool call was not closed"
        message = parsed.message()
        assert "tool_calls" not in message
        assert template.tokenizer.decode(ids[:cut]).endswith(message["content"])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_a_call_that_was_not_closed_does_not_take_the_next(name: str, speaking: Compile):
    template = speaking(name)
    text = sampled(
        template, {"role": "assistant", "content": "", "tool_calls": [wire("edit", '{"path": "x"}')]}
    )
    good = text[text.index("<tool_call>") :]
    broken = good.removesuffix("</tool_call>")[:-12]
    parsed = parse(template, f"why\n</think>\n\n{broken}{good}" if name != "qwen3" else f"{broken}{good}")
    assert [c.error for c in parsed.tool_calls] == ["the tool call was not closed", None]
    assert json.loads(parsed.tool_calls[1].arguments) == {"path": "x"}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe"])
@pytest.mark.parametrize(
    "path", ["echo </tool_call>", "echo <tool_call>", "<tool_call>\nx\n</tool_call> y", "</think>"]
)
def test_markers_in_arguments_are_text(name: str, path: str, speaking: Compile):
    template = speaking(name)
    text = sampled(
        template,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "why",
            "tool_calls": [wire("edit", json.dumps({"path": path})), wire("edit", '{"path": "b"}')],
        },
    )
    parsed = parse(template, text)
    assert parsed.error is None
    assert [json.loads(c.arguments)["path"] for c in parsed.tool_calls] == [path, "b"]


def test_hostile_markers_take_linear_time(speaking: Compile):
    for name in ("qwen3_6", "qwen3"):
        template = speaking(name)
        m = template.facts.markers
        opened, closed, end = m.call_open or 0, m.call_close or 0, m.reasoning_close or 0
        word = template.tokenizer.encode("<function=edit>\n<parameter=path>\nx")
        shapes = (
            [opened] * 8_000 + [closed],
            [opened, closed] * 4_000,
            [opened] * 4_000 + [closed] * 4_000,
            [opened, *[opened, closed] * 4_000, closed],
            [opened, *[closed] * 8_000],
            [opened, *word] * 3_000 + [closed],
            ([opened, *word] * 2 + [closed]) * 1_000 + [closed] * 1_000,
            [opened, *word * 3_000, closed],
        )
        for shape in shapes:
            started = time.thread_time()
            assert template.parse([end, *shape] if m.prefilled else shape).error is not None
            assert time.thread_time() - started < 3


def test_a_wrong_value_does_not_unmake_a_call(speaking: Compile):
    call = only(speaking("qwen3_6"), xml(path="a <tool_call>", count="three"))
    assert "is declared integer" in call.error
    assert json.loads(call.arguments) == {"path": "a <tool_call>", "count": "three"}


def test_blanks_between_the_words_may_vary(speaking: Compile):
    """What models write is not always what the template prints; it is read, and kept as sampled."""
    call = only(
        speaking("qwen3_6"), "<tool_call><function=edit><parameter=path>ls</parameter></function></tool_call>"
    )
    assert (call.error, json.loads(call.arguments)) == (None, {"path": "ls"})
    text = "\n<think></think>\n<tool_call>edit<arg_key>path</arg_key><arg_value>ls</arg_value></tool_call>"
    parsed = parse(speaking("glm4moe"), text)
    assert (parsed.error, json.loads(parsed.tool_calls[0].arguments)) == (None, {"path": "ls"})


def test_printed_ids_are_kept_verbatim(speaking: Compile):
    """sglang#10600, vllm#50782: Kimi's call ids were renumbered."""
    template = speaking("kimi")
    begin, end, call, argument, close = KIMI_TOKENS
    first, second = f'functions.edit:41{argument}{{"path":  "x"}}', f"edit{argument}{{}}"
    text = f"go{begin}{call}{first}{close}{call}{second}{close}{end}"
    parsed = parse(template, text)
    assert parsed.error is None
    assert [(c.id, c.name, c.arguments) for c in parsed.tool_calls] == [
        ("functions.edit:41", "edit", '{"path":  "x"}'),
        ("edit", "edit", "{}"),
    ]
    assert sampled(template, parsed.message()) == text


@pytest.mark.parametrize("name", ["qwen3_6", "glm4moe"])
def test_arguments_as_json_text(name: str, speaking: Compile, caplog: pytest.LogCaptureFixture):
    """AReaL#1420: text of a mapping is decoded for rendering; what is no JSON object takes a fall-back."""
    template = speaking(name)

    def shown(arguments: Any) -> str:
        call = wire("edit", arguments)
        return sampled(template, {"role": "assistant", "content": "", "tool_calls": [call]})

    assert shown('{"path": "ab"}') == shown({"path": "ab"})
    assert shown("") == shown("{}") == shown(None)
    before = template.unreadable_arguments
    with caplog.at_level(logging.WARNING):
        assert shown('{q:"') == shown({"arguments": '{q:"'})
        assert shown("[1]") == shown({"arguments": "[1]"})
    assert template.unreadable_arguments == before + 2
    assert len(caplog.records) == (before == 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "glm4moe"])
def test_three_turns_of_calls_equal_full_renders(name: str, speaking: Compile):
    template = speaking(name)
    conversation = Conversation(template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    turns: list[list[dict[str, Any]]] = [
        [{"path": "a\nb", "count": 3}],
        [{"items": [1, "x"], "force": True}, {"path": "", "limit": None}],
        [{}, {"options": {"k": [True, None]}}, {"ratio": 0.5}],
    ]
    for number, arguments in enumerate(turns):
        conversation.advance(messages)
        calls = [wire("edit", json.dumps(a), f"call_{n}") for n, a in enumerate(arguments)]
        said = {
            "role": "assistant",
            "content": "Say." if number else "",
            "reasoning_content": f"why {number}",
            "tool_calls": calls,
        }
        record = completion(conversation, sampled(template, said))
        if name == "glm4moe":  # the header of the tool results, not that of a user
            stop = template.tokenizer.token_to_id("<|observation|>")
            ids = np.array([*record.output_ids[:-1], stop], np.int32)
            record = msgspec.structs.replace(record, output_ids=ids, stop_id=stop)
        message = dict(conversation.record(record))
        assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == arguments
        results = [
            {"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in range(len(calls))
        ]
        messages = [*messages, message, *results]
        conversation.advance(messages)
        full = template.render(messages, add_generation_prompt=True)
        assert conversation.prompt_ids().tolist() == template.tokenizer.encode(full)
    report = conversation.report()
    assert report.broken == 0
    assert len(conversation.branches) == 1
    assert template.unreadable_arguments == 0 or name in {"qwen3_6", "glm4moe"}


def test_strict_json_and_the_recursion_limit():
    limit = sys.getrecursionlimit()
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 65 + "]" * 65):
        with pytest.raises(ValueError, match="nested deeper"):
            strict_json.read(text)
    assert strict_json.read("[" * 64 + "]" * 64)
    assert strict_json.read('"' + "[" * 100_000 + '"') == "[" * 100_000
    for text in (
        "",
        "nul",
        "NaN",
        "-Infinity",
        "1e400",
        "[1,]",
        "'a'",
        "01",
        "1 2",
        '{"a": 1, "a": 1}',
        '"\n"',
    ):
        with pytest.raises(ValueError, match=r".+"):
            strict_json.read(text)
    assert sys.getrecursionlimit() == limit
