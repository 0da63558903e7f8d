"""The joints of a template, learnt from renders of sentinel messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from token_tracking.compiler.joints import CALLS, GENERATE, Joint, Slot, Source, joint
from token_tracking.compiler.probe import Facts, Prober
from token_tracking.control import ControlTokens
from token_tracking.messages import Message

_VALUE = "qzvalueq"
_NAMES = ("qzcallaq", "qzcallbq")
_IDS = ("qzidaq000", "qzidbq000")
_RESULT_NAMES = ("qznameaq", "qznamebq")
Pair = tuple[str, str]


class _Run(msgspec.Struct, frozen=True):
    assistant: Message
    end: str
    """How the render of the assistant message ends."""
    new: Sequence[Message]


def learn_joints(facts: Facts, prober: Prober, control: ControlTokens) -> dict[Pair, Joint]:
    """Joints for pairs of neighbours, as far as one render each shows them. They are guesses until proven."""
    found: dict[Pair, Joint] = {}
    for run in _runs(facts, prober):
        for pair, learnt in _from_run(run, prober, control).items():
            found.setdefault(pair, learnt)
    return found


def _runs(facts: Facts, prober: Prober) -> Iterable[_Run]:
    user, user2 = ({"role": "user", "content": f"qzuser{n}q"} for n in "ab")
    plain = prober.assistant("qzcontentq")
    yield _Run(plain, "qzcontentq", [user, user2])
    yield _Run(plain, "qzcontentq", [user])
    if not facts.calls or facts.call_tail is None:
        return
    end = _VALUE + facts.call_tail
    two = prober.assistant("", arguments=("qzfirstq", _VALUE), names=_NAMES, ids=_IDS)
    one = prober.assistant("", arguments=(_VALUE,), names=_NAMES, ids=_IDS)
    # Results out of order show whether a call is looked up by its id or by its place.
    first, second = _result("qztoolaq", 0, 1), _result("qztoolbq", 1, 0)
    yield _Run(two, end, [first, second])
    alone, again = _result("qztoolaq", 0, 0), _result("qztoolbq", 1, 1)
    yield _Run(one, end, [alone, again])
    yield _Run(one, end, [alone, user])
    yield _Run(one, end, [alone])
    yield _Run(one, end, [user])
    yield _Run(plain, "qzcontentq", [alone])


def _result(content: str, place: int, call: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": _IDS[call],
        "name": _RESULT_NAMES[place],
        "content": content,
    }


def _from_run(run: _Run, prober: Prober, control: ControlTokens) -> dict[Pair, Joint]:
    text = prober.text([*prober.start(), run.assistant, *run.new], generate=True)
    contents = [str(message["content"]) for message in run.new]
    if text is None or any(text.count(content) != 1 for content in [run.end, *contents]):
        return {}
    rest = text.split(run.end)[1]
    fixed: list[str] = []
    for content in contents:
        before, mark, rest = rest.partition(content)
        if not mark:
            return {}
        fixed.append(before)
    start = CALLS if run.assistant.get("tool_calls") else "assistant"
    nodes = [start, *(str(message["role"]) for message in run.new), GENERATE]
    sources = _call_sources(fixed)
    joints: dict[Pair, Joint] = {}
    for index, between in enumerate([*fixed, rest]):
        fields = _fields(run.new, index, sources)
        joints.setdefault((nodes[index], nodes[index + 1]), joint(between, control, fields))
    return joints


def _fields(new: Sequence[Message], index: int, sources: dict[str, Source]) -> dict[str, Slot]:
    """Sentinel words that may stand in the joint before message `index`, and what they are."""
    fields: dict[str, Slot] = {}
    if index < len(new) and new[index]["role"] == "tool":
        fields = {word: Slot(source, "next") for word, source in sources.items()}
        fields[new[index]["tool_call_id"]] = Slot("tool_call_id", "next")
        fields[new[index]["name"]] = Slot("name", "next")
    if index and new[index - 1]["role"] == "tool":
        fields[new[index - 1]["tool_call_id"]] = Slot("tool_call_id", "previous")
        fields[new[index - 1]["name"]] = Slot("name", "previous")
    return fields


def _call_sources(fixed: Sequence[str]) -> dict[str, Source]:
    """Which call's name the joints before the first two results show; the first has the second call's id."""
    seen = tuple("".join(name for name in _NAMES if name in text) for text in fixed[:2])
    a, b = _NAMES
    if seen == (a, b):
        return {a: "call by place", b: "call by place"}
    if seen == (b, a):
        return {a: "call by id", b: "call by id"}
    return {a: "first call", b: "call by id" if seen[:1] == (b,) and len(seen) == 1 else "last call"}
