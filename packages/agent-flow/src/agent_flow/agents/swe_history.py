"""SWE-agent's history as the messages of a chat template, each answer of the model as it was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from agent_flow.rollout import Message

ANSWER = "answer"
"""Key of a history item: which of the sampled answers it is. Without it, an answer is sought by its text."""


def messages_of(history: Sequence[Mapping[str, object]], sampled: Sequence[Message]) -> list[Message]:
    """The history that a model is to see.

    SWE-agent keeps text and tool calls of an answer, not its reasoning; so an answer that was sampled is
    found again by these, in order, and goes in whole. One that a history processor rewrote is none of them
    and goes in as it stands: the conversation sees a rewrite, and begins a branch.

    Args:
        history: after the history processors.
        sampled: every answer of the model, in order.
    """
    messages: list[Message] = []
    after = 0
    for item in history:
        role, content = str(item["role"]), _text(item["content"])
        if role == "assistant":
            found = _find(item, content, sampled, after)
            if found is not None:
                messages.append(sampled[found])
                after = found + 1
                continue
        message: Message = {"role": role, "content": content}
        if item.get("tool_calls"):
            message["tool_calls"] = item["tool_calls"]
        ids = cast("Sequence[str] | None", item.get("tool_call_ids"))
        if role == "tool" and ids:
            message["tool_call_id"] = ids[0]
        messages.append(message)
    return messages


def _find(item: Mapping[str, object], content: object, sampled: Sequence[Message], after: int) -> int | None:
    tagged = item.get(ANSWER)
    numbers = [tagged] if isinstance(tagged, int) else range(after, len(sampled))
    for number in numbers:
        answer, calls = sampled[number], item.get("tool_calls")
        if (answer.get("content") or "") == content and (not calls or answer.get("tool_calls") == calls):
            return number
    return None


def _text(content: object) -> object:
    """Text that a history processor put into a part of its own (`cache_control`) is still that text."""
    if not isinstance(content, list):
        return content
    parts = cast("list[Mapping[str, object]]", content)
    if all(part.get("type") == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts  # such as an image: the conversation refuses it by name
