"""Tinker: `Datum` (PyPI tinker 0.38.0; layout as in thinking-machines-lab/tinker-cookbook 9dfcc3a).

Everything is shifted by one: `model_input` is tokens 0..n-2, and entry i of `target_tokens`, `logprobs`,
`advantages` and `weights` belongs to token i + 1. No padding. `datums` is for the losses that take a ratio
(`importance_sampling`, `ppo`, ...): Tinker has no mask there; the advantage is 0 on every token outside the
loss, and so is a logprob that was not recorded. `sft_datums` is for `cross_entropy`: `weights` is the mask.

Tinker computes no group statistics: parts, the baseline and turn rewards are settled in the advantages. Its
log-probabilities are at temperature 1. There is no place for kept sets and routed experts; versions and ids
are not carried. A sample outside the loss is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from token_tracking.sample import Sample

from trainer_bridge.adapters.loading import load
from trainer_bridge.adapters.omissions import Omissions
from trainer_bridge.adapters.rows import Float32, Row, Trainer, make_groups, working_rows

_RL = Trainer("Tinker", frozenset(), temperature=1.0)
_SFT = Trainer("Tinker", frozenset({"parts", "baseline", "turn_rewards"}))
_INSTALL = "tinker>=0.38"


def datums(
    samples: Sequence[Sample], *, advantages: Sequence[Float32], omissions: Omissions | None = None
) -> list[Any]:
    """One `Datum` per sample in the loss, by group, rollout and part.

    Args:
        samples: of each rollout all parts, of each group all rollouts.
        advantages: one array per sample, as from `trainer_bridge.advantages.advantages(...).tokens`.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: something does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
        TrainerMissingError: tinker is not installed.
    """
    groups = make_groups(samples, _RL, omissions, advantages=advantages)
    rows = [row for row in working_rows(groups, omissions) if row.sample.in_loss]
    return [_datum(row, logprobs=row.logprobs, advantages=row.advantages) for row in rows]


def sft_datums(samples: Sequence[Sample], *, omissions: Omissions | None = None) -> list[Any]:
    """One `Datum` per sample in the loss, for supervised training; log-probabilities are not needed.

    Raises:
        BatchError: something does not fit.
        TrainerMissingError: tinker is not installed.
    """
    groups = make_groups(samples, _SFT, omissions, ratio=False)
    rows = [row for row in working_rows(groups, omissions) if row.sample.in_loss]
    return [_datum(row, weights=row.mask.astype(np.float32)) for row in rows]


def _datum(row: Row, **streams: Float32) -> Any:
    tinker = load("tinker", _INSTALL)
    ids = row.sample.token_ids
    inputs = {name: array[1:].copy() for name, array in streams.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={"target_tokens": ids[1:].astype(np.int64), **inputs},
    )
