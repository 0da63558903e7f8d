"""Every text that a message holds is printed, or the message is refused: nothing is dropped in silence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from token_tracking import ChatTemplate, Conversation, TemplateError, Tokenizer, UnsupportedContentError
from token_tracking.compiler.rendering import Sandbox
from token_tracking.testing import completion

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'ROLE' %}PRINT{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def ask(conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
    conversation.advance(messages)
    return conversation.template.tokenizer.decode(conversation.prompt_ids().tolist())


def prompt(template: ChatTemplate, messages: list[Message]) -> str:
    return ask(Conversation(template), messages)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3", "llava_next"])
def test_templates_that_print_parts_alone_are_given_parts(name: str, compiled: Compile):
    template = compiled(name, family=True, tools=False)
    assert template.facts.wrapped >= {"user", "assistant"}
    part = {"type": "text", "text": "HELLO"}
    assert prompt(template, [user("HELLO")]) == prompt(template, [user([part])])
    assert "HELLO" in prompt(template, [user("HELLO")])
    conversation = Conversation(template)
    conversation.advance([user("one")])
    conversation.record(completion(conversation, "two"))
    conversation.advance([*conversation.messages, user("three")])
    text = template.tokenizer.decode(conversation.prompt_ids().tolist())
    assert [word for word in ("one", "two", "three") if word in text] == ["one", "two", "three"]
    conversation.record(completion(conversation, "four"))
    assert conversation.report().broken == 0


def test_a_second_part_is_not_lost(qwen3: Tokenizer):
    source = CHAT.replace("ROLE", "user").replace("PRINT", "{{ m.content[0].text }}")
    template = ChatTemplate.compile(qwen3, source)
    assert (template.facts.wrapped, template.facts.prints_parts & {"user"}) == ({"user"}, set())
    assert "HELLO" in prompt(template, [user("HELLO")])
    parts = [{"type": "text", "text": word} for word in ("HELLO", "WORLD")]
    with pytest.raises(UnsupportedContentError, match="2 content parts"):
        prompt(template, [user(parts)])


def test_parts_of_results_alone(qwen3: Tokenizer):
    template = ChatTemplate.compile(qwen3, CHAT.replace("ROLE", "tool").replace("PRINT", PARTS))
    assert template.facts.wrapped == {"tool"}
    said = {"role": "assistant", "content": "x"}
    assert "HELLO" in prompt(template, [user("q"), said, {"role": "tool", "content": "HELLO"}])


def test_a_user_text_that_is_not_printed_is_refused_at_once(qwen3: Tokenizer):
    with pytest.raises(TemplateError, match="renders a user message without its text"):
        ChatTemplate.compile(qwen3, CHAT.replace("ROLE", "user").replace("PRINT", ""))


@pytest.mark.parametrize("role", ["tool", "system", "assistant"])
def test_a_role_that_is_dropped_is_refused_by_message(role: str, qwen3: Tokenizer):
    template = ChatTemplate.compile(qwen3, CHAT.replace("ROLE", role).replace("PRINT", ""))
    assert template.describe()["content_not_printed"] == [role]
    assert prompt(template, [user("q"), {"role": role, "content": " "}, user("q")])
    with pytest.raises(TemplateError, match=rf"message 1 \({role}\): the chat template does not print"):
        prompt(template, [user("q"), {"role": role, "content": "HELLO"}, user("q")])


def test_a_role_of_its_own_is_tried_when_it_comes(compiled: Compile):
    """Qwen3's template passes over roles that it does not know; Qwen2.5's prints system messages anywhere."""
    with pytest.raises(TemplateError, match=r"message 0 \(developer\)"):
        prompt(compiled("qwen3"), [{"role": "developer", "content": "HELLO"}, user("q")])
    assert "HELLO" in prompt(compiled("qwen2_5"), [user("q"), {"role": "system", "content": "HELLO"}])


def test_a_place_in_which_a_message_is_dropped_is_refused(compiled: Compile):
    """Gemma 4 prints results with the calls that they answer; a malformed call is no call."""
    template = compiled("gemma4_v5", family=True)
    conversation = Conversation(template)
    conversation.advance([user("q")])
    conversation.record(completion(conversation, "bash(ls"))
    result = {"role": "tool", "tool_call_id": "call_0", "name": "bash", "content": "HELLO"}
    with pytest.raises(TemplateError, match=r"message 2 \(tool\).* at this place"):
        ask(conversation, [*conversation.messages, result])


def test_content_beside_calls_is_described(compiled: Compile):
    template = compiled("llama3_1", family=True)
    assert template.describe()["content_not_printed"] == ["assistant with tool calls"]


EXPRESSIONS = [
    "{{ m.content }}{{ m.absent }}{{ m.items() | list }}{{ m.get('content') }}{{ m.keys is defined }}",
    "{% set ns = namespace(n=0, f='x') %}{% set ns.n = 3 %}{{ ns.n }}{{ ns.f.upper() }}{{ ns.absent }}",
    "{% for x in 'ab' %}{{ loop.index0 }}{{ loop.last }}{{ loop.cycle('u', 'v') }}{{ loop.no }}{% endfor %}",
    "{{ m.__class__ }}|{{ m.update }}|{{ m['items'] }}",
]


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_the_quick_sandbox_says_what_the_slow_one_says(source: str):
    def said(kind: type[ImmutableSandboxedEnvironment]) -> str:
        try:
            return kind().from_string(source).render(m={"content": "c", "items": 1, "update": 2})
        except Exception as error:  # an unsafe attribute is refused when it is printed
            return f"{type(error).__name__}: {error}"

    assert said(Sandbox) == said(ImmutableSandboxedEnvironment)
