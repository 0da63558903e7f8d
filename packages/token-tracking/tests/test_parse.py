from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_tracking import ChatTemplate, ParsedCompletion
from token_tracking.backends.hf import HFTokenizer
from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.call_forms import JsonForm, read
from token_tracking.parsing.call_scan import Markers
from token_tracking.parsing.parse import CompletionParser


@pytest.fixture(scope="module")
def parse(compiled: Callable[..., ChatTemplate]) -> Callable[[str], ParsedCompletion]:
    template = compiled("qwen3")
    return lambda text: template.parse(template.tokenizer.encode(text))


Parse = Callable[[str], ParsedCompletion]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def test_reasoning_content_and_calls(parse: Parse):
    parsed = parse(f"<think>\nwhy\n</think>\n\nSay.\n{CALL}\n{CALL}<|im_end|>")
    assert (parsed.reasoning, parsed.content, parsed.error) == ("why", "Say.", None)
    assert [(c.id, c.name, c.arguments) for c in parsed.tool_calls] == [
        ("call_0", "bash", '{"command": "ls"}'),
        ("call_1", "bash", '{"command": "ls"}'),
    ]
    assert parsed.message()["reasoning_content"] == "why"


def test_plain_text_stays_as_it_is(parse: Parse):
    assert parse("  two\n\nlines \n<|im_end|>").message() == {
        "role": "assistant",
        "content": "  two\n\nlines \n",
    }


def test_an_empty_think_pair_is_empty_reasoning(parse: Parse):
    parsed = parse("<think>\n\n</think>\n\nyes")
    assert (parsed.reasoning, parsed.content) == ("", "yes")


def test_arguments_are_kept_verbatim(parse: Parse):
    text = '{"b" :1.0,  "a":"\\u00e9\\n", "n": 1e3}'
    parsed = parse(f'<tool_call>\n{{"arguments": {text} , "name":"bash"}}\n</tool_call>')
    assert parsed.tool_calls[0].arguments == text
    assert parsed.error is None


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        ("not json", "not a JSON object"),
        ('{"name": "bash"}', "arguments are not an object"),
        ('{"name": "bash", "arguments": "ls"}', "arguments are not an object"),
        ('{"name": 3, "arguments": {}}', "no name"),
        ('{"name": "a", "name": "b", "arguments": {}}', "twice"),
        ('{"name": "a", "arguments": {}, "x": 1}', "unknown fields: x"),
        ('{"name": "a", "arguments": {}} tail', "text after the object"),
        ('{"name": "a", "arguments": ' + '{"a":' * 100_000, "nested deeper"),
        ("[" * 200_000, "nested deeper"),
        ("__import__('os').system('true')", "not a JSON object"),
        ("", "not a JSON object"),
    ],
)
def test_malformed_calls_say_why_and_stay_content(inner: str, why: str, parse: Parse):
    text = f"Say.\n<tool_call>\n{inner}\n</tool_call>"
    parsed = parse(text)
    (call,) = parsed.tool_calls
    assert call.error is not None
    assert why in call.error
    assert parsed.error == call.error
    assert parsed.message() == {"role": "assistant", "content": text}


def test_cut_off_calls_and_reasoning(parse: Parse):
    assert (
        parse('<tool_call>\n{"name": "bash", "arguments": {}}').tool_calls[0].error
        == "the tool call was not closed"
    )
    parsed = parse("<think>\nwhy")
    assert (parsed.reasoning, parsed.content, parsed.error) == ("why", "", "the reasoning was not closed")


def test_text_around_calls_is_an_error(parse: Parse):
    assert parse(f"{CALL}\nmore").error == "text after the tool calls"
    assert parse(f"{CALL} and {CALL}").error == "text between tool calls"


def test_markers_inside_arguments_are_text_of_the_call(parse: Parse):
    parsed = parse('<tool_call>\n{"name": "bash", "arguments": {"command": "echo <think>"}}\n</tool_call>')
    assert (parsed.reasoning, parsed.error) == (None, None)
    assert parsed.tool_calls[0].arguments == '{"command": "echo <think>"}'


def test_a_second_opening_of_prefilled_reasoning_is_skipped(qwen3: HFTokenizer):
    """verl#2189: the prompt opened the reasoning and the model opens it again."""
    markers = Markers(reasoning_open=151667, reasoning_close=151668, prefilled=True)
    parser = CompletionParser(qwen3, markers, frozenset([151645]))
    parsed = parser.parse(qwen3.encode("<think>\nwhy\n</think>\n\nyes<|im_end|>"))
    assert (parsed.reasoning, parsed.content) == ("why", "yes")
    assert not parser.in_reasoning(qwen3.encode("a</think>b"))
    assert parser.in_reasoning(qwen3.encode("still"))


def test_many_openings_take_linear_time(qwen3: HFTokenizer):
    markers = Markers(call_open=151657, call_close=151658)
    parsed = CompletionParser(qwen3, markers, frozenset()).parse([151657] * 50_000 + [151658])
    assert parsed.error is not None
    parsed = CompletionParser(qwen3, markers, frozenset()).parse([151657, 151658] * 20_000)
    assert len(parsed.tool_calls) == 20_000


@given(st.lists(st.integers(0, 151668), max_size=60))
def test_no_ids_make_the_parser_raise(compiled: Callable[..., ChatTemplate], ids: list[int]):
    template = compiled("qwen3")
    template.parse(ids).message()
    template.in_reasoning(ids)


@given(st.text())
def test_no_text_makes_the_call_reader_raise(text: str):
    call = read(JsonForm(), text, ArgumentTypes(()))
    assert call.error is None or call.arguments == text
