"""Why a message list does not simply go on: the names, and how an edited history is told from another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from token_tracking.messages import Message, texts
from token_tracking.same_messages import one_form

if TYPE_CHECKING:
    from token_tracking.history.branch import Branch

PlanKind = Literal["append", "rewind", "branch", "ambiguous"]
Cause = Literal[
    "start",
    "append",
    "resume",
    "pending_edited",
    "retry",
    "last_turn_edited",
    "message_edited",
    "compaction",
    "tools_changed",
    "sub_agent",
    "cross_stop",
    "thinking_stripped",
    "history_rewritten",
    "unproven",
    "ambiguous",
]
"""`start`: the first branch. `append`: the held messages go on. `resume`: an aborted turn is asked for again.
`pending_edited`: a message that nothing answered was changed. `retry`: the prompt of a turn is to be answered
again. `last_turn_edited`: the harness took back or changed its last turn. `message_edited`, `compaction`: it
changed an earlier message, or sends fewer than are held. `tools_changed`: other tools or another template.
`sub_agent`: a history that shares no turn and quotes none. `cross_stop`: the turn's stop token is not the one
that the template prints there (`Conversation(cross_stop="branch")`). `thinking_stripped`,
`history_rewritten`: the template prints sampled turns, or the text between them, otherwise than before.
`unproven`: what follows the last turn could not be told from the renders. `ambiguous`: two branches could be
meant."""

CrossStop = Literal["keep", "branch"]
"""What becomes of a turn whose stop token is not the one that the template prints there. `keep`: both tokens
are held, and counted. `branch`: the turn ends its branch, and the next prompt is rendered whole."""

QUOTED = 24
"""Characters of a held answer that a new message must hold to count as a summary that quotes it."""


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """How a history that does not go on differs from the one that is held."""

    kind: PlanKind
    cause: Cause
    why: str


def name_break(branch: Branch, at: int, messages: Sequence[Message], *, changed: bool) -> Break:
    """Name the difference between a branch and a history that leaves it at message `at`.

    Args:
        branch: the branch that has most in common with the history.
        at: how many messages they share; not past the branch's last turn, unless `changed`.
        messages: the whole history.
        changed: whether it comes with other tools, or another template.
    """
    held = len(branch.messages)
    first = branch.turns[0].message_index if branch.turns else 0
    if at < first and not _quotes(branch, messages[at:]):
        where = "its first message" if at == 0 else f"message {at} on"
        why = f"the history shares no turn, it differs from {where}: a sub-agent, or a task of its own"
        return Break(kind="branch", cause="sub_agent", why=why)
    if changed:
        return Break(kind="branch", cause="tools_changed", why="tools or template changed")
    answered = [number for number, turn in enumerate(branch.turns) if turn.message_index == at]
    if answered and at == len(messages):
        why = f"the prompt of turn {answered[0]} (message {at}) is to be answered again, a retry"
        return Break(kind="rewind", cause="retry", why=why)
    if at == branch.turns[-1].message_index:
        why = f"the last turn (message {at}) was taken back or edited"
        return Break(kind="rewind", cause="last_turn_edited", why=why)
    if len(messages) < held:
        why = f"history compacted from {held} to {len(messages)} messages at message {at}"
        return Break(kind="branch", cause="compaction", why=why)
    why = f"message {at} ({branch.messages[at]['role']}) was edited"
    return Break(kind="branch", cause="message_edited", why=why)


def _quotes(branch: Branch, messages: Sequence[Message]) -> bool:
    """Whether any message is an answer of the branch, or holds the text of one (a sampled summary)."""
    held = len(branch.messages)
    answers = [branch.messages[turn.message_index] for turn in branch.turns if turn.message_index < held]
    # Each side is put into one form once: message by message, long histories took seconds.
    known = {one_form(answer) for answer in answers}
    if any(message["role"] == "assistant" and one_form(message) in known for message in messages):
        return True
    said = {text.strip() for answer in answers for text in texts(answer) if len(text.strip()) >= QUOTED}
    return any(text in shown for message in messages for shown in texts(message) for text in said)
