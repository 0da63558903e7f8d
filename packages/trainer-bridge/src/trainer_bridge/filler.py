"""Batches without anything to train, so that all data-parallel ranks run as many forward passes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer_bridge.batch import Batch, Sampling
from trainer_bridge.placement import Placement

Array = npt.NDArray[Any]


def filler(
    layout: Literal["padded", "packed"],
    tokens: int,
    *,
    pad_id: int,
    advantages: bool,
    sampling: bool,
    experts: tuple[tuple[int, int], type[np.signedinteger[Any]]] | None,
) -> Batch[Array]:
    """One sequence of padding that is attended to, and that nothing is trained on.

    Attended to, because a row of which nothing may be attended to is NaN after the softmax, and 0 * NaN is
    NaN in every gradient. All weights are 0, so gradients are 0 too, and a rank with nothing else still takes
    part in what the ranks do together (DDP, FSDP).

    Args:
        layout: as the other batches of the step.
        tokens: length of the sequence.
        pad_id: its token id.
        advantages: the other batches have some.
        sampling: the other batches have it.
        experts: layers, experts per token and dtype of the other batches' routed experts. None: they have
            none.
    """
    place = Placement(layout, (1, tokens), (0,), (0,), (tokens,))

    def same(dtype: npt.DTypeLike, value: float) -> Array:
        return place.spread(dtype, value, lambda _: None)

    nothing = np.full(1, -1, np.int32)
    return Batch(
        layout=layout,
        token_ids=same(np.int64, pad_id),
        attention_mask=same(np.int64, 1) if layout == "padded" else None,
        position_ids=np.arange(tokens)[None],
        sequence_ids=same(np.int32, 0),
        loss_mask=same(np.bool_, False),
        logprobs=same(np.float32, 0),
        temperature=same(np.float32, 1),
        kept=None,
        versions=same(np.int32, -1),
        weights=same(np.float32, 0),
        advantages=same(np.float32, 0) if advantages else None,
        token_rewards=same(np.float32, 0),
        sampling=Sampling(
            same(np.float32, np.nan), same(np.float32, np.nan), same(np.int64, -1), same(np.float32, np.nan)
        )
        if sampling
        else None,
        routed_experts=None
        if experts is None
        else place.spread_wide(experts[1], -1, experts[0], lambda _: None),
        rewards=np.full(1, np.nan, np.float32),
        sample_index=nothing,
        rollout_index=nothing.copy(),
        group_index=nothing.copy(),
        cu_seqlens=np.array([0, tokens], np.int32),
        max_seqlen=tokens,
    )
