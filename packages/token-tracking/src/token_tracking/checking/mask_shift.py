"""A loss mask that fits the turns of a conversation, but some tokens further on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from token_tracking.checking.words import Words

FARTHEST = 8
"""Tokens by which a mask is tried."""


def runs_of(mask: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in list(pairwise(edges))[::2]]


def shift_of(
    mask: npt.NDArray[np.uint8],
    spoken: npt.NDArray[np.bool_],
    turns: Sequence[Words],
    leads: Mapping[int, int],
) -> int:
    """By how many tokens to the right every trained run lies off a turn; 0: it does not, or one cannot tell.

    Args:
        mask: loss mask, `[n]`.
        spoken: what models wrote, `[n]`.
        turns: the turns that say something.
        leads: per turn, where what was sampled may begin later than the turn.
    """
    runs = runs_of(mask)
    size = len(mask)
    for shift in sorted(range(-FARTHEST, FARTHEST + 1), key=abs):
        if runs and all(any(run in _places(t, leads, shift, size) for t in turns) for run in runs):
            evident = shift == 0 or bool((mask.astype(bool) & ~spoken).any())
            return shift if evident or (shift == 1 and _cut_at_end(mask, runs, turns[-1], leads)) else 0
    return 0


def _places(turn: Words, leads: Mapping[int, int], shift: int, size: int) -> set[tuple[int, int]]:
    ends = {turn.end, turn.end if turn.stop is None else turn.stop}
    starts = {turn.start, leads[turn.turn]}
    return {(max(a + shift, 0), min(b + shift, size)) for a in starts for b in ends}


def _cut_at_end(
    mask: npt.NDArray[np.uint8], runs: Sequence[tuple[int, int]], last: Words, leads: Mapping[int, int]
) -> bool:
    """Whether the file ends before something outside its only trained turn could be trained, a word lost."""
    ends = last.end == len(mask) and bool(mask[-1])
    return len(runs) == 1 and ends and leads[last.turn] == last.start
