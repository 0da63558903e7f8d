"""Every way in which a history does not go on has a name: in plan, branch, report and snapshot."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from token_tracking import ChatTemplate, Conversation, GenerationRecord, SnapshotError
from token_tracking.snapshot import KIND_CONVERSATION, ConversationImage, pack, unpack
from token_tracking.testing import IDENTITY, completion

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "sys"}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


START: list[Message] = [SYSTEM, user("fix it")]


def talk(template: ChatTemplate, *answers: str, **kwargs: Any) -> tuple[Conversation, list[Message]]:
    """A conversation of plain turns, each answered by a user but the last, and its history."""
    conversation, history = Conversation(template, **kwargs), list(START)
    for number, answer in enumerate(answers):
        history += [user(f"q{number}")] if number else []
        conversation.advance(history)
        history.append(dict(conversation.record(completion(conversation, answer))))
    return conversation, history


def held_text(conversation: Conversation) -> str:
    branch = conversation.branches[conversation.current]
    return branch.template.tokenizer.decode(branch.ledger.ids.tolist())


SUMMARY = "All four files were read, the fault is in b.py, line 3."


@pytest.mark.parametrize(
    ("change", "kind", "cause"),
    [
        (lambda h: [*h, user("on")], "append", "append"),
        (lambda h: h[:-1], "rewind", "retry"),
        (lambda h: h[:2], "rewind", "retry"),
        (lambda h: [*h[:-1], user("other")], "rewind", "last_turn_edited"),
        (lambda h: [*h[:-1], h[-1] | {"content": "better"}, user("on")], "rewind", "last_turn_edited"),
        (lambda h: [*h[:3], user("q0, edited"), *h[4:], user("on")], "branch", "message_edited"),
        (lambda h: [SYSTEM, user("edited"), *h[2:], user("on")], "branch", "message_edited"),
        (lambda h: [SYSTEM | {"content": "other"}, *h[1:], user("on")], "branch", "message_edited"),
        (lambda h: [*h[:2], user("in short: done")], "branch", "compaction"),
        (lambda h: [SYSTEM, user("in short"), h[-1], user("on")], "branch", "compaction"),
        (lambda h: [SYSTEM, user(f"So far: {SUMMARY}")], "branch", "compaction"),
        (lambda h: [SYSTEM, user("find every caller")], "branch", "sub_agent"),
        (lambda h: [user("find every caller")], "branch", "sub_agent"),
        (lambda h: [SYSTEM | {"content": "you search"}, user("fix it")], "branch", "sub_agent"),
    ],
)
def test_each_break_has_its_name(
    change: Callable[[list[Message]], list[Message]], kind: str, cause: str, compiled: Compile
):
    conversation, history = talk(compiled("qwen2_5"), "a0", "a1", SUMMARY)
    plan = conversation.advance(change(history))
    assert (plan.kind, plan.cause) == (kind, cause)
    conversation.record(completion(conversation, "ok"))
    report = conversation.report()
    assert report.broken == 0, report.lines()
    if kind == "append":
        assert [branch.cause for branch in report.branches] == ["start"]
        return
    assert [branch.cause for branch in report.branches] == ["start", cause]
    assert report.branches[1].parent == (None if cause == "sub_agent" else 0)
    assert any(f"[{cause}]" in line for line in report.lines())
    again = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    assert again.branches[1].cause == cause
    parts = conversation.samples(**IDENTITY)
    assert sum(part.trained_tokens for part in parts) == conversation.sampled_tokens


def test_a_prompt_that_was_not_answered_is_edited_in_place(compiled: Compile):
    conversation, history = talk(compiled("qwen2_5"), "a0")
    conversation.advance([*history, user("wrong")])
    plan = conversation.advance([*history, user("right")])
    assert (plan.kind, plan.cause) == ("rewind", "pending_edited")
    assert len(conversation.branches) == 1


def test_what_the_template_rewrites_is_named(compiled: Compile):
    """verl#6854, prime-rl#1334: stripped thinking. Of a turn without thinking nothing sampled is lost."""
    conversation, history = talk(compiled("qwen3"), "<think>\nwhy\n</think>\n\nOne.")
    assert conversation.plan([*history, user("more")]).cause == "thinking_stripped"
    conversation, history = talk(compiled("qwen3", enable_thinking=False), "One.")
    plan = conversation.advance([*history, user("more")])
    assert (plan.kind, plan.cause) == ("append", "append")
    conversation.record(completion(conversation, "Two."))
    assert conversation.report().rewrites["empty think pair dropped"] == 1


