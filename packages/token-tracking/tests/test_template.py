import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from token_tracking import ChatTemplate, TemplateError, UnsupportedContentError
from token_tracking.backends.hf import HFTokenizer
from token_tracking.compiler.rendering import JinjaTemplate
from token_tracking.testing import BASH_TOOL, trl_template, trl_templates

Compile = Callable[..., ChatTemplate]
NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)

CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "bash", "arguments": {"command": "ls <a> & 'b'"}},
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "terse é <b>"},
        {"role": "user", "content": " q1 \n"},
        {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
    ],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_0", "name": "bash", "content": "out"},
    ],
]


NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name.endswith("_training") else [])
    for name in sorted(trl_templates())
]


@pytest.mark.parametrize("name", NAMES)
def test_text_equals_transformers(name: str, qwen3: HFTokenizer, monkeypatch: pytest.MonkeyPatch):
    from transformers.utils import chat_template_utils

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)
    source = trl_template(name)
    variables = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<s>"}
    ours = JinjaTemplate(source, now=NOW)
    rendered = 0
    for messages in CONVERSATIONS:
        for tools in (None, [BASH_TOOL]):
            for generate in (False, True):
                arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": generate}
                try:
                    theirs = chat_template_utils.render_jinja_template(
                        [messages], chat_template=source, **arguments, **variables
                    )[0][0]
                except Exception:
                    with pytest.raises(TemplateError):
                        ours.render(messages, **arguments, variables=variables)
                    continue
                assert ours.render(messages, **arguments, variables=variables) == theirs
                rendered += 1
    assert rendered or name.startswith("llava")


def test_templates_are_sandboxed():
    template = JinjaTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", now=NOW)
    with pytest.raises(TemplateError, match="unsafe"):
        template.render([{"role": "user"}], tools=None, add_generation_prompt=False, variables={})


def test_a_templates_own_words_are_in_the_error(qwen3: HFTokenizer):
    with pytest.raises(TemplateError, match="no users here"):
        ChatTemplate.compile(qwen3, "{{ raise_exception('no users here') }}")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate.compile(qwen3, "a\n{% if %}")


def test_the_clock_is_passed_in(qwen3: HFTokenizer):
    source = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    template = ChatTemplate.compile(qwen3, source, now=NOW)
    assert template.render([{"role": "user", "content": "x"}], add_generation_prompt=False) == "01 Mar 2026 x"


def test_images_are_refused_by_name(compiled: Compile):
    content = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "what is it"}]
    with pytest.raises(UnsupportedContentError, match="message 0"):
        compiled("qwen3").render([{"role": "user", "content": content}], add_generation_prompt=True)


def test_qwen3_program(compiled: Compile):
    learnt = compiled("qwen3").describe()
    assert learnt["delta"] == "program"
    joints = {pair: joint["text"] for pair, joint in learnt["joints"].items()}
    assert joints["calls -> tool"] == "<|im_end|>\n<|im_start|>user\n<tool_response>\n"
    assert joints["tool -> tool"] == "\n</tool_response>\n<tool_response>\n"
    assert joints["tool -> generate"] == "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert learnt["joints"]["assistant -> user"]["ids"] == [151645, 198, 151644]
    assert learnt["rewrites_history_after"] == ["user"]
    assert learnt["stop_ids"] == {"<|im_end|>": 151645}
    assert learnt["after_final_turn"] == "<|im_end|>\n"
    assert learnt["markers"] == {
        "reasoning_open": "<think>",
        "reasoning_close": "</think>",
        "call_open": "<tool_call>",
        "call_close": "</tool_call>",
    }


def test_prefill_is_prompt(compiled: Compile):
    assert compiled("qwen3", enable_thinking=False).facts.prefill == "<think>\n\n</think>\n\n"
    thinking = compiled("qwen3_6")
    assert thinking.facts.prefill == "<think>\n"
    assert thinking.facts.markers.prefilled
    assert thinking.parse(thinking.tokenizer.encode("why\n</think>\n\nyes<|im_end|>")).reasoning == "why"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "qwen3_training", "qwen3_8", "lfm2_v2"])
def test_templates_that_keep_history_are_proven_stable(name: str, compiled: Compile):
    program = compiled(name).program
    assert program is not None
    assert program.stable == {"user", "tool"}
    assert program.trials >= 100


def test_glm_stops_with_the_next_header(compiled: Compile):
    """THUDM/slime#1490, renderers#66: the stop token is the next turn's header, and it is the model's."""
    template = compiled("glm4moe", family=True)
    assert template.program is not None
    tokens = {template.tokenizer.decode([i]) for i in template.stop_ids}
    assert {"<|user|>", "<|observation|>"} <= tokens
    assert template.facts.end_text == ""


def test_a_template_without_program_says_so_once(qwen3: HFTokenizer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate.compile(qwen3, trl_template("gemma"))
    assert template.program is None
    assert template.refusal is not None
    assert caplog.text.count("full renders") == 1
    assert template.describe()["refused_because"] == template.refusal


def test_tool_call_arguments_come_in_the_form_that_the_template_wants(compiled: Compile):
    text = '{"command":   "ls"}'
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": text}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert text in compiled("qwen3").render(messages, add_generation_prompt=False)
    shown = compiled("qwen3_6").render(messages, add_generation_prompt=False)
    assert "<parameter=command>\nls\n</parameter>" in shown
