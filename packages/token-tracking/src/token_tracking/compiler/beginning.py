"""Whether a program's proof holds for conversations that begin with given messages.

The histories of a proof begin with a system message and a question. A template may look for that question to
tell what it prints of older turns (Qwen3 keeps the thinking after the last one alone), and a compacted
history, or that of a sub-agent, may have none, or one that does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from token_tracking.compiler.delta import DeltaProgram
from token_tracking.compiler.joints import CALLS
from token_tracking.compiler.judge import Judge
from token_tracking.compiler.probe import Facts, Prober
from token_tracking.compiler.trials import Turn
from token_tracking.control import ControlTokens
from token_tracking.messages import Message

_END = "qzendq"
_THOUGHT = "qzthoughtq"


def holds_after(
    history: Sequence[Message], program: DeltaProgram, facts: Facts, prober: Prober, control: ControlTokens
) -> bool:
    """Whether turns after `history`, thinking in them, stay as they are when the program says so.

    Args:
        history: the messages before the first turn, as the template gets them.
        program: the proven program.
        facts: of its template.
        prober: renders.
        control: marks and encodes contents, as in the proof.
    """
    judge = Judge(facts, prober, control)
    for turn in _turns(program, facts, prober):
        for role in sorted(program.stable):
            verdict = judge.compare(program, history, turn, [_answer(role, prober)])
            if verdict.failure is not None or not verdict.kept:
                return False
    return judge.trials > 0


def _turns(program: DeltaProgram, facts: Facts, prober: Prober) -> Iterator[Turn]:
    starts = {before for before, _ in program.joints}
    closing = facts.markers.reasoning_closing_text.strip()
    if "assistant" in starts:
        thought = "" if prober.reasoning_field or not closing else f"{_THOUGHT}\n{closing}\n\n"
        message = prober.assistant(f"{thought}{_END}", reasoning=_THOUGHT)
        yield Turn(message, _END, _said(message, _END))
    if CALLS in starts and facts.call_tail is not None:
        message = prober.assistant("", reasoning=_THOUGHT, arguments=[_END])
        yield Turn(message, f"{_END}{facts.call_tail}", _said(message, _END))


def _said(message: dict[str, Any], end: str) -> str:
    """What must still be there: the thinking too, if the message has some."""
    return f"{_THOUGHT} {end}" if any(_THOUGHT in str(value) for value in message.values()) else end


def _answer(role: str, prober: Prober) -> dict[str, Any]:
    return prober.tool("qzresultq") if role == "tool" else {"role": role, "content": "qzaskq"}
