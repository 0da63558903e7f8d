"""`KeptSets`: the vocabulary ids that truncated sampling chose from, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from token_tracking.errors import RecordCode

TOP_K_ALL = 1 << 30
"""SGLang writes "no top_k" as this number where it does not write -1."""

Logits = npt.NDArray[np.floating[Any]]


class KeptSets(NamedTuple):
    """One set of vocabulary ids per token, as SGLang's and vLLM's sampling masks give them.

    Token i was chosen among `ids[offsets[i]:offsets[i + 1]]`, and its `processed` log-probability is
    normalised over them alone. A trainer that normalises over the whole vocabulary gets another number
    (trl#6789), so the sets travel with the tokens; `logprobs` gives the trainer's number over them.
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

    def log_mass(self, logprobs: Logits) -> npt.NDArray[np.float64]:
        """Logarithm of the probability that a model gives to each token's kept set.

        Args:
            logprobs: log-probabilities over the whole vocabulary, `[n, vocabulary]`, at the temperature that
                the token was sampled at. Logits do as well: their log-sum over the kept ids is returned.

        Returns:
            `[n]`. 0 where the set is empty: the token was not truncated.

        Raises:
            ValueError: the shape does not fit the sets.
        """
        counts = self._counts(logprobs)
        mass = np.zeros(len(counts), np.float64)
        cut = np.flatnonzero(counts)
        if not cut.size:
            return mass
        values = logprobs[np.repeat(np.arange(len(counts)), counts), self.ids].astype(np.float64)
        starts = self.offsets[cut]
        highest = np.maximum.reduceat(values, starts)
        total = np.add.reduceat(np.exp(values - np.repeat(highest, counts[cut])), starts)
        mass[cut] = highest + np.log(total)
        return mass

    def logprobs(self, logprobs: Logits, chosen: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Log-probability of each token over its kept set: what a trainer compares with `processed` ones.

        With the weights that sampled the token the ratio is then 1 (trl#6789). A training framework does the
        same on its own tensors: gather at `chosen`, minus the log-sum-exp of what is gathered at `ids`.

        Args:
            logprobs: see `log_mass`; of a token without a set (not truncated), log-probabilities.
            chosen: the sampled ids, `[n]`.

        Returns:
            `[n]`.

        Raises:
            ValueError: the shapes do not fit.
        """
        mass = self.log_mass(logprobs)
        if chosen.shape != mass.shape:
            raise ValueError(f"{chosen.size} ids for {len(mass)} kept sets")
        return logprobs[np.arange(len(chosen)), chosen].astype(np.float64) - mass

    def _counts(self, logprobs: Logits) -> npt.NDArray[np.int64]:
        counts = np.diff(self.offsets)
        if logprobs.ndim != 2 or len(logprobs) != len(counts):
            raise ValueError(f"log-probabilities of shape {logprobs.shape}: need [{len(counts)}, vocabulary]")
        if len(self.ids) and int(self.ids.max()) >= logprobs.shape[1]:
            raise ValueError(f"kept id {int(self.ids.max())}, the vocabulary has {logprobs.shape[1]} ids")
        return counts


class KeptFault(NamedTuple):
    """Why kept sets cannot be the ones that some ids were sampled from."""

    code: RecordCode
    why: str


def truncated(top_p: float | None, top_k: int | None, min_p: float | None) -> bool:
    """Whether sampling parameters cut the vocabulary; None: not known, counted as off."""
    return (
        (top_p is not None and top_p < 1)
        or (top_k is not None and 0 < top_k < TOP_K_ALL)
        or (min_p is not None and min_p > 0)
    )


def fault(kept: KeptSets, chosen: npt.NDArray[np.int32]) -> KeptFault | None:
    """Why `kept` cannot be the sets that `chosen` (int32 `[n]`) were sampled from; None: it can."""
    return _shape_fault(kept, len(chosen)) or _set_fault(kept, chosen)


def _shape_fault(kept: KeptSets, count: int) -> KeptFault | None:
    ids, offsets = kept
    if (found := _other_form(ids, np.int32)) is not None or ids.ndim != 1:
        return KeptFault("kept_set", f"kept_ids must be a flat int32 array, got {found or ids.shape}")
    if (found := _other_form(offsets, np.int64)) is not None or offsets.shape != (count + 1,):
        why = f"kept_offsets must be int64 of length {count + 1}, got {found or offsets.shape}"
        return KeptFault("kept_offsets", why)
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids) or bool((offsets[1:] < offsets[:-1]).any()):
        why = f"kept_offsets must rise from 0 to {len(ids)}, the number of kept_ids"
        return KeptFault("kept_offsets", why)
    return None


def _other_form(value: object, dtype: type[np.generic]) -> str | None:
    """What a value is, if it is no array of `dtype`; None: it is one."""
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__}"
    array = cast("npt.NDArray[Any]", value)
    return None if array.dtype == dtype else f"{array.dtype} {array.shape}"


def _set_fault(kept: KeptSets, chosen: npt.NDArray[np.int32]) -> KeptFault | None:
    ids, counts = kept.ids, np.diff(kept.offsets)
    if len(ids) and int(ids.min()) < 0:
        why = f"kept_ids holds the negative id {int(ids.min())}: padding was not cut off"
        return KeptFault("kept_vocabulary", why)
    token = np.repeat(np.arange(len(chosen)), counts)
    found = np.zeros(len(chosen), bool)
    found[token[ids == chosen[token]]] = True
    if not bool(found.all()):
        at = int(np.flatnonzero(~found)[0])
        why = (
            f"token {at} (id {int(chosen[at])}) is not among the {int(counts[at])} ids of its own kept set: "
            "the sets belong to other tokens"
        )
        return KeptFault("kept_sampled", why)
    twice = _first_twice(ids, token)
    if twice is not None:
        why = (
            f"the kept set of token {twice[0]} holds id {twice[1]} twice: its mass would count twice in the "
            "normaliser"
        )
        return KeptFault("kept_duplicate", why)
    return None


def _first_twice(ids: npt.NDArray[np.int32], token: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    """The first token, and an id that its set holds twice; None: there is none."""
    keys = token.astype(np.int64) << 32 | ids
    if not bool((keys[1:] <= keys[:-1]).any()):
        return None  # rising, as engines write them
    keys.sort()
    again = np.flatnonzero(keys[1:] == keys[:-1])
    if not again.size:
        return None
    key = int(keys[again[0]])
    return key >> 32, key & 0xFFFFFFFF


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
