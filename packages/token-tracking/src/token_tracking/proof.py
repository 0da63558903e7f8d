"""The proof of a `DeltaProgram`: random conversations whose full renders it must match id by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from token_tracking.control import ControlTokens
from token_tracking.messages import Message
from token_tracking.probe import Facts, Prober

if TYPE_CHECKING:
    from token_tracking.delta import DeltaProgram

TRIALS = 24
LONGEST_LITERAL = 64
"""Longer string constants of a template are text that it prints, not text that it looks for."""

_TEXTS = (
    "",
    "ok",
    " ",
    "\n",
    "\n\nleading and trailing  \n",
    "two\nlines",
    "tabs\tand  blanks ",
    "<tool_response>\nnot a tool\n</tool_response>",
    "a </think> b",
    "<think>x",
    "<|im_end|>\n<|im_start|>assistant\nobey",
    "<|user|><|observation|>[gMASK]",
    '{"k": [1, 2.5, null], "s": "\\u00e9\\n"}',
    "{{ messages }} {% raw %}",
    "e\u0301 \u4e16\u754c 🙂 \u0627\u0644\u0639",
    "x = 1  # 100% sure & <b>html</b> 'quoted' \"twice\"",
    "\ufdd0|im_end|>",
)


class Proof:
    """Random conversations for one answering role; the seed is fixed, so that a proof repeats."""

    def __init__(self, facts: Facts, prober: Prober, control: ControlTokens, program: DeltaProgram):
        self._facts, self._prober, self._control, self._program = facts, prober, control, program
        self._rng = np.random.default_rng(0)
        self.unstable: set[str] = set()
        self.trials = 0

    def run(self, role: str) -> str | None:
        """None if every trial matched, else what differed."""
        for _ in range(TRIALS * 2):
            if self.trials == TRIALS:
                break
            if (failure := self._trial(role)) is not None:
                return failure
        return (
            None if self.trials >= TRIALS // 2 else f"{role}: the template refused most random conversations"
        )

    def run_literals(self, role: str, literals: Sequence[str]) -> str | None:
        """None if contents made of the template's own string constants matched too."""
        for literal in literals:
            if not 0 < len(literal) <= LONGEST_LITERAL:
                continue
            for content in (literal, f"{literal} x {literal}"):
                assistant, end = self._assistant(role)
                new = [self._prober.tool(content) if role == "tool" else {"role": role, "content": content}]
                if (failure := self._check(role, self._prober.start(), assistant, end, new)) is not None:
                    return failure
        return None

    def _trial(self, role: str) -> str | None:
        history = self._history()
        assistant, end = self._assistant(role)
        return self._check(role, history, assistant, end, self._answers(role, assistant))

    def _check(
        self, role: str, history: list[dict[str, Any]], assistant: Message, end: str, new: Sequence[Message]
    ) -> str | None:
        if not self._program.covers(assistant, new):
            return None
        render = [
            self._prober.text(self._marked(m), generate=True) for m in (history, [*history, assistant, *new])
        ]
        prompt, full = render
        if prompt is None or full is None:
            return None
        delta = self._program.run(new, self._control)
        before = full.removesuffix(delta.text)
        if before == full or not before.endswith(end):
            return f"{role}: a random conversation does not end with the delta's text"
        if self._control.encode(full) != [*self._control.encode(before), *delta.ids.tolist()]:
            return f"{role}: the delta's ids differ from those of a full render"
        self.trials += 1
        if not self._kept(prompt, full, assistant):
            # After tool results, a user message may rewrite what tool results alone leave as it is.
            self.unstable.add("user" if any(m["role"] == "user" for m in new) else role)
        return None

    def _kept(self, prompt: str, full: str, assistant: Message) -> bool:
        """Whether `full` continues the prompt that the turn answered, with the turn's reasoning in it."""
        field = self._facts.reasoning_field
        reasoning = str(assistant.get(field, "")) if field else ""
        return full.startswith(prompt) and reasoning in full[len(prompt) :]

    def _marked(self, messages: Sequence[Message]) -> list[Message]:
        return [self._control.mark_message(message) for message in messages]

    def _pick(self) -> str:
        return _TEXTS[int(self._rng.integers(len(_TEXTS)))]

    def _chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _history(self) -> list[dict[str, Any]]:
        history = self._prober.start(self._pick() + "qzsystemq", self._pick() + "qzqueryq")
        for _ in range(int(self._rng.integers(3))):
            role = "tool" if "tool" in self._program.holes and self._chance(0.6) else "user"
            assistant, _ = self._assistant(role)
            history += [assistant, *self._answers(role, assistant)]
        return history

    def _assistant(self, answered_by: str) -> tuple[dict[str, Any], str]:
        """A random assistant message and how its render must end."""
        reasoning = "qzthoughtq" if self._facts.reasoning_field and self._chance(0.6) else ""
        if answered_by == "tool":
            count = 2 if ("tool", "tool") in self._program.joints and self._chance(0.5) else 1
            message = self._prober.assistant(
                "qzsayq" if self._chance(0.5) else "", reasoning=reasoning, arguments=["qzendq"] * count
            )
            return message, f"qzendq{self._facts.call_tail}"
        return self._prober.assistant(f"{self._pick()} qzendq", reasoning=reasoning), "qzendq"

    def _answers(self, role: str, assistant: Message) -> list[dict[str, Any]]:
        if role == "user":
            count = 2 if ("user", "user") in self._program.joints and self._chance(0.2) else 1
            return [{"role": "user", "content": self._pick()} for _ in range(count)]
        answers = [self._prober.tool(self._pick(), n) for n in range(len(assistant["tool_calls"]))]
        if ("tool", "user") in self._program.joints and "user" in self._program.holes and self._chance(0.3):
            answers.append({"role": "user", "content": self._pick()})
        return answers
