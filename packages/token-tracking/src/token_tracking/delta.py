"""`DeltaProgram`: what a template prints from the end of an assistant turn to the next prompt.

For most templates that text is the contents of the new messages with fixed text between them, and the fixed
text depends on the two neighbouring roles alone. The program is that table of *joints*, learnt by probing and
accepted only after randomised conversations gave the ids of full renders. Everything else is left to
`suffix_by_marker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.control import ControlTokens
from token_tracking.messages import Message
from token_tracking.probe import GENERATE, Facts, Prober
from token_tracking.proof import Proof

Hole = Literal["verbatim", "stripped"]
PLAIN_FIELDS = {"user": {"role", "content"}, "tool": {"role", "content", "tool_call_id", "name"}}
ANSWER_ROLES = ("user", "tool")
MARKER = "qzmarkerq"


class Joint(msgspec.Struct, frozen=True):
    """Fixed text between the contents of two neighbouring messages."""

    text: str
    lead: str
    """Up to the first control token: encoded together with the content before it."""
    ids: tuple[int, ...]
    """From the first control token to the last, whatever the contents are."""
    tail: str
    """After the last control token: encoded together with the content that follows."""


class Delta(msgspec.Struct, frozen=True):
    """What follows an assistant turn: rendered text (control tokens in contents marked) and its ids."""

    text: str
    ids: npt.NDArray[np.int32]


class DeltaProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Joints for pairs of roles; `assistant` starts a delta, `generate` ends it."""

    joints: dict[tuple[str, str], Joint]
    holes: dict[str, Hole]
    """How the content of a role is printed."""
    stable: frozenset[str]
    """Roles whose message may follow an assistant turn without any change to what was rendered before it."""
    trials: int
    """Random conversations whose full render the program matched id by id."""

    def covers(self, assistant: Message, messages: Sequence[Message]) -> bool:
        """Whether the program knows these messages after an assistant turn.

        Tool results are known after a turn with calls and user messages after one without, as they were
        learnt: gpt-oss ends a turn with calls in another token.
        """
        if not messages or (messages[0]["role"] == "tool") != bool(assistant.get("tool_calls")):
            return False
        previous = "assistant"
        for message in messages:
            role = message["role"]
            if (previous, role) not in self.joints or role not in self.holes:
                return False
            if not isinstance(message.get("content"), str) or not message.keys() <= PLAIN_FIELDS[role]:
                return False
            previous = role
        return (previous, GENERATE) in self.joints

    def is_stable(self, messages: Sequence[Message]) -> bool:
        """Whether appending these messages is known to change nothing that was rendered before."""
        return self.stable.issuperset([message["role"] for message in messages])

    def run(self, messages: Sequence[Message], control: ControlTokens) -> Delta:
        """The delta of messages that `covers` accepted.

        The whole text is encoded at once: a content's border is a token border only where a control token
        stands, and the tokenizer knows where that is.
        """
        texts: list[str] = []
        previous = "assistant"
        for message in messages:
            role = message["role"]
            texts += (self.joints[previous, role].text, control.mark(self._fill(message)))
            previous = role
        texts.append(self.joints[previous, GENERATE].text)
        text = "".join(texts)
        return Delta(text, control.encode_array(text))

    def _fill(self, message: Message) -> str:
        content: str = message["content"]
        return content.strip() if self.holes[message["role"]] == "stripped" else content


class Refusal(msgspec.Struct, frozen=True):
    """Why a template has no program."""

    why: str


