"""The proof of a `DeltaProgram`: random conversations whose full renders it must match id by id."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from token_tracking.compiler.delta import ANSWER_ROLES, DeltaProgram, Refusal
from token_tracking.compiler.joints import CALLS, GENERATE, PRINTS, STARTS, Joint
from token_tracking.compiler.judge import Judge
from token_tracking.compiler.lookups import MOST_ROUNDS, Lookups, start
from token_tracking.compiler.probe import Facts, Prober
from token_tracking.compiler.probe_joints import Pair, learn_joints
from token_tracking.compiler.rendering import Constants
from token_tracking.compiler.trials import Trials
from token_tracking.control import ControlTokens

TRIALS = 12
"""Conversations per pair of neighbours."""
LONG_ROUNDS = 12
"""Rounds of the longest history; more if the template counts further."""
_HARD = ' \n "qzcontentq"\\ \u00e9 \n '
_USUAL = (
    ("assistant", "user"),
    ("user", "user"),
    (CALLS, "tool"),
    ("tool", "tool"),
    ("tool", "user"),
    (CALLS, "user"),
    ("assistant", "tool"),
)


def compile_program(
    facts: Facts, prober: Prober, control: ControlTokens, constants: Constants
) -> DeltaProgram | Refusal:
    """Learn the joints, then accept each pair of neighbours that random conversations prove.

    Args:
        facts: what probing found.
        prober: renders.
        control: marks and encodes contents, as conversations will.
        constants: what the template spells out; contents and histories made of it are part of the proof.
    """
    if facts.end_text is None:
        return Refusal("the end of an assistant turn was not found in its render")
    guesses = learn_joints(facts, prober, control)
    program = DeltaProgram(
        joints={},
        holes={},
        stable=frozenset(ANSWER_ROLES),
        words=constants.words,
        empty_calls=facts.empty_calls,
    )
    proof = Proof(facts, prober, control, constants)
    for pair in _USUAL:
        result = proof.accept(program, guesses, pair)
        if isinstance(result, Refusal):
            result = msgspec.structs.replace(program, refused={**program.refused, pair: result.why})
        program = result
    if not program.joints:
        return Refusal("; ".join(dict.fromkeys(program.refused.values())))
    stable = program.stable & program.holes.keys()
    return msgspec.structs.replace(program, stable=stable, trials=proof.trials)


class Proof:
    """Accepts pairs one by one."""

    def __init__(self, facts: Facts, prober: Prober, control: ControlTokens, constants: Constants):
        self._facts, self._prober, self._constants = facts, prober, constants
        self._judge = Judge(facts, prober, control)
        self._trials = Trials(facts, prober)

    @property
    def trials(self) -> int:
        """Conversations that matched so far."""
        return self._judge.trials

    def accept(
        self, program: DeltaProgram, guesses: Mapping[Pair, Joint], pair: Pair
    ) -> DeltaProgram | Refusal:
        """The program with one pair more, or why not."""
        before, role = pair
        closing = (role, GENERATE)
        if pair not in guesses or closing not in guesses:
            return Refusal(self._unseen(pair))
        if before in STARTS and (guesses[pair].lead or not guesses[pair].ids):
            # Nothing that was sampled may merge with the text after it.
            return Refusal("no control token stands first after the turn")
        if before not in STARTS and before not in program.holes:
            return Refusal(f"{before} is left to full renders")
        new = role not in program.holes
        joints = {**program.joints, pair: guesses[pair], closing: guesses[closing]}
        candidate = msgspec.structs.replace(program, joints=joints)
        if new:
            fitting = self._with_hole(candidate, pair)
            if fitting is None:
                return Refusal(f"the content of {role} is printed in none of the known ways")
            candidate = fitting
        if before in STARTS:
            lookups = self._lookups(candidate, pair)
            if before == CALLS and lookups.depends_on_content():
                candidate = msgspec.structs.replace(candidate, lone_calls=True)
                lookups = self._lookups(candidate, pair)
            why = (lookups.run() if new else None) or lookups.fields() or lookups.positions()
            if why is not None:
                return Refusal(why)
            candidate = lookups.program
        return self._random(candidate, pair)

    def _unseen(self, pair: Pair) -> str:
        if {CALLS, "tool"} & {*pair} and not self._facts.calls:
            return "the template prints no tool calls"
        if CALLS in pair and self._facts.call_tail is None:
            return "the end of the calls was not found in the template's print"
        return "the template refuses it, or does not print the contents once and in order"

    def _lookups(self, program: DeltaProgram, pair: Pair) -> Lookups:
        return Lookups(self._facts, self._prober, self._judge, self._constants, program, pair)

    def _with_hole(self, program: DeltaProgram, pair: Pair) -> DeltaProgram | None:
        for hole in PRINTS:
            candidate = msgspec.structs.replace(program, holes={**program.holes, pair[1]: hole})
            lookups = self._lookups(candidate, pair)
            if self._judge.fits(candidate, lookups.turn(), lookups.messages(_HARD)):
                return candidate
        return None

    def _random(self, program: DeltaProgram, pair: Pair) -> DeltaProgram | Refusal:
        counts = [number for number in self._constants.numbers if number <= MOST_ROUNDS]
        matched = 0
        for attempt in range(TRIALS * 4):
            if matched == TRIALS:
                break
            long = max([LONG_ROUNDS, *counts]) + 1 if attempt == 1 and pair[0] in STARTS else None
            history = self._trials.history(long)
            roles = self._roles(program, pair, longer=1.0 if attempt == 2 else 0.35)
            turn = self._trials.turn(start(program, pair), max(1, roles.count("tool")))
            new = self._trials.answers(turn, roles)
            verdict = self._judge.compare(program, history, turn, new)
            if verdict.failure is not None:
                return Refusal(verdict.failure)
            matched += verdict.trial
            if not verdict.kept:
                # After tool results, a user message may rewrite what tool results alone leave as it is.
                changed = "user" if "user" in roles else roles[0]
                program = msgspec.structs.replace(program, stable=program.stable - {changed})
        if matched < TRIALS // 2:
            return Refusal("the template refused most random conversations")
        return program

    def _roles(self, program: DeltaProgram, pair: Pair, *, longer: float) -> list[str]:
        """A random path through the joints that has the pair in it."""
        roles = [pair[1]] if pair[0] in STARTS else [*pair]
        while len(roles) < 6 and self._trials.chance(longer):
            following = [
                after for before, after in program.joints if before == roles[-1] and after != GENERATE
            ]
            if not following:
                break
            roles.append(self._trials.pick(following))
        return roles
