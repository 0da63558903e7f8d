"""`truncate`: the first tokens of a sample, with every channel cut at the same place."""

from __future__ import annotations

import msgspec
from token_tracking.kept import KeptSets
from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError


def truncate(sample: Sample, max_length: int) -> Sample:
    """The sample's first `max_length` tokens; the sample itself if it is not longer.

    Ids, mask, log-probabilities, versions, turns, kept sets and routed experts are cut together
    (vllm#54539: one channel cut, another not). A turn that is cut ends with `length`; the rewards of turns
    that are cut off are gone, the rollout's reward stays. Arrays stay views.

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