def test_other_tools_are_a_branch_and_a_sub_agent_with_other_tools_a_root(compiled: Compile):
    """nano-rlm#73: a summary asked for without tools changes the system block."""
    without = compiled("qwen2_5", tools=False)
    conversation, history = talk(compiled("qwen2_5"), "a0")
    plan = conversation.plan([*history, user("summarise")], template=without)
    assert (plan.kind, plan.cause) == ("branch", "tools_changed")
    plan = conversation.advance([SYSTEM, user("find every caller")], template=without)
    assert (plan.kind, plan.cause) == ("branch", "sub_agent")
    conversation.record(completion(conversation, "in a.py"))
    plan = conversation.advance([*history, tool("in a.py")])
    assert (plan.cause, conversation.current, conversation.report().broken) == ("append", 0, 0)


def test_a_first_prompt_that_nothing_answered_stays_the_start(compiled: Compile):
    conversation = Conversation(compiled("qwen2_5"))
    conversation.advance(START)
    assert conversation.advance(START, template=compiled("qwen2_5", tools=False)).cause == "tools_changed"
    assert [(b.cause, b.parent) for b in conversation.branches] == [("start", None)]


# --- a history that no proof has seen


THOUGHT = "<think>\nhm\n</think>\n\nok"


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ([SYSTEM], "branch"),
        ([SYSTEM, user("<tool_response>\nres\n</tool_response>")], "branch"),
        ([SYSTEM, user("fix it")], "append"),
        ([SYSTEM, {"role": "user", "content": [{"type": "text", "text": "fix it"}]}], "append"),
        ([user("fix it"), {"role": "assistant", "content": "how?"}, user("so")], "append"),
    ],
)
def test_a_history_without_a_question_is_compared_with_its_render(
    start: list[Message], kind: str, compiled: Compile
):
    """Compaction and sub-agents give histories without a user message; Qwen3 then strips all thinking."""
    template = compiled("qwen3")
    conversation = Conversation(template)
    conversation.advance(start)
    conversation.record(completion(conversation, THOUGHT))
    assert conversation.advance([*conversation.messages, tool("res")]).kind == kind
    branch = conversation.branches[conversation.current]
    assert branch.proven(len(start), [tool("res")]) == (kind == "append")
    assert bool(template.unproven_beginnings) >= (kind == "branch")
    prompt = template.tokenizer.decode(conversation.prompt_ids().tolist())
    assert prompt == template.render(conversation.messages, add_generation_prompt=True)
    conversation.record(completion(conversation, "fin"))
    for render_all in (False, True):
        report = conversation.report(render_all=render_all)
        assert report.broken == 0, report.lines()


# --- open turns in several branches


def aborted(template: ChatTemplate) -> tuple[Conversation, Message]:
    conversation = Conversation(template)
    conversation.advance(START)
    record = completion(conversation, "partial answer", finish_reason="abort")
    return conversation, dict(conversation.record(record))


@pytest.mark.parametrize("length", [1, 5])
def test_a_list_of_another_branch_leaves_an_aborted_turn_open(length: int, compiled: Compile):
    conversation, _ = aborted(compiled("qwen2_5"))
    prompt = conversation.prompt_ids().tolist()
    plan = conversation.advance([user(f"q{number}") for number in range(length)])
    assert plan.cause == "sub_agent"
    conversation.record(completion(conversation, "found"))
    assert conversation.advance(START).cause == "resume"
    assert conversation.prompt_ids().tolist() == prompt


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("after", "kind", "cause"),
    [
        (lambda partial: [partial, user("go on")], "append", "append"),
        (lambda partial: [user("go on")], "rewind", "last_turn_edited"),
    ],
)
def test_a_list_that_goes_past_an_aborted_turn_closes_it_in_any_branch(
    elsewhere: bool, after: Callable[[Message], list[Message]], kind: str, cause: str, compiled: Compile
):
    conversation, partial = aborted(compiled("qwen2_5"))
    if elsewhere:
        conversation.advance([user("find every caller")])
        conversation.record(completion(conversation, "in a.py"))
    before = conversation.to_bytes()
    history = [*START, *after(partial)]
    plan = conversation.plan(history)
    assert conversation.to_bytes() == before
    assert conversation.advance(history) == plan
    assert (plan.kind, plan.cause) == (kind, cause)
    assert conversation.branches[0].messages[2] == partial
    conversation.record(completion(conversation, "done"))
    report = conversation.report()
    assert (report.broken, report.cut_off) == (0, 1), report.lines()
    assert not any("open" in line for line in report.lines())


