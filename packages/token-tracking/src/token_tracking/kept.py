"""`KeptSets`: the vocabulary ids that truncated sampling chose from, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TOP_K_ALL = 1 << 30
"""SGLang writes "no top_k" as this number where it does not write -1."""


class KeptSets(NamedTuple):
    """One set of vocabulary ids per token, as SGLang's and vLLM's sampling masks give them.

    Token i was chosen among `ids[offsets[i]:offsets[i + 1]]`, and its `processed` log-probability is
    normalised over them alone. A trainer that normalises over the whole vocabulary gets another number
    (trl#6789), so the sets travel with the tokens.
    """

    ids: npt.NDArray[np.int32]
    """All sets one after the other, `[k]`."""
    offsets: npt.NDArray[np.int64]
    """`[n + 1]`, rising from 0 to `k`. An empty set: the token was not sampled, or not truncated."""

    @classmethod
    def from_lists(cls, sets: Sequence[Sequence[int]]) -> KeptSets:
        """From one list of ids per token."""
        ids = np.array([i for kept in sets for i in kept], np.int32)
        return cls(ids, np.cumsum([0, *map(len, sets)]).astype(np.int64))

    def part(self, start: int, end: int) -> KeptSets:
        """The sets of tokens `start` to `end`."""
        low, high = int(self.offsets[start]), int(self.offsets[end])
        return KeptSets(self.ids[low:high], self.offsets[start : end + 1] - low)


def truncated(top_p: float | None, top_k: int | None, min_p: float | None) -> bool:
    """Whether sampling parameters cut the vocabulary; None: not known, counted as off."""
    return (
        (top_p is not None and top_p < 1)
        or (top_k is not None and 0 < top_k < TOP_K_ALL)
        or (min_p is not None and min_p > 0)
    )


def fault(kept: KeptSets, chosen: npt.NDArray[np.int32]) -> str | None:
    """Why `kept` cannot be the sets that `chosen` (int32 `[n]`) were sampled from; None: it can."""
    ids, offsets = kept
    if ids.dtype != np.int32 or ids.ndim != 1:
        return f"kept_ids must be a flat int32 array, got {ids.dtype} {ids.shape}"
    if offsets.dtype != np.int64 or offsets.shape != (len(chosen) + 1,):
        return f"kept_offsets must be int64 of length {len(chosen) + 1}, got {offsets.dtype} {offsets.shape}"
    counts = np.diff(offsets)
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids) or bool(np.any(counts < 0)):
        return f"kept_offsets must rise from 0 to {len(ids)}, the number of kept_ids"
    if len(ids) and int(ids.min()) < 0:
        return f"kept_ids holds the negative id {int(ids.min())}: padding was not cut off"
    token = np.repeat(np.arange(len(chosen)), counts)
    found = np.zeros(len(chosen), bool)
    found[token[ids == chosen[token]]] = True
    if not bool(np.all(found)):
        at = int(np.flatnonzero(~found)[0])
        return (
            f"token {at} (id {int(chosen[at])}) is not among the {int(counts[at])} ids of its own kept set: "
            "the sets belong to other tokens"
        )
    return None


def joined(pieces: Sequence[tuple[int, KeptSets]], count: int) -> KeptSets | None:
    """The sets of `count` tokens from pieces (first token, sets) in order; None: no set holds an id."""
    counts = np.zeros(count, np.int64)
    for start, kept in pieces:
        counts[start : start + len(kept.offsets) - 1] = np.diff(kept.offsets)
    if not bool(counts.any()):
        return None
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return KeptSets(np.concatenate([kept.ids for _, kept in pieces]), offsets)
