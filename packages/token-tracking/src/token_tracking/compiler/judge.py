"""One conversation of a proof: the program's delta against a full render."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from token_tracking.compiler.delta import DeltaProgram
from token_tracking.compiler.probe import Facts, Prober
from token_tracking.compiler.trials import Turn
from token_tracking.control import ControlTokens
from token_tracking.messages import Message, map_message

_WINDOW = 2000


class Verdict(msgspec.Struct, frozen=True):
    """What one conversation showed."""

    failure: str | None
    """What differed. None: nothing."""
    kept: bool = True
    """The render still has the prompt that the turn answered, and all that the turn said; or the program does
    not claim that it has."""
    trial: bool = True
    """False: the template refused the conversation, or the program does not cover it."""


NO_TRIAL = Verdict(None, trial=False)


class Judge:
    """Renders conversations and compares."""

    def __init__(self, facts: Facts, prober: Prober, control: ControlTokens):
        self._facts, self._prober, self._control = facts, prober, control
        self._mark = functools.cache(control.mark)  # the same few contents stand in all conversations
        self.trials = 0
        """Conversations that matched."""

    def compare(
        self, program: DeltaProgram, history: Sequence[Message], turn: Turn, new: Sequence[Message]
    ) -> Verdict:
        """Judge a program on a history, an assistant turn after it, and the messages that answer the turn."""
        if not program.covers(turn.message, new):
            return NO_TRIAL
        full = self._render([*history, turn.message, *new])
        # What is known to be unstable needs no look at the prompt.
        stable = program.is_stable(turn.message, new)
        prompt = self._render(history) if full is not None and stable else ""
        if full is None or prompt is None:
            return NO_TRIAL
        delta = program.run(turn.message, new, self._control)
        before = full.removesuffix(delta.text)
        if len(before) + len(delta.text) != len(full) or not before.endswith(turn.end):
            return Verdict("a conversation does not end with the delta's text")
        found = [*self._control.find(before[-_WINDOW:])]
        # What stands before a control token has no part in the ids after it.
        near = before[-_WINDOW:][found[-1][0] :] if found else before
        if self._control.encode(near + delta.text) != [*self._control.encode(near), *delta.ids.tolist()]:
            return Verdict("the delta's ids differ from those of a full render")
        self.trials += 1
        return Verdict(None, kept=not stable or self._kept(prompt, before, turn))

    def fits(self, program: DeltaProgram, turn: Turn, new: Sequence[Message]) -> bool:
        """Whether the text of a delta is the end of a full render, whatever its ids are."""
        full = self._render([*self._prober.start(), turn.message, *new])
        if full is None or not program.covers(turn.message, new):
            return False
        return full.endswith(program.run(turn.message, new, self._control).text)

    def _kept(self, prompt: str, before: str, turn: Turn) -> bool:
        markers, prefill = self._facts.markers, self._facts.prefill
        closing = markers.reasoning_closing_text.strip()
        if prefill and (self._facts.reasoning_field or (closing and closing in prefill)):
            # Held turns keep a prefill that later renders drop: a rewrite of template tokens alone.
            prompt = prompt.removesuffix(prefill)
        if not before.startswith(prompt):
            return False
        said = self._control.unmark(before[len(prompt) :])
        words = (word for word in turn.said.split() if not closing or closing not in word)
        return all(word in said for word in words)

    def _render(self, messages: Sequence[Message]) -> str | None:
        marked = [map_message(message, self._mark) for message in messages]
        return self._prober.text(marked, generate=True)
