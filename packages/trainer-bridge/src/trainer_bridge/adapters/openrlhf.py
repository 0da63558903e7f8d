"""OpenRLHF: `Experience`, one row each, as its `SamplesGenerator` makes them (OpenRLHF/OpenRLHF 3c3be62).

| Experience | from |
|---|---|
| `sequences`, `attention_mask` int64 `[1, n]` | token ids; 1 |
| `action_mask` int64, `rollout_log_probs` float32, `[1, n - 1]` | loss mask and logprobs, shifted by one |
| `rewards`, `scores` `[1]` | the reward |
| `response_length`, `total_length`, `truncated` `[1]` | first to last trained token; n; status truncated |
| `advantages`, `returns` float32 `[1, n - 1]` | only if advantages are given |
| `prompts`, `labels` | task id and rollout id (they are for logs) |
| `info` | `reward`, `part`, `parts`, and the oldest weight version `weight_version` |

Entry i of a shifted array belongs to token i + 1; a logprob is 0 where the mask is 0 and none was recorded.

OpenRLHF makes its groups of `n_samples_per_prompt` experiences that follow each other; there is no place for
parts, `in_baseline`, turn rewards, kept sets and routed experts. Give `advantages` and skip
`compute_advantages_and_returns` for batches that have parts or failures. A sample outside the loss has an
action mask of 0; a rollout outside loss and baseline is left out. It pads right, by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from token_tracking.sample import Sample

from trainer_bridge.adapters.loading import load
from trainer_bridge.adapters.omissions import Omissions
from trainer_bridge.adapters.rows import (
    Float32,
    Row,
    Trainer,
    make_groups,
    split_rows,
    versions,
    working_rows,
)
from trainer_bridge.errors import BatchError

_OPENRLHF = Trainer("OpenRLHF", frozenset({"versions"}))
_INSTALL = "openrlhf"


def experiences(
    samples: Sequence[Sample],
    *,
    n_samples_per_prompt: int,
    ratio: bool = True,
    advantages: Sequence[Float32] | None = None,
    omissions: Omissions | None = None,
) -> list[Any]:
    """One `Experience` per sample, a group's together.

    Args:
        samples: of each rollout all parts, of each group all rollouts.
        n_samples_per_prompt: the trainer's; so many rollouts must each group have, unless advantages are
            given.
        ratio: False leaves `rollout_log_probs` out.
        advantages: one array per sample, as from `trainer_bridge.advantages.advantages(...).tokens`.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: a group has another size, a rollout is not graded, or something does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
        TrainerMissingError: OpenRLHF or torch is not installed.
    """
    groups = make_groups(samples, _OPENRLHF, omissions, ratio=ratio, advantages=advantages)
    rows = working_rows(groups, omissions)
    split_rows(rows)
    for group in groups:
        size = sum(len(rollout.rows) for rollout in group if not rollout.idle)
        if advantages is None and size != n_samples_per_prompt:
            raise BatchError(
                f"group {group[0].rows[0].sample.group_id} gives {size} experiences, n_samples_per_prompt is "
                f"{n_samples_per_prompt}: OpenRLHF would compare rollouts of different prompts"
            )
    torch = load("torch", _INSTALL)
    made = load("openrlhf.trainer.ppo_utils.experience", _INSTALL).Experience
    return [_experience(made, torch, row, ratio, advantages is not None) for row in rows]


def _experience(made: Any, torch: Any, row: Row, ratio: bool, settled: bool) -> Any:
    sample, reward = row.sample, row.reward()
    trained = np.flatnonzero(row.mask)
    length = int(trained[-1] - trained[0] + 1) if len(trained) else 0

    def tensor(array: Any, dtype: Any) -> Any:
        return torch.tensor(array, dtype=dtype).unsqueeze(0)

    return made(
        sequences=tensor(sample.token_ids, torch.long),
        attention_mask=torch.ones(1, len(sample), dtype=torch.long),
        action_mask=tensor(row.mask[1:], torch.long),
        rollout_log_probs=tensor(row.logprobs[1:], torch.float32) if ratio else None,
        advantages=tensor(row.advantages[1:], torch.float32) if settled else None,
        returns=tensor(row.advantages[1:], torch.float32) if settled else None,
        rewards=torch.tensor([reward]),
        scores=torch.tensor([reward]),
        response_length=torch.tensor([length]),
        truncated=torch.tensor([sample.status == "truncated"]),
        total_length=torch.tensor([len(sample)]),
        prompts=[sample.task_id],
        labels=[sample.rollout_id],
        images=[None],
        mm_train_inputs=[None],
        info={
            "reward": torch.tensor([reward]),
            "response_clip_ratio": torch.tensor([sample.status == "truncated"]),
            "part": torch.tensor([sample.part]),
            "parts": torch.tensor([sample.parts]),
            "weight_version": torch.tensor([min(versions(row), default=-1)]),
        },
    )
