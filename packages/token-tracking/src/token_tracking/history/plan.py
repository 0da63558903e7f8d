"""How a harness's message list continues a conversation: append, rewind, branch, or ambiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.checking.verify import Alignment, TurnText
from token_tracking.history.branch import Branch, Message
from token_tracking.history.causes import Cause, PlanKind, name_break
from token_tracking.messages import own
from token_tracking.template import ChatTemplate

_CLOSE = 200
"""Characters after a turn that hold all of its close."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a message list continues a conversation."""

    kind: PlanKind
    """`append`: the held tokens go on. `rewind`: the harness took back its last turn, or what came after it.
    `branch`: the held tokens cannot go on. `ambiguous`: two branches could be meant."""
    cause: Cause
    """The reason as a name, which does not change between releases."""
    why: str
    """The reason as a sentence."""
    new: tuple[Message, ...]
    """Messages that are not held yet."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what carries it out."""

    plan: Plan
    branch: int
    """The branch that goes on, or the parent of the new one."""
    history: tuple[dict[str, Any], ...] = ()
    """All messages of a new branch: those that are held, as they are held, and the new ones."""
    keep: int | None = None
    """Messages of the branch that stay when it goes on. None: a new branch begins."""
    shared: int = 0
    """Turns that a new branch begins with."""
    by_program: bool = False
    """The template's program covers all messages after the last turn."""
    closing: dict[str, Any] | None = None
    """The message of the branch's open turn, which the list goes past: it joins the branch first."""


def decide(
    branches: Sequence[Branch], current: int, messages: Sequence[Message], template: ChatTemplate | None
) -> Decision:
    """Plan without changing anything; see `Conversation.plan`."""
    passed = {at: branch.closed() for at, branch in enumerate(branches) if branch.passed_by(messages)}
    lines = [passed.get(at, branch) for at, branch in enumerate(branches)] if passed else branches
    decision = _decide(lines, current, messages, template)
    if decision.branch in passed and decision.plan.kind != "ambiguous":
        closing = passed[decision.branch].messages[-1]
        return msgspec.structs.replace(decision, closing=closing)
    return decision


def _decide(
    branches: Sequence[Branch], current: int, messages: Sequence[Message], template: ChatTemplate | None
) -> Decision:
    lengths = _shared_lengths(branches, current, messages)
    best = max(lengths)
    candidates = [index for index, length in enumerate(lengths) if length == best]
    if template is not None:
        wanted = template.fingerprint
        candidates = [i for i in candidates if branches[i].template.fingerprint == wanted] or candidates
    new = tuple(own(messages[best:], best))
    if _contradict([branches[index] for index in candidates], best):
        why = f"branches {candidates} hold these {best} messages with different tokens"
        return Decision(plan=Plan(kind="ambiguous", cause="ambiguous", why=why, new=()), branch=candidates[0])
    pool = [index for index in candidates if best == len(branches[index].messages)] or candidates
    index = current if current in pool else pool[-1]
    branch = branches[index]
    last = branch.turns[-1].message_index if branch.turns else -1
    changed = template is not None and template.fingerprint != branch.template.fingerprint
    if best > last and not changed:
        return _go_on(branch, index, best, new)
    if branch.open_turn and best == last and not new and not changed:
        plan = Plan(kind="append", cause="resume", why="the aborted turn goes on", new=())
        return Decision(plan=plan, branch=index, keep=best)
    history = (*branch.messages[:best], *new)
    found = name_break(branch, best, history, changed=changed)
    plan = Plan(kind=found.kind, cause=found.cause, why=found.why, new=new)
    turns = 0 if changed else sum(turn.message_index < best for turn in branch.turns)
    shared = 0
    if turns:
        text = branch.template.render_marked(history, branch.control, generate=True)
        shared = _shared_turns(branch, text, branch.align(text, branch.turn_texts(turns), None))
    return Decision(plan=plan, branch=index, history=history, shared=shared)


def decide_added(branches: Sequence[Branch], current: int, new: Sequence[Message]) -> Decision:
    """As `decide`, of the current branch's messages with `new` after them: what is held is not read again."""
    branch = branches[current]
    held = len(branch.messages)
    if len(branches) > 1 and any(len(b.messages) >= held for b in branches if b is not branch):
        return decide(branches, current, [*branch.messages, *new], None)
    return _go_on(branch, current, held, tuple(own(new, held)))


def _shared_lengths(branches: Sequence[Branch], current: int, messages: Sequence[Message]) -> list[int]:
    """Messages that each branch has in common with a list; -1 for those that cannot have the most."""
    best = branches[current].shared_messages(messages)
    return [
        best if index == current else branch.shared_messages(messages) if len(branch.messages) >= best else -1
        for index, branch in enumerate(branches)
    ]