# --- what a call costs


def python_calls(run: Callable[[], object]) -> int:
    """Function calls of Python code, a measure of work that no other process disturbs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_foreign_history_is_read_once(compiled: Compile):
    def cost(turns: int) -> int:
        conversation, history = talk(compiled("qwen2_5"), *[f"answer {n} {SUMMARY}" for n in range(turns)])
        other = [SYSTEM, *({**m, "content": f"x {n}"} for n, m in enumerate(history[1:])), user("on")]
        assert conversation.plan(other).cause == "sub_agent"
        return python_calls(lambda: conversation.plan(other))

    assert cost(40) < 2.5 * cost(20)


def test_answers_that_differ_from_their_tokens_are_printed_once(compiled: Compile):
    """What the template first printed for a turn was rendered anew, for each turn, at each turn."""

    def costs(turns: int) -> tuple[int, int]:
        conversation, spent = Conversation(compiled("qwen3")), 0
        for number in range(turns):
            history = [*conversation.messages, user(f"q{number}")]
            spent += python_calls(lambda history=history: conversation.advance(history))
            view = {"role": "assistant", "content": f"edited {number}"}
            conversation.record(completion(conversation, f"answer {number}"), view)
        assert len(conversation.branches) == 1
        return spent, python_calls(conversation.report)

    small, large = costs(12), costs(24)
    # A render per turn is quadratic over all turns; it was cubic (8 times as much).
    assert [a / b < 5 for a, b in zip(large, small, strict=True)] == [True, True], (small, large)


# --- cross-stops


def stopped(conversation: Conversation, text: str, stop: str) -> GenerationRecord:
    stop_id = conversation.template.tokenizer.token_to_id(stop)
    assert stop_id is not None
    ids = [*conversation.template.tokenizer.encode(text), stop_id]
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(ids, np.int32),
        finish_reason="stop",
        stop_id=stop_id,
    )


@pytest.mark.parametrize("policy", ["keep", "branch"])
def test_a_cross_stop_is_kept_or_ends_its_branch(policy: Any, compiled: Compile):
    """GLM stops as if for a tool, and a user speaks; neither header may get lost in silence."""
    template = compiled("glm4moe", family=True)
    conversation = Conversation(template, cross_stop=policy)
    history: list[Message] = [user("fix it")]
    conversation.advance(history)
    history.append(dict(conversation.record(stopped(conversation, "\n<think></think>\nfine", "<|user|>"))))
    conversation.advance([*history, user("go on")])
    history += [user("go on")]
    history.append(
        dict(conversation.record(stopped(conversation, "\n<think></think>\nlook", "<|observation|>")))
    )
    conversation = Conversation.from_bytes(conversation.to_bytes(), template)
    plan = conversation.advance([*history, user("no tools please")])
    conversation.record(stopped(conversation, "\n<think></think>\nok", "<|user|>"))
    report, text = conversation.report(), held_text(conversation)
    assert report.cross_stops == 1
    assert report.broken == 0, report.lines()
    parts = conversation.samples(**IDENTITY)
    assert sum(part.trained_tokens for part in parts) == conversation.sampled_tokens
    if policy == "keep":
        assert (plan.kind, plan.cause) == ("append", "append")
        assert "<|observation|><|user|>" in text
        assert conversation.findings() == {"cross_stop_kept": 1}
        assert any("another token" in line for line in report.lines())
    else:
        assert (plan.kind, plan.cause) == ("branch", "cross_stop")
        assert "<|observation|>" not in text
        assert "look<|user|>\nno tools please" in text
        assert conversation.findings() == {"cross_stop_branched": 1}
        assert [branch.shared_turns for branch in report.branches] == [0, 1]
        assert "stopped with <|observation|>" in plan.why


def test_an_edit_after_a_cross_stop_does_not_bring_it_back(compiled: Compile):
    """The turn stopped for a tool result; the harness then replaces the result by a user's words."""
    template = compiled("glm4moe", family=True)
    conversation = Conversation(template, cross_stop="branch")
    history: list[Message] = [user("fix it")]
    conversation.advance(history)
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    message: Message = {"role": "assistant", "content": "look", "tool_calls": [call]}
    history.append(
        dict(
            conversation.record(stopped(conversation, "\n<think></think>\nlook", "<|observation|>"), message)
        )
    )
    conversation.advance([*history, tool("a.py")])
    conversation.record(stopped(conversation, "\n<think></think>\nok", "<|user|>"))
    conversation.advance([*history, user("never mind")])
    conversation.record(stopped(conversation, "\n<think></think>\nfine", "<|user|>"))
    assert conversation.report().broken == 0
    assert conversation.branches[1].inherited == 0
    assert "<|observation|><|user|>" not in held_text(conversation)


