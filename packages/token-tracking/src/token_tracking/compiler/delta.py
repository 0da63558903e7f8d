"""`DeltaProgram`: what a template prints from the end of an assistant turn to the next prompt.

For most templates that text is the contents of the new messages with fixed text between them, and the fixed
text depends on the two neighbouring roles alone. The program is that table of *joints*, learnt by probing and
accepted, pair by pair, only after randomised conversations gave the ids of full renders. What it does not
cover is found by comparing two full renders (`marked_turn`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.compiler.joints import CALLS, GENERATE, PRINTS, Hole, Joint
from token_tracking.compiler.probe import Facts
from token_tracking.control import ControlTokens
from token_tracking.messages import Message

PLAIN_FIELDS = {"user": {"role", "content"}, "tool": {"role", "content", "tool_call_id", "name"}}
ANSWER_ROLES = ("user", "tool")
_TURN_FIELDS = {"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"}
MARKER = "qzmarkerq"


class Delta(msgspec.Struct, frozen=True):
    """What follows an assistant turn: rendered text (control tokens in contents marked) and its ids."""

    text: str
    ids: npt.NDArray[np.int32]


class DeltaProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Joints for pairs of neighbours; `assistant` or `calls` starts a delta, `generate` ends it."""

    joints: dict[tuple[str, str], Joint]
    holes: dict[str, Hole]
    """How the content of a role is printed."""
    stable: frozenset[str]
    """Roles whose message may follow an assistant turn without any change to what was rendered before it."""
    words: frozenset[str]
    """Field names and strings that the template spells: another field of a message cannot matter to it."""
    empty_calls: bool
    """A turn whose `tool_calls` is an empty list or None is printed as one without the field."""
    lone_calls: bool = False
    """Only turns with calls and no content are covered (Gemma 4 prints the content after the results)."""
    triggers: dict[str, tuple[str, ...]] = {}
    """Strings (lower case) that the template looks for in a role's content: such a message, or the end of
    such an assistant turn, is printed in another way."""
    rewritten: tuple[str, ...] = ()
    """Strings (lower case) that make the template rewrite an assistant turn which has them as content."""
    refused: dict[tuple[str, str], str] = {}
    """Pairs that were not proven, and why."""
    trials: int = 0
    """Random conversations whose full render the program matched id by id."""

    def covers(self, assistant: Message, messages: Sequence[Message]) -> bool:
        """Whether the program knows these messages after an assistant turn."""
        previous = self._start(assistant)
        if previous is None or not messages:
            return False
        slots = False
        for message in messages:
            role = message["role"]
            joint = self.joints.get((previous, role))
            if joint is None or not self._knows(message, role):
                return False
            slots = slots or bool(joint.slots)
            previous = role
        last = self.joints.get((previous, GENERATE))
        if last is None:
            return False
        return not (slots or last.slots) or self._values(assistant, messages) is not None

    def _start(self, assistant: Message) -> str | None:
        content = assistant.get("content")
        if not (content is None or isinstance(content, str)) or not self._no_other(assistant, _TURN_FIELDS):
            return None
        if "assistant" in self.triggers and _has(content or "", self.triggers["assistant"]):
            return None
        if assistant.get("tool_calls"):
            return None if self.lone_calls and (content or "").strip() else CALLS
        return "assistant" if self.empty_calls or "tool_calls" not in assistant else None

    def _knows(self, message: Message, role: str) -> bool:
        content = message.get("content")
        if not isinstance(content, str) or not self._no_other(message, PLAIN_FIELDS[role]):
            return False
        return role not in self.triggers or not _has(content, self.triggers[role])

    def _no_other(self, message: Message, fields: set[str]) -> bool:
        return message.keys() <= fields or self.words.isdisjoint(message.keys() - fields)

    def is_stable(self, assistant: Message, messages: Sequence[Message]) -> bool:
        """Whether appending these messages is known to change nothing that was rendered before."""
        if not self.stable.issuperset([message["role"] for message in messages]):
            return False
        return not self.rewritten or not self.rewrites(assistant)

    def rewrites(self, assistant: Message) -> bool:
        """Whether the turn's content has a string that makes the template rewrite it."""
        content = assistant.get("content")
        return not isinstance(content, str) or _has(content, self.rewritten)

    def after(self, assistant: Message, following: str) -> tuple[int, ...]:
        """The first ids after the turn in a render where a message of a role that `covers` knows follows."""
        return self.joints[CALLS if assistant.get("tool_calls") else "assistant", following].ids

    def run(self, assistant: Message, messages: Sequence[Message], control: ControlTokens) -> Delta:
        """The delta of messages that `covers` accepted.

        The whole text is encoded at once: a content's border is a token border only where a control token
        stands, and the tokenizer knows where that is.
        """
        texts: list[str] = []
        values: list[list[str]] | None = None
        previous = CALLS if assistant.get("tool_calls") else "assistant"
        for index, message in enumerate(messages):
            role = message["role"]
            joint = self.joints[previous, role]
            if joint.slots:
                values = values or self._values(assistant, messages) or []
                texts.append(joint.fill([control.mark(value) for value in values[index]]))
            else:
                texts.append(joint.text)
            content, hole = control.mark(message["content"]), self.holes[role]
            texts.append(content if hole == "verbatim" else PRINTS[hole](content))
            previous = role
        joint = self.joints[previous, GENERATE]
        if joint.slots:
            values = values or self._values(assistant, messages) or []
            texts.append(joint.fill([control.mark(value) for value in values[-1]]))
        else:
            texts.append(joint.text)
        text = "".join(texts)
        return Delta(text, control.encode_array(text))

    def _values(self, assistant: Message, messages: Sequence[Message]) -> list[list[str]] | None:
        """Values for the slots of each joint in turn; None if one is not certain."""
        results = [message for message in messages if message["role"] == "tool"]
        nodes = [
            CALLS if assistant.get("tool_calls") else "assistant",
            *(message["role"] for message in messages),
            GENERATE,
        ]
        place = -1
        found: list[list[str]] = []
        for pair in itertools.pairwise(nodes):
            values: list[str] = []
            for slot in self.joints[pair].slots:
                at = place + 1 if slot.of == "next" else place
                if (value := slot.value(assistant, results, at)) is None:
                    return None
                values.append(value)
            found.append(values)
            place += pair[1] == "tool"
        return found


def _has(text: str, strings: Sequence[str]) -> bool:
    lower = text.lower()
    return any(map(lower.__contains__, strings))


class Refusal(msgspec.Struct, frozen=True):
    """Why a template has no program."""

    why: str


def marked_turn(assistant: Message, facts: Facts) -> tuple[Message, str] | None:
    """The message with a marker word at its end, and what is printed from there to the turn's end.

    Rendering it in place of the assistant turn that was just sampled shows where the text after the turn
    begins. None if the place cannot be marked.
    """
    calls = assistant.get("tool_calls")
    if not calls:
        return {**assistant, "content": f"qz{MARKER}"}, ""
    if facts.call_tail is None:
        return None
    last = calls[-1]
    if not isinstance(last.get("function"), dict):
        return None
    function = last["function"]
    marked = {**last, "function": {**function, "arguments": f'{{"qzkeyq": "{MARKER}"}}'}}
    return {**assistant, "tool_calls": [*calls[:-1], marked]}, facts.call_tail
