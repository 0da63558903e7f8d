import json
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from token_tracking import ChatTemplate, Conversation
from token_tracking.testing import completion
from token_tracking.view import render_html, render_terminal

Compile = Callable[..., ChatTemplate]
NASTY = "</script><script>alert(1)</script><!-- \u2028 & <b>x</b> \x1b[31m<|im_end|> \u4e16\U0001f642"


@pytest.fixture
def conversation(compiled: Compile) -> Conversation:
    held = Conversation(compiled("qwen3"))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": NASTY},
    ]
    held.advance(messages)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    held.record(
        completion(
            held,
            "<think>\nhm \U0001f469\u200d\U0001f680",
            finish_reason="abort",
            logprob=-0.5,
            weight_version=1,
        )
    )
    message = held.record(completion(held, f"\n</think>\n\n{call}", logprob=-1.5, weight_version=2))
    messages += [dict(message), {"role": "tool", "tool_call_id": "call_0", "content": NASTY}]
    held.advance(messages)
    messages += [dict(held.record(completion(held, "cut", finish_reason="length")))]
    held.advance([*messages, {"role": "user", "content": "go on"}])
    held.record(completion(held, "Done."))
    return held


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_is_self_contained_and_escaped(conversation: Conversation):
    page = render_html(conversation, title=NASTY, facts={"reward": "1.0", NASTY: NASTY})
    assert page.count("</script>") == 2
    assert "<script>alert" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?\w+:", page)
    assert "http://" not in page
    assert "https://" not in page
    assert "@DATA@" not in page
    assert "@TITLE@" not in page
    data = data_of(page)
    assert data["facts"][:2] == [["reward", "1.0"], [NASTY, NASTY]]
    assert ["turns", "3"] in data["facts"]


def test_what_is_filled_in_is_not_a_placeholder(conversation: Conversation):
    page = render_html(conversation, title="@DATA@ @LEVELS@", facts={"@TITLE@": "@DATA@"})
    assert "<title>@DATA@ @LEVELS@</title>" in page
    assert data_of(page)["facts"][0] == ["@TITLE@", "@DATA@"]


def test_every_token_is_on_the_page_once(conversation: Conversation):
    data = data_of(render_html(conversation, title="t"))
    tokenizer = conversation.template.tokenizer
    for branch, shown in zip(conversation.branches, data["branches"], strict=True):
        assert shown["ids"] == branch.ledger.ids.tolist()
        spans = [(block["start"], block["end"]) for block in shown["blocks"]]
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert spans[-1][1] == len(branch.ledger)
        text = "".join(shown["odd"].get(str(n), data["texts"][str(i)]) for n, i in enumerate(shown["ids"]))
        assert text == tokenizer.decode(shown["ids"])
        assert sum(count for _, count in shown["sources"]) == len(branch.ledger)


def test_turns_are_marked(conversation: Conversation):
    data = data_of(render_html(conversation, title="t"))
    first, second = data["branches"]
    assert [block["role"] for block in first["blocks"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    badges = [text for block in first["blocks"] for _, text in block["badges"]]
    assert "aborted and continued: 2 segments" in badges
    assert "cut off" in badges
    assert "thinking stripped" in second["fork"]
    assert first["lp"][first["blocks"][2]["end"] - 1] == -1.5
    assert None in first["lp"]


def test_terminal_text_cannot_move_the_cursor(conversation: Conversation):
    plain = render_terminal(conversation, colour=False)
    assert "\x1b" not in plain
    assert "\\x1b[31m" in plain
    assert "turn 0 · " in plain
    assert "\x1b[36m" in render_terminal(conversation)


def test_an_empty_conversation_has_a_page(compiled: Compile):
    page = render_html(Conversation(compiled("qwen3")), title="empty")
    assert data_of(page)["branches"][0]["blocks"] == []


def roles(conversation: Conversation, branch: int = 0) -> list[str]:
    data = data_of(render_html(conversation, title="t"))
    return [block["role"] for block in data["branches"][branch]["blocks"]]


def test_an_open_turn_is_not_broken(compiled: Compile):
    held = Conversation(compiled("qwen3"))
    held.advance([{"role": "user", "content": "go"}])
    held.record(completion(held, "I think", finish_reason="abort", logprob=-0.5))
    for shown in (render_terminal(held, colour=False), render_html(held, title="t")):
        assert "broken" not in shown.replace('"bad" if "broken', "")
        assert "open: aborted after 2 tokens" in shown
        assert "cut off" not in shown


def test_text_that_spells_a_control_token_looks_otherwise(conversation: Conversation):
    plain = render_terminal(conversation, colour=False)
    assert "\\<|im_end|>: with a backslash, text that spells a control token" in plain
    assert "\\x1b[31m\\<|im_end|> \u4e16" in plain
    assert "Done.<|im_end|>" in plain
    coloured = render_terminal(conversation)
    assert "\x1b[2m\x1b[4m<|im_start|>\x1b[0m" in coloured
    assert "\x1b[4m\\<|im_end|>" not in coloured


def test_headers_stand_with_their_messages(compiled: Compile):
    """Tools without a system message are the template's; a result's header belongs to the result."""
    held = Conversation(compiled("qwen3"))
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number in range(3):
        held.advance(messages)
        messages.append(dict(held.record(completion(held, f"<think>\nwhy {number}\n</think>\n\nok{call}"))))
        messages += [{"role": "tool", "tool_call_id": f"call_{number}", "content": f"out {number}"}]
    held.advance([*messages, {"role": "user", "content": "more"}])
    held.record(completion(held, "Done."))
    assert roles(held)[:4] == ["template", "user", "assistant", "tool"]
    assert roles(held, 1) == ["template", "user", *["assistant", "tool"] * 3, "user", "assistant"]
    plain = render_terminal(held, colour=False)
    assert plain.count("-- tool  12 tokens\n<|im_start|>user\n<tool_response>\nout") == 3
    assert "turn 0 (of the conversation: 3)" in plain
    assert "thinking stripped (turn 0 and 2 more)" in plain


def test_prompt_tokens_of_branches_say_so(conversation: Conversation):
    facts = dict(data_of(render_html(conversation, title="t"))["facts"])
    whole = sum(len(branch.ledger) - int(branch.ledger.mask.sum()) for branch in conversation.branches)
    assert facts["prompt tokens of all branches"] == f"{whole:,}"


@pytest.mark.browser
def test_a_browser_draws_the_page(conversation: Conversation, tmp_path: Path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    (tmp_path / "page.html").write_text(render_html(conversation, title="t"))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    command = [
        chromium,
        *flags,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    assert shown.count("<article") == sum(
        len(branch["blocks"]) for branch in data_of(render_html(conversation, title="t"))["branches"]
    )
    assert "sampled, trained" in shown
