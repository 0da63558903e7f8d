"""How a harness's message list continues a conversation: append, rewind, branch, or ambiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from token_tracking.branch import Branch, Message
from token_tracking.messages import common_prefix, own
from token_tracking.template import ChatTemplate

PlanKind = Literal["append", "rewind", "branch", "ambiguous"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a message list continues a conversation."""

    kind: PlanKind
    """`append`: the held tokens go on. `rewind`: the harness took back its last turn, or what came after it.
    `branch`: the held tokens cannot go on. `ambiguous`: two branches could be meant."""
    why: str
    new: tuple[Message, ...]
    """Messages that are not held yet."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what carries it out."""

    plan: Plan
    branch: int
    """The branch that goes on, or the parent of the new one."""
    history: tuple[Message, ...] = ()
    """All messages of a new branch: those that are held, as they are held, and the new ones."""
    keep: int | None = None
    """Messages of the branch that stay when it goes on. None: a new branch begins."""
    shared: int = 0
    """Turns that a new branch begins with."""


def decide(
    branches: Sequence[Branch], current: int, messages: Sequence[Message], template: ChatTemplate | None
) -> Decision:
    """Plan without changing anything; see `Conversation.plan`."""
    lengths = _shared_lengths(branches, current, messages)
    best = max(lengths)
    candidates = [index for index, length in enumerate(lengths) if length == best]
    if template is not None:
        wanted = template.fingerprint
        candidates = [i for i in candidates if branches[i].template.fingerprint == wanted] or candidates
    new = tuple(own(messages[best:], best))
    if _contradict([branches[index] for index in candidates], best):
        why = f"branches {candidates} hold these {best} messages with different tokens"
        return Decision(plan=Plan(kind="ambiguous", why=why, new=()), branch=candidates[0])
    pool = [index for index in candidates if best == len(branches[index].messages)] or candidates
    index = current if current in pool else pool[-1]
    branch = branches[index]
    last = branch.turns[-1].message_index if branch.turns else -1
    changed = template is not None and template.fingerprint != branch.template.fingerprint
    if best > last and not changed:
        return _go_on(branch, index, best, new)
    history = (*branch.messages[:best], *new)
    if changed:
        plan = Plan(kind="branch", why="tools or template changed", new=new)
        return Decision(plan=plan, branch=index, history=history)
    if branch.open_turn and best == last and not new:
        plan = Plan(kind="append", why="the aborted turn goes on", new=())
        return Decision(plan=plan, branch=index, history=history, keep=best)
    plan = _name_edit(branch, best, last, history)
    turns = sum(turn.message_index < best for turn in branch.turns)
    shared = 0
    if turns:
        text = branch.template.render_marked(history, branch.control, generate=True)
        shared = branch.align(text, branch.turn_texts(turns), None).shared
    return Decision(plan=plan, branch=index, history=history, shared=shared)


def decide_added(branches: Sequence[Branch], current: int, new: Sequence[Message]) -> Decision:
    """As `decide`, of the current branch's messages with `new` after them: what is held is not read again."""
    branch = branches[current]
    held = len(branch.messages)
    if any(len(other.messages) >= held for other in branches if other is not branch):
        return decide(branches, current, [*branch.messages, *new], None)
    return _go_on(branch, current, held, tuple(own(new, held)))


def _shared_lengths(branches: Sequence[Branch], current: int, messages: Sequence[Message]) -> list[int]:
    """Messages that each branch has in common with a list; -1 for those that cannot have the most."""
    best = common_prefix(branches[current].messages, messages)
    return [
        best
        if index == current
        else common_prefix(branch.messages, messages)
        if len(branch.messages) >= best
        else -1
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


def _name_edit(branch: Branch, at: int, last: int, messages: Sequence[Message]) -> Plan:
    new = tuple(messages[at:])
    held = len(branch.messages)
    if at == last:
        why = f"the last turn (message {at}) was taken back or edited"
        return Plan(kind="rewind", why=why, new=new)
    if len(messages) < held:
        why = f"history compacted from {held} to {len(messages)} messages at message {at}"
    else:
        why = f"message {at} ({branch.messages[at]['role']}) was edited"
    return Plan(kind="branch", why=why, new=new)


def _go_on(branch: Branch, index: int, keep: int, new: tuple[Message, ...]) -> Decision:
    """All turns stay: go on unless the template rewrites them."""
    plan = Plan(kind="append", why="the held messages go on", new=new)
    if keep < len(branch.messages):
        why = f"message {keep} ({branch.messages[keep]['role']}), not yet answered, was changed"
        plan = Plan(kind="rewind", why=why, new=new)
    go_on = Decision(plan=plan, branch=index, keep=keep)
    split = branch.turns[-1].message_index + 1 if branch.turns else 0
    pending = (*branch.messages[split:keep], *new)
    if not pending or not branch.turns or pending[-1]["role"] == "assistant":
        return go_on
    program, answered = branch.template.program, branch.messages[split - 1]
    if program is not None and program.covers(answered, pending) and program.is_stable(pending):
        return go_on
    messages = (*branch.messages[:keep], *new)
    text = branch.template.render_marked(messages, branch.control, generate=True)
    found = branch.template.delta(messages[:split], pending, branch.control)
    aligned = branch.align(text, branch.turn_texts(len(branch.turns)), found[0].text if found else None)
    if aligned.broken is not None:
        why = f"the template rewrites history: {aligned.broken}"
    elif found is None or text[aligned.end :] != found[0].text:
        why = "the template's text after the last turn does not follow from its render"
    else:
        return go_on
    plan = Plan(kind="branch", why=why, new=new)
    return Decision(plan=plan, branch=index, history=messages, shared=aligned.shared)
