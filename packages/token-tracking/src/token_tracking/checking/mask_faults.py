"""Loss masks against the structure of a conversation: what is trained and should not be, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from token_tracking.checking.difference import Difference, Kind, short
from token_tracking.checking.layout import Piece
from token_tracking.checking.mask_shift import runs_of, shift_of
from token_tracking.checking.words import Words, bare_leads, words
from token_tracking.template import ChatTemplate

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
_COVERS = 0.9
"""Of the tokens that no model wrote: a mask with more of them covers the prompt."""


def mask_faults(
    ids: Ids, pieces: Sequence[Piece], mask: Mask, template: ChatTemplate, *, ours: bool
) -> Iterator[Difference]:
    """Compare a mask with the turns.

    Args:
        ids: int32 `[n]`.
        pieces: their layout. Without any turn in it nothing can be said.
        mask: loss mask, `[n]`.
        template: knows what a generation prompt prefills.
        ours: the mask was made by recording what was sampled: what is 0 in a turn was not sampled.
    """
    turns = words(ids, pieces, template)
    if not turns:
        return
    spoken = np.zeros(len(ids), bool)
    for turn in turns:
        spoken[turn.start : turn.end] = True
    answered = [turn for turn in turns if turn.start < turn.end]
    leads = {turn.turn: _lead(ids, turn, template) for turn in answered}
    shift = 0 if ours else shift_of(mask, spoken, answered, leads)
    if shift:
        yield _shifted(shift, mask, answered)
        return
    yield from _on_template(ids, mask.astype(bool) & ~spoken, int((~spoken).sum()), turns, template)
    if ours:
        return
    if answered and not mask.any():
        what = "no token is trained: the loss mask is 0 everywhere"
        first, *others = answered
        also = tuple(turn.turn for turn in others)
        yield _found("turn_untrained", what, first.turn, (first.start, first.end), in_turn=True, also=also)
        return
    for turn in answered:
        yield from _in_turn(ids, mask, turn, leads[turn.turn], template)


def _shifted(shift: int, mask: Mask, turns: Sequence[Words]) -> Difference:
    count = f"{abs(shift)} token{'s' if abs(shift) > 1 else ''}"
    lost = "token of each turn has" if abs(shift) == 1 else f"{abs(shift)} tokens of each turn have"
    what = f"the mask is shifted by {count} to the right: the first {lost} loss mask 0"
    if shift < 0:
        what = f"the mask is shifted by {count} to the left: the last {lost} loss mask 0, what stands before "
        what += "the turn has 1 (a mask of the predictions, not of the tokens?)"
    first, *others = turns
    also = tuple(turn.turn for turn in others)
    return _found("mask_shifted", what, first.turn, runs_of(mask)[0], in_turn=True, also=also)


def _on_template(
    ids: Ids, wrong: npt.NDArray[np.bool_], total: int, turns: Sequence[Words], template: ChatTemplate
) -> Iterator[Difference]:
    runs = runs_of(wrong)
    count = int(wrong.sum())
    if len(runs) > 1 and count >= _COVERS * total:
        what = f"the mask covers the prompt: {count} of {total} tokens that no model wrote have loss mask 1"
        places = [_following(turns, high) for _, high in runs]
        yield _found("mask_on_template", what, places[0], runs[0], in_turn=False, also=tuple(places[1:]))
        return
    for low, high in runs:
        turn = next((turn for turn in turns if turn.start >= high), None)
        text = short(template.tokenizer.decode(ids[low:high].tolist()))
        what = f"{high - low} of the prompt's tokens have loss mask 1: {text}"
        if turn is not None and low >= turn.begin:
            what += " begins the turn, no model wrote it (thinking-machines-lab/tinker-cookbook#864)"
        yield _found("mask_on_template", what, _following(turns, high), (low, high), in_turn=False)


def _following(turns: Sequence[Words], end: int) -> int:
    return next((turn.turn for turn in turns if turn.start >= end), turns[-1].turn + 1)


def _in_turn(ids: Ids, mask: Mask, turn: Words, lead: int, template: ChatTemplate) -> Iterator[Difference]:
    if not mask[turn.start : turn.end].any():
        what = f"no token of this turn is trained ({turn.end - turn.start} with loss mask 0)"
        yield _found("turn_untrained", what, turn.turn, (turn.start, turn.end), in_turn=True)
        return
    trained = np.flatnonzero(mask[turn.start : turn.end]) + turn.start
    last = int(trained[-1]) + 1
    # What no engine samples first is prompt, though the template has it in its finished turns.
    start = turn.start if trained[0] < lead else lead
    off = np.flatnonzero(mask[start:last] == 0) + start
    if len(off):
        low, high = int(off[0]), int(off[-1]) + 1
        texts = [template.tokenizer.decode(ids[a:b].tolist()) for a, b in _runs_at(off)]
        what = f"{len(off)} of the turn's {turn.end - turn.start} tokens have loss mask 0: "
        what += ", ".join(map(short, texts[:4])) + (" …" if len(texts) > 4 else "")
        yield _found("mask_hole", what, turn.turn, (low, high), in_turn=True)
    if turn.stop is not None and last <= turn.stop:
        stop = template.tokenizer.decode(ids[turn.stop : turn.end].tolist())
        rest = turn.stop - last
        lost = f"its stop token {stop} is not" if not rest else f"its last {rest} tokens and {stop} are not"
        what = f"the turn is trained, {lost} (THUDM/slime#1490)"
        yield _found("stop_untrained", what, turn.turn, (last, turn.end), in_turn=True)


def _runs_at(indices: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    cuts = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1).tolist(), len(indices)]
    return [(int(indices[a]), int(indices[b - 1]) + 1) for a, b in pairwise(cuts)]


def _lead(ids: Ids, turn: Words, template: ChatTemplate) -> int:
    """Where a turn begins whose reasoning marker, or empty pair, was prefilled by hand."""
    leads = bare_leads(template)
    text = ""
    at = turn.start
    for end in range(turn.start + 1, min(turn.start + 9, turn.end) + 1):
        text = template.tokenizer.decode(ids[turn.start : end].tolist())
        if "".join(text.split()) in leads:
            at = end
    return at


def _found(
    kind: Kind, what: str, turn: int, ids: tuple[int, int], *, in_turn: bool, also: tuple[int, ...] = ()
) -> Difference:
    return Difference(kind=kind, what=what, turn=turn, in_turn=in_turn, ids=ids, template=(0, 0), also=also)
