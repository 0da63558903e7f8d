"""The part of a proof that tries what a template spells out: strings it looks for, numbers it counts to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.compiler.delta import DeltaProgram
from token_tracking.compiler.joints import CALLS, STARTS
from token_tracking.compiler.judge import Judge, Verdict
from token_tracking.compiler.probe import Facts, Prober
from token_tracking.compiler.probe_joints import Pair
from token_tracking.compiler.rendering import Constants
from token_tracking.compiler.trials import TEXTS, Turn

LONGEST_CONTENT = 20_000
LONGEST_LITERAL = 64
"""Longer string constants of a template are text that it prints, not text that it looks for."""
MOST_TRIGGERS = 8
SWEEP = 9
"""Rounds up to which every length of history is tried."""
MOST_ROUNDS = 40
MOST_MESSAGES = 200
"""Histories of about so many messages are tried at most; a template with a larger number has no program."""


class Lookups:
    """Contents and histories made of a template's own constants, for one pair of neighbours.

    A template that looks into message text compares it with one of its strings (GLM's `/nothink`), and one
    that counts compares with one of its numbers. Strings that change what is printed of the message that
    holds them become triggers: such messages are left to full renders.
    """

    def __init__(
        self,
        facts: Facts,
        prober: Prober,
        judge: Judge,
        constants: Constants,
        program: DeltaProgram,
        pair: Pair,
    ):
        self._facts, self._prober, self._judge, self._constants = facts, prober, judge, constants
        self._pair = pair
        self.program = program
        """With the triggers found so far, and without the stability that was disproved."""
        literals = (text for text in constants.literals if 0 < len(text) <= LONGEST_LITERAL)
        self._literals = [text for text in literals if text not in ("user", "assistant", "tool", "system")]

    def run(self) -> str | None:
        """What differed that no trigger explains. None: nothing."""
        self._note(
            self._judge.compare(
                self.program, self._prober.start(), self.turn("qzplainq"), self.messages("ok")
            )
        )
        contents = [(text, (text,)) for text in self._literals]
        contents += [(f"{text} x {text}", (text,)) for text in self._literals]
        contents += [
            (f"{a} x {b}", (a, b)) for a, b in self._constants.pairs if len(a) + len(b) <= LONGEST_LITERAL
        ]
        for content, found in contents:
            if (failure := self._try(content, found)) is not None:
                return failure
        if any(len(found) > MOST_TRIGGERS for found in self.program.triggers.values()):
            return "what is printed depends on many strings in a content"
        return self._texts() or self._lengths() or self._all_in_history()

    def depends_on_content(self) -> bool:
        """Whether what follows a turn with calls is another if the turn has content, which none would be."""
        start, new = self._prober.start(), self.messages("ok")
        said, silent = (self._judge.compare(self.program, start, self.turn(c), new) for c in ("qzsayq", ""))
        return said.failure is not None and silent.trial and silent.failure is None

    def _texts(self) -> str | None:
        """Every hard content, as a message that answers and as the turn that it answers."""
        for text in TEXTS:
            turn = self.turn(text)
            verdict = self._judge.compare(self.program, self._prober.start(), turn, self.messages(text))
            if verdict.failure is not None:
                return f"{verdict.failure}: with {text[:40]!r}"
            if not self.program.rewrites(turn.message):
                self._note(verdict)
        return None

    def positions(self) -> str | None:
        """Histories of every length: what is printed may depend on a message's place (a reminder at times).

        Up to `SWEEP` rounds, deltas are compared; beyond, the rounds of one long conversation must be printed
        alike.
        """
        blind = msgspec.structs.replace(self.program, stable=frozenset())
        turn, new = self.turn(), self.messages("ok")
        for begin in self._beginnings():
            for rounds in range(SWEEP):
                history = [*begin, *[turn.message, *new] * rounds]
                if (why := self._judge.compare(blind, history, turn, new).failure) is not None:
                    return f"{why}: after {len(history)} messages"
            rounds = max([SWEEP, *(n for n in self._constants.numbers if n <= MOST_ROUNDS)]) + 2
            text = self._prober.text([*begin, *[turn.message, *new] * rounds])
            pieces = text.split(turn.end) if text else []
            if len(pieces) == rounds + 1 and len({*pieces[1:-1]}) > 1:
                return "rounds of the same messages are not printed alike"
        return self._counts()

    def _counts(self) -> str | None:
        """Histories about as long as each number in the template: it may count them against it."""
        turn, new = self.turn(), self.messages("ok")
        for number in sorted(n for n in self._constants.numbers if n > 2):
            if number > MOST_MESSAGES:
                return f"it holds the number {number}, and histories of so many messages are not tried"
            for begin in self._beginnings():
                step = 1 + len(new)
                for rounds in range(max(number - 3, 0) // step, (number + 3) // step + 1):
                    history = [*begin, *[turn.message, *new] * rounds]
                    verdict = self._judge.compare(self.program, history, turn, new)
                    self._note(verdict)
                    if verdict.failure is not None:
                        return f"{verdict.failure}: after {len(history)} messages"
        return None

    def _beginnings(self) -> list[list[dict[str, Any]]]:
        """How a conversation may begin: as probed, and without the system message, so that parity differs."""
        first = self._prober.start()
        return [first, first[1:]] if len(first) > 1 else [first]

    def fields(self) -> str | None:
        """Messages with a field that no template knows, and tool results without some of theirs."""
        extra, new = {"qzextraq": "qzfieldq"}, self.messages("ok")
        turn = self.turn()
        dressed = msgspec.structs.replace(turn, message=turn.message | extra)
        tries = [(dressed, [message | extra for message in new])]
        for left_out in ({"name"}, {"tool_call_id"}, {"name", "tool_call_id"}):
            bare = [{key: value for key, value in m.items() if key not in left_out} for m in new]
            if bare != new:
                tries.append((turn, bare))
        for answered, messages in tries:
            verdict = self._judge.compare(self.program, self._prober.start(), answered, messages)
            self._note(verdict)
            if verdict.failure is not None:
                return "what is printed depends on further fields of a message"
        return None

    def _try(self, content: str, found: Sequence[str]) -> str | None:
        start, turn, new = self._prober.start(content, content), self.turn(content), self.messages(content)
        verdict = self._judge.compare(self.program, start, turn, new)
        if verdict.trial and verdict.failure is None and verdict.kept:
            return None
        usual = self._prober.start(), self.turn(), self.messages("ok")
        verdict = self._judge.compare(self.program, usual[0], usual[1], new)
        if verdict.failure is not None:
            self._trigger(self._pair[1], found)
        self._note(verdict)
        verdict = self._judge.compare(self.program, usual[0], turn, usual[2])
        if verdict.failure is not None:
            self._trigger("assistant", found)
        elif not verdict.kept:
            known = self.program.rewritten
            added = dict.fromkeys([*known, *(text.lower() for text in found)])
            self.program = msgspec.structs.replace(self.program, rewritten=tuple(added))
        verdict = self._judge.compare(self.program, start, usual[1], usual[2])
        self._note(verdict)
        if verdict.failure is not None:
            return f"what follows a turn depends on {content!r} earlier in the conversation"
        return None

    def _note(self, verdict: Verdict) -> None:
        if not verdict.kept:
            stable = self.program.stable - {self._pair[1]}
            self.program = msgspec.structs.replace(self.program, stable=stable)

    def _trigger(self, role: str, found: Sequence[str]) -> None:
        known = self.program.triggers
        added = dict.fromkeys([*known.get(role, ()), *(text.lower() for text in found)])
        self.program = msgspec.structs.replace(self.program, triggers={**known, role: tuple(added)})

    def _lengths(self) -> str | None:
        for number in self._constants.numbers:
            if not 2 < number < LONGEST_CONTENT:
                continue
            for length in (number - 1, number, number + 1):
                content = ("ab " * length)[:length].strip().ljust(length, "x")
                history = self._prober.start(content, content)
                verdict = self._judge.compare(self.program, history, self.turn(), self.messages(content))
                self._note(verdict)
                if verdict.failure is not None:
                    return verdict.failure
        return None

    def _all_in_history(self) -> str | None:
        """One conversation in which every string was a message of each role."""
        history = self._prober.start(" ".join(self._literals))
        for text in self._literals:
            said = self._prober.assistant(text)
            # gpt-oss raises on its own channel names in a message.
            if self._prober.text([*self._prober.start(), said]) is not None:
                history += [said, {"role": "user", "content": text}]
        verdict = self._judge.compare(self.program, history, self.turn(), self.messages("ok"))
        self._note(verdict)
        return verdict.failure

    def turn(self, content: str = "") -> Turn:
        """An assistant turn that the pair's messages can answer."""
        if start(self.program, self._pair) != CALLS:
            text = f"{content} qzendq".strip()
            return Turn(self._prober.assistant(text), "qzendq", text)
        message = self._prober.assistant(content, arguments=["qzendq"])
        return Turn(message, f"qzendq{self._facts.call_tail}", f"{content} qzendq")

    def messages(self, content: str) -> list[dict[str, Any]]:
        """The pair's messages, all with one content."""
        return [
            self._prober.tool(content) if role == "tool" else {"role": role, "content": content}
            for role in ([self._pair[1]] if self._pair[0] in STARTS else self._pair)
        ]


def start(program: DeltaProgram, pair: Pair) -> str:
    """The kind of turn that a delta with the pair in it begins after."""
    if pair[0] in STARTS:
        return pair[0]
    return next(kind for kind in reversed(STARTS) if (kind, pair[0]) in program.joints)
