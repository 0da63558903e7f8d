"""`truncate`: the first tokens of a sample, with every channel cut at the same place."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking.kept import KeptSets
from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import Rollout, trained_mask


def truncate(sample: Sample, max_length: int) -> Sample:
    """The sample's first `max_length` tokens; the sample itself if it is not longer.

    Ids, mask, log-probabilities, versions, turns, kept sets and routed experts are cut together
    (vllm#54539: one channel cut, another not). A turn that is cut ends with `length`; the rewards of turns
    that are cut off are gone, the rollout's reward stays. So under turn credit compute `advantages` before,
    as `Collator` does: after it, a rollout that earned most of its reward beyond the cut looks like a bad
    one. Arrays stay views.

    Raises:
        BatchError: `max_length` is less than 1.
    """
    if max_length < 1:
        raise BatchError(f"max_length must be 1 or more, got {max_length}")
    if len(sample) <= max_length:
        return sample
    kept = None
    if sample.kept_ids is not None and sample.kept_offsets is not None:
        kept = KeptSets(sample.kept_ids, sample.kept_offsets).part(0, max_length)
    experts = sample.routed_experts
    return msgspec.structs.replace(
        sample,
        token_ids=sample.token_ids[:max_length],
        loss_mask=sample.loss_mask[:max_length],
        logprobs=sample.logprobs[:max_length],
        versions=sample.versions[:max_length],
        prompt_length=min(sample.prompt_length, max_length),
        turns=tuple(
            turn
            if turn.end <= max_length
            else msgspec.structs.replace(turn, end=max_length, finish_reason="length")
            for turn in sample.turns
            if turn.start < max_length
        ),
        kept_ids=None if kept is None else kept.ids,
        kept_offsets=None if kept is None else kept.offsets,
        routed_experts=None if experts is None else experts[: max_length - 1],
    )


def cut_rewards(
    rewards: Sequence[npt.NDArray[np.float32]], cut: Sequence[Sample], rollouts: Sequence[Rollout]
) -> tuple[npt.NDArray[np.float32], ...]:
    """Token rewards of whole samples, for what is left of them: none is lost that a token can still earn.

    What stood beyond a cut moves to the last trained token before it, of the sample or, if none is left
    there, of the rollout's earlier parts. Where no trained token is left before it, it is dropped.

    Args:
        rewards: one array per sample, as long as the sample was, from `token_rewards`.
        cut: the samples, cut or not.
        rollouts: how they hang together, from `group_samples`.
    """
    if all(len(each) == len(sample) for each, sample in zip(rewards, cut, strict=True)):
        return tuple(rewards)
    out = tuple(each[: len(sample)].copy() for each, sample in zip(rewards, cut, strict=True))
    for rollout in rollouts:
        last: tuple[int, int] | None = None
        for index in rollout.samples:
            hits = np.flatnonzero(trained_mask(cut[index]))
            if len(hits):
                last = index, int(hits[-1])
            if last is not None:
                out[last[0]][last[1]] += rewards[index][len(cut[index]) :].sum()
    return out