def _contradict(branches: Sequence[Branch], messages: int) -> bool:
    """Whether two branches hold other sampled ids for one of the first `messages` messages."""
    if len(branches) < 2:
        return False
    seen: dict[int, bytes] = {}
    return any(
        seen.setdefault(index, ids) != ids
        for branch in branches
        for index, ids in branch.sampled_before(messages).items()
    )


def _shared_turns(branch: Branch, text: str, aligned: Alignment) -> int:
    """Turns that a new branch may begin with: a turn with a cross-stop is not shared if it ends a branch."""
    shared = aligned.shared
    if not shared or branch.cross_stop == "keep":
        return shared
    printed = branch.control.encode(text[aligned.end : aligned.end + _CLOSE])
    return shared - _crosses(branch, shared - 1, printed)


def _crosses(branch: Branch, turn: int, printed: Sequence[int]) -> bool:
    """Whether a turn ended with another stop token than the one that the template prints after it."""
    return branch.turns[turn].last.stop_id is not None and not branch.overlap(turn, printed)


def _go_on(branch: Branch, index: int, keep: int, new: tuple[dict[str, Any], ...]) -> Decision:
    """All turns stay: go on unless the template rewrites them, or a cross-stop ends the branch."""
    plan = Plan(kind="append", cause="append", why="the held messages go on", new=new)
    if keep < len(branch.messages):
        why = f"message {keep} ({branch.messages[keep]['role']}), not yet answered, was changed"
        plan = Plan(kind="rewind", cause="pending_edited", why=why, new=new)
    split = branch.turns[-1].message_index + 1 if branch.turns else 0
    pending = (*branch.messages[split:keep], *new)
    if not pending or not branch.turns or pending[-1]["role"] == "assistant":
        return Decision(plan=plan, branch=index, keep=keep)
    program = branch.template.program
    if program is not None and branch.proven(split - 1, pending):
        if branch.cross_stop == "branch":
            printed = program.after(branch.messages[split - 1], pending[0]["role"])
            if _crosses(branch, -1, printed):
                return _end_at_cross_stop(branch, index, keep, new)
        return Decision(plan=plan, branch=index, keep=keep, by_program=True)
    messages = (*branch.messages[:keep], *new)
    text = branch.template.render_marked(messages, branch.control, generate=True)
    found = branch.template.delta(messages[:split], pending, branch.control)
    texts = branch.turn_texts(len(branch.turns))
    aligned = branch.align(text, texts, found[0].text if found else None)
    cause: Cause = "unproven"
    if aligned.broken is not None:
        why = f"the template rewrites history: {aligned.broken}"
        stripped = any(r.touches_sampled and r.name == "thinking stripped" for r in aligned.rewrites)
        cause = "thinking_stripped" if stripped else "history_rewritten"
        others = _stripped(branch, text[aligned.end :], texts[aligned.shared :]) - 1 if stripped else 0
        if others > 0:
            why = f"{why.removesuffix(')')} and {others} more)"
    elif found is None or text[aligned.end :] != found[0].text:
        why = "the template's text after the last turn does not follow from its render"
    elif branch.cross_stop == "branch" and _crosses(branch, -1, found[0].ids.tolist()):
        return _end_at_cross_stop(branch, index, keep, new)
    else:
        return Decision(plan=plan, branch=index, keep=keep)
    plan = Plan(kind="branch", cause=cause, why=why, new=new)
    shared = _shared_turns(branch, text, aligned)
    return Decision(plan=plan, branch=index, history=messages, shared=shared)


def _stripped(branch: Branch, text: str, turns: Sequence[TurnText]) -> int:
    """Turns whose reasoning a render lacks, from the first one on."""
    count = at = 0
    for turn in turns:
        at = text.find(turn.frame, at)
        if at < 0:
            break
        at += len(turn.frame)
        held = turn.prefill + turn.sampled
        kept = branch.control.unmark(text[at : at + 2 * len(held)]).startswith(held)
        count += not kept and bool(branch.template.parse_printed(held).reasoning)
    return count


def _end_at_cross_stop(branch: Branch, index: int, keep: int, new: tuple[dict[str, Any], ...]) -> Decision:
    stop = branch.turns[-1].last.stop_id
    name = branch.template.tokenizer.decode([] if stop is None else [stop])
    why = f"cross-stop: the last turn stopped with {name}, the template prints another token there"
    plan = Plan(kind="branch", cause="cross_stop", why=why, new=new)
    history = (*branch.messages[:keep], *new)
    return Decision(plan=plan, branch=index, history=history, shared=len(branch.turns) - 1)