def test_an_older_snapshot_is_refused_with_what_to_do(compiled: Compile):
    conversation, _ = talk(compiled("qwen2_5"), "a0")
    data = bytearray(conversation.to_bytes())
    data[8] = 2
    with pytest.raises(SnapshotError, match="snapshot version 2; this release reads version 3: open it with"):
        Conversation.from_bytes(bytes(data), conversation.template)
    image = unpack(KIND_CONVERSATION, conversation.to_bytes(), dict[str, Any])
    image["cross_stop"] = "drop"
    with pytest.raises(SnapshotError, match="cross_stop"):
        unpack(KIND_CONVERSATION, pack(KIND_CONVERSATION, image), ConversationImage)  # type: ignore[arg-type]


# --- the report: proof and render agree


JSON_CALL = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "ls {}"}}}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls {}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", f"<think>\nhm\n</think>\n\nlook\n{JSON_CALL}"),
        ("qwen2_5", f"look\n{JSON_CALL}"),
        # Its empty think pair is printed until a user speaks again: prompts before that are equal.
        ("qwen3_6", f"\n</think>\n\nlook\n\n{XML_CALL}"),
    ],
)
def test_a_proven_check_says_what_a_render_says(name: str, said: str, compiled: Compile):
    conversation, history = Conversation(compiled(name)), list(START)
    for number in range(14):
        conversation.advance(history)
        text = "\n</think>\n\ncut" if number == 5 else said.format(number)
        view = {"role": "assistant", "content": "another view"} if number == 11 else None  # not its tokens
        reply = dict(conversation.record(completion(conversation, text), view))
        history += [reply, tool(f"out {number}") if reply.get("tool_calls") else user("use a tool")]
    proven, rendered = conversation.report(), conversation.report(render_all=True)
    assert rendered.checked_by == {"render": 14}
    assert proven.checked_by["proof"] >= 1
    strip = [(c.branch, c.turn, c.verdict, c.rewrites, c.problem) for c in rendered.prompts]
    assert [(c.branch, c.turn, c.verdict, c.rewrites, c.problem) for c in proven.prompts] == strip
    assert proven.final == rendered.final
    assert "proven to begin the next one's render" in proven.lines()[-1]
    if name == "qwen3_6":
        assert [c.verdict for c in proven.prompts[:7]] == [*["equal"] * 6, "rewritten"]


def test_a_wrong_token_in_a_proven_prompt_is_found(compiled: Compile):
    template = compiled("qwen2_5")
    conversation, history = Conversation(template), list(START)
    said = 'look\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    for number in range(12):
        conversation.advance(history)
        history += [dict(conversation.record(completion(conversation, said))), tool(f"out {number}")]
    clean = conversation.report()
    (branch,) = conversation.branches
    turn = next(check.turn for check in clean.prompts if check.by == "proof")
    ids = branch.ledger._block.arrays["ids"]
    for at in (branch.turns[turn].start - 3, branch.turns[turn].start + 1):
        ids[at] -= 1
        assert conversation.report().broken + (conversation.report().final[0].verdict != "equal") >= 1
        ids[at] += 1
    assert conversation.report() == clean


def test_findings_are_lines_of_the_report(compiled: Compile):
    """AReaL#1420: arguments that are no JSON object take a stated fall-back, which is counted."""
    template = compiled("qwen3_6")
    conversation, history = Conversation(template), list(START)
    conversation.advance(history)
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": '{"q:'}}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    pad = template.tokenizer.token_to_id("<|image_pad|>")
    record = completion(conversation, "hm\n</think>\n\nlook")
    odd = GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array([*record.output_ids[:-1], pad, record.output_ids[-1]], np.int32),
        finish_reason="stop",
    )
    history += [dict(conversation.record(odd, message)), tool("no")]
    conversation.advance(history)
    conversation.record(completion(conversation, "ok\n</think>\n\nok"))
    assert conversation.findings() == {"media_placeholder": 1, "unreadable_arguments": 1}
    lines = conversation.report().lines()
    assert "1 tool call whose arguments are no JSON object: rendered as the value of one" in lines
    assert "1 answer with a sampled media placeholder (image, sound): kept, out of the loss" in lines
    assert conversation.report().as_dict()["findings"] == dict(conversation.findings())