def compile_program(
    facts: Facts, prober: Prober, control: ControlTokens, literals: Sequence[str]
) -> DeltaProgram | Refusal:
    """Learn the joints, then prove them on random conversations.

    `literals` are the template's string constants. A template that looks into message text compares it with
    one of them (GLM's `/nothink`), so contents made of each are part of the proof.
    """
    if facts.end_text is None:
        return Refusal("the end of an assistant turn was not found in its render")
    joints = _learn_joints(facts, prober, control)
    usable = {
        pair: joint
        for pair, joint in joints.items()
        if pair[0] != "assistant" or (joint.ids and not joint.lead)
    }
    roles = [role for role in ANSWER_ROLES if {("assistant", role), (role, GENERATE)} <= usable.keys()]
    if not roles:
        return Refusal(
            "no role follows an assistant turn with a control token first and contents printed as they are"
        )
    kept = {pair: joint for pair, joint in usable.items() if {*pair} <= {*roles, "assistant", GENERATE}}
    return _prove(facts, prober, control, kept, roles, literals)


def _learn_joints(facts: Facts, prober: Prober, control: ControlTokens) -> dict[tuple[str, str], Joint]:
    user, user2 = ({"role": "user", "content": f"qzuser{n}q"} for n in "ab")
    tool, tool2 = prober.tool("qztoolaq"), prober.tool("qztoolbq", 1)
    plain = prober.assistant("qzcontentq")
    one = prober.assistant("", arguments=("qzvalueq",))
    two = prober.assistant("", arguments=("qzfirstq", "qzvalueq"))
    runs: list[tuple[Message, Sequence[Message], Sequence[str], str]] = [
        (plain, [user, user2], ["user", "user"], "qzcontentq"),
        (plain, [user], ["user"], "qzcontentq"),
    ]
    if facts.calls and facts.call_tail is not None and not facts.prints_tool_ids:
        runs += [
            (two, [tool, tool2], ["tool", "tool"], "qzvalueq"),
            (one, [tool, user], ["tool", "user"], "qzvalueq"),
            (one, [tool], ["tool"], "qzvalueq"),
        ]
    joints: dict[tuple[str, str], Joint] = {}
    for assistant, new, roles, end in runs:
        text = prober.text([*prober.start(), assistant, *new], generate=True)
        contents: list[str] = [message["content"] for message in new]
        if text is None or any(text.count(content) != 1 for content in [end, *contents]):
            continue
        rest = text.split(end)[1]
        if assistant is not plain:
            if facts.call_tail is None or not rest.startswith(facts.call_tail):
                continue
            rest = rest.removeprefix(facts.call_tail)
        previous = "assistant"
        for content, role in zip(contents, roles, strict=True):
            fixed, _, rest = rest.partition(content)
            joints.setdefault((previous, role), _joint(fixed, control))
            previous = role
        joints.setdefault((previous, GENERATE), _joint(rest, control))
    return joints


def _joint(text: str, control: ControlTokens) -> Joint:
    found = list(control.find(text))
    if not found:
        return Joint(text, text, (), "")
    (start, _), (_, end) = found[0], found[-1]
    return Joint(text, text[:start], tuple(control.tokenizer.encode(text[start:end])), text[end:])


def _prove(
    facts: Facts,
    prober: Prober,
    control: ControlTokens,
    joints: dict[tuple[str, str], Joint],
    roles: list[str],
    literals: Sequence[str],
) -> DeltaProgram | Refusal:
    """Accept each role with the way its contents are printed, or drop it."""
    why = "no role could be proven"
    program: DeltaProgram | None = None
    for role in roles:
        for hole in ("verbatim", "stripped"):
            holes: dict[str, Hole] = {**(program.holes if program else {}), role: hole}
            pairs = {p: j for p, j in joints.items() if {*p} <= {*holes, "assistant", GENERATE}}
            candidate = DeltaProgram(
                joints=pairs, holes=holes, stable=program.stable if program else frozenset(), trials=0
            )
            proof = Proof(facts, prober, control, candidate)
            failure = proof.run(role)
            trials = proof.trials + (program.trials if program else 0)
            if (failure := failure or proof.run_literals(role, literals)) is None:
                stable = (candidate.stable | {role}) - proof.unstable
                program = msgspec.structs.replace(candidate, stable=stable, trials=trials)
                break
            why = failure
    return program or Refusal(why)


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
