"""The channels of a batch that need more than copying: log-probabilities, sampling, kept sets, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from token_tracking.errors import MissingLogprobsError
from token_tracking.sample import Sample, Turn

from trainer_bridge.batch import Kept, Sampling
from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import trained_mask
from trainer_bridge.placement import Placement

Array = npt.NDArray[Any]


def check_ratio(sample: Sample) -> None:
    """Raise unless a ratio to the policy that sampled can be computed on every trained token.

    Raises:
        MissingLogprobsError: see `Sample.require_logprobs`; or a turn's log-probabilities were taken after
            a temperature that is not known.
    """
    mask = trained_mask(sample)
    if not mask.any():
        return
    sample.require_logprobs()
    for number, turn in enumerate(sample.turns):
        if (
            turn.logprob_kind == "processed"
            and turn.temperature is None
            and mask[turn.start : turn.end].any()
        ):
            raise MissingLogprobsError(
                f"rollout {sample.rollout_id}, turn {number}: its log-probabilities are processed, at a "
                "temperature that was not recorded, so no ratio can be formed; record it, or ask "
                "the engine for raw log-probabilities"
            )


def logprobs_of(sample: Sample) -> Array:
    """As recorded on trained tokens; 0 elsewhere.

    0 and not what an untrained token had: `exp(0 - logprob)` overflows to infinity for unlikely tokens, and
    infinity by weight 0 is NaN.
    """
    return np.where(trained_mask(sample), sample.logprobs, np.float32(0))


def temperature_of(sample: Sample, *, recompute: bool) -> Array:
    """Of the distribution the log-probabilities belong to; temperature 0 (greedy) is left at 1.

    Greedy decoding has no distribution to divide for: engines report it at temperature 1.
    """
    out = np.ones(len(sample), np.float32)
    for turn in sample.turns:
        if (recompute or turn.logprob_kind == "processed") and turn.temperature:
            out[turn.start : turn.end] = turn.temperature
    return out


def spread_sampling(placement: Placement, samples: Sequence[Sample]) -> Sampling[Array]:
    """What the engine was told for each token."""

    def channel(name: str, dtype: npt.DTypeLike, unknown: float) -> Array:
        def values(index: int) -> Array:
            out = np.full(len(samples[index]), unknown, dtype)
            for turn in samples[index].turns:
                value = _parameter(turn, name)
                if value is not None:
                    out[turn.start : turn.end] = value
            return out

        return placement.spread(dtype, unknown, values)

    nan = float("nan")
    return Sampling(
        temperature=channel("temperature", np.float32, nan),
        top_p=channel("top_p", np.float32, nan),
        top_k=channel("top_k", np.int64, -1),
        min_p=channel("min_p", np.float32, nan),
    )


def _parameter(turn: Turn, name: str) -> float | None:
    return {
        "temperature": turn.temperature,
        "top_p": turn.top_p,
        "top_k": turn.top_k,
        "min_p": turn.min_p,
    }[name]


def spread_kept(placement: Placement, samples: Sequence[Sample], *, recompute: bool) -> Kept[Array] | None:
    """Kept sets of processed log-probabilities, offsets counted over the batch. None: there are none.

    Raw log-probabilities are over the whole vocabulary whatever the engine chose from, so their sets stay
    out, unless the trainer computes them anew.
    """
    rows, tokens = placement.shape
    counts = np.zeros(rows * tokens, np.int64)
    pieces: list[tuple[int, Array]] = []
    for index, at in zip(placement.chosen, placement.starts, strict=True):
        sample = samples[index]
        if sample.kept_ids is None or sample.kept_offsets is None:
            continue
        for turn in sample.turns:
            if recompute or turn.logprob_kind == "processed":
                offsets = sample.kept_offsets[turn.start : turn.end + 1]
                counts[at + turn.start : at + turn.end] = np.diff(offsets)
                pieces.append((at + turn.start, sample.kept_ids[int(offsets[0]) : int(offsets[-1])]))
    total = int(counts.sum())
    if not total:
        return None
    offsets = np.zeros(rows * tokens + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    ids = np.empty(total, np.int64)
    for start, piece in pieces:
        low = int(offsets[start])
        ids[low : low + len(piece)] = piece
    return Kept(ids, offsets)


def experts_shape(samples: Sequence[Sample]) -> tuple[tuple[int, int], type[np.signedinteger[Any]]] | None:
    """Layers and experts per token of a step, and the dtype that holds its ids. None: no sample has routing.

    Raises:
        BatchError: two samples differ in layers or experts per token.
    """
    found: dict[tuple[int, int], str] = {}
    wide = False
    for sample in samples:
        routed = sample.routed_experts
        if routed is not None:
            found.setdefault((routed.shape[1], routed.shape[2]), sample.rollout_id)
            wide |= not np.can_cast(routed.dtype, np.int16)
    if len(found) > 1:
        said = ", ".join(f"rollout {rollout}: {shape}" for shape, rollout in found.items())
        raise BatchError(
            f"routed experts of different shape (layers, per token) in one step: {said}; they come from "
            "different models"
        )
    if not found:
        return None
    return next(iter(found)), np.int32 if wide else np.int16


def spread_experts(
    placement: Placement, samples: Sequence[Sample], shape: tuple[int, int], dtype: npt.DTypeLike
) -> Array:
    """Routing `[rows, tokens, layers, top_k]`, -1 where a token has none."""
    return placement.spread_wide(dtype, -1, shape, lambda index: samples[index].routed_experts)
