"""`Closings`: the control tokens that close an assistant turn, sampled by the model or printed after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from token_tracking.compiler.delta import DeltaProgram
from token_tracking.compiler.joints import CALLS, STARTS
from token_tracking.compiler.probe import Facts, Prober
from token_tracking.tokenizer import Tokenizer

Run = tuple[int, ...]


class Closings(msgspec.Struct, frozen=True):
    """The runs of control tokens in which turns end; most are one token (`<|im_end|>`).

    Command R closes a turn with two, `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`. A model samples a run up to its
    last token, an engine may stop it at any.
    """

    runs: tuple[Run, ...]
    longest: int
    stop_ids: frozenset[int]
    """The last token of each run: where an engine should stop."""
    close_ids: frozenset[int]
    """Every token of every run."""

    def sampled(self, ids: Sequence[int], *, stopped: bool) -> int:
        """How many tokens at the end of a turn are the beginning of a close.

        Args:
            ids: the last `longest` ids of the turn, or all of a shorter one.
            stopped: the turn ended with a stop token, so that it is one at least.
        """
        if stopped and self.longest == 1:
            return 1
        end = tuple(ids)
        found = (
            count
            for run in self.runs
            for count in range(min(len(run), len(end)), 0, -1)
            if end[-count:] == run[:count]
        )
        return max(found, default=int(stopped))

    def without(self, ids: Sequence[int]) -> Sequence[int]:
        """A turn without a close of several tokens, or the part of one that it has; others are left on."""
        if self.longest == 1:
            return ids
        return ids[: len(ids) - self.sampled(ids[-self.longest :], stopped=False)]

    def printed(self, ids: Sequence[int]) -> int:
        """How many tokens at the start of a delta close the turn before it; one at least."""
        begin = tuple(ids[: self.longest])
        return max((len(run) for run in self.runs if begin[: len(run)] == run), default=1)

    def overlap(self, ids: Sequence[int], delta: Sequence[int], *, stopped: bool) -> int:
        """How many tokens at the end of a turn are those that the delta after it begins with.

        0 of a turn that stopped: it stopped with another token (a cross-stop). The other arguments are as in
        `sampled`.
        """
        count = self.sampled(ids, stopped=stopped)
        return count if count and tuple(ids[-count:]) == tuple(delta[:count]) else 0


def learn_closings(
    facts: Facts, prober: Prober, program: DeltaProgram | None, tokenizer: Tokenizer, eos: str | None
) -> Closings:
    """Find how turns end: in joints, or renders without a program; at the end of a text; and `eos`.

    Args:
        facts: what probing found.
        prober: renders.
        program: None: deltas are found by renders.
        tokenizer: of the model.
        eos: text of its end-of-sequence token. None: it has none.
    """
    special = tokenizer.special_ids
    last = {CALLS: facts.call_end_text, "assistant": facts.end_text}
    ends = {kind: _leading(tokenizer.encode(text or ""), special) for kind, text in last.items()}
    runs = dict.fromkeys(ends.values())
    for kind, ids in _followed(facts, prober, program, tokenizer):
        run = _leading(ids, special)
        # What follows may begin with a control token too: the close is what a turn at the end has as well.
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(run, ends[kind], strict=False))
        runs[tuple(a for a, _ in shared) or run[:1]] = None
    final = [i for i in tokenizer.encode(facts.end_text or "")[-1:] if i in special]
    ids = [*final, *([tokenizer.token_to_id(eos)] if eos else [])]
    runs |= dict.fromkeys((i,) for i in ids if i is not None)
    found = tuple(run for run in runs if run)
    return Closings(
        runs=found,
        longest=max(map(len, found), default=1),
        stop_ids=frozenset(run[-1] for run in found),
        close_ids=frozenset(itertools.chain(*found)),
    )


def _leading(ids: Iterable[int], special: frozenset[int]) -> Run:
    return tuple(itertools.takewhile(special.__contains__, ids))


def _followed(
    facts: Facts, prober: Prober, program: DeltaProgram | None, tokenizer: Tokenizer
) -> Iterable[tuple[str, Sequence[int]]]:
    """Kinds of turns, and the ids after one that a message follows."""
    if program is not None:
        yield from ((kind, joint.ids) for (kind, _), joint in program.joints.items() if kind in STARTS)
        return
    user = {"role": "user", "content": "qzlaterq"}
    turns = [("assistant", prober.assistant("qzcontentq"), user, "qzcontentq")]
    if facts.call_tail is not None:
        call = prober.assistant("", arguments=("qzvalueq",))
        turns.append((CALLS, call, prober.tool("qzresultq"), "qzvalueq" + facts.call_tail))
    for kind, turn, new, end in turns:
        text = prober.text([*prober.start(), turn, new], generate=True) or ""
        yield kind, tokenizer.encode(text.partition(end)[2])
