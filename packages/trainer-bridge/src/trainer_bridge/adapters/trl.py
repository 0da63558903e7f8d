"""TRL: the return value of a `rollout_func` of `GRPOTrainer` (huggingface/trl 1.16.0).

Layout: `prompt_ids` and `completion_ids` as lists without padding (TRL pads prompts left, completions right);
`logprobs` and `env_mask` go over the completion alone, not shifted: entry i belongs to `completion_ids[i]`.
Further fields (`rollout_reward`, `rollout_id`, `group_id`, `weight_versions`) reach the reward functions;
give `recorded_reward` to the trainer as its `reward_funcs`.

TRL makes its groups of `num_generations` rows that follow each other, one row per rollout. A rollout of
several parts, or one that is trained without being in the baseline, has no place there. A rollout outside
the loss has `env_mask` 0; one outside loss and baseline a reward of None, which TRL leaves out of mean and
deviation. Set `temperature` in `GRPOConfig` to that of the log-probabilities. TRL sees a truncated completion
by its last id (not EOS), not by the sample's status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from token_tracking.sample import Sample

from trainer_bridge.adapters.omissions import Omissions
from trainer_bridge.adapters.rows import RolloutRows, Trainer, make_groups, split_rows, versions
from trainer_bridge.errors import BatchError

_TRL = Trainer("TRL", frozenset({"versions"}))


def rollout_output(
    samples: Sequence[Sample],
    *,
    num_generations: int | None,
    ratio: bool = True,
    omissions: Omissions | None = None,
) -> dict[str, Any]:
    """What `rollout_func` returns, one row per rollout, a group's rows together.

    Args:
        samples: for the prompts that TRL asked for, in their order.
        num_generations: the trainer's; each group must have so many rollouts. None: not checked, for
            processes that hold only a piece of a group.
        ratio: False gives `logprobs=None`, for a trainer that takes no ratio to the sampling policy.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: a rollout has several parts, a group has another size, or something does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
    """
    groups = make_groups(samples, _TRL, omissions, ratio=ratio)
    for group in groups:
        _check_group(group, num_generations)
    rollouts = [rollout for group in groups for rollout in group]
    rows = [rollout.rows[0] for rollout in rollouts]
    split_rows(rows)
    return {
        "prompt_ids": [row.prompt(row.sample.token_ids) for row in rows],
        "completion_ids": [row.response(row.sample.token_ids) for row in rows],
        "logprobs": [row.response(row.logprobs) for row in rows] if ratio else None,
        "env_mask": [row.response(row.mask) for row in rows],
        "rollout_reward": [None if r.idle else row.reward() for r, row in zip(rollouts, rows, strict=True)],
        "rollout_id": [row.sample.rollout_id for row in rows],
        "group_id": [row.sample.group_id for row in rows],
        "weight_versions": [versions(row) for row in rows],
    }


def recorded_reward(rollout_reward: Sequence[float | None], **columns: object) -> list[float | None]:
    """A TRL reward function: the rewards that came with the rollouts. None: TRL does not score the row."""
    return list(rollout_reward)


def _check_group(group: Sequence[RolloutRows], num_generations: int | None) -> None:
    first = group[0].rows[0].sample
    for rollout in group:
        if len(rollout.rows) > 1:
            raise BatchError(
                f"rollout {rollout.rows[0].sample.rollout_id} has {len(rollout.rows)} parts: TRL takes one "
                "row per rollout, and no omission can change that"
            )
    if num_generations is not None and len(group) != num_generations:
        raise BatchError(
            f"group {first.group_id} (task {first.task_id}) has {len(group)} rollouts, num_generations is "
            f"{num_generations}: TRL would compare rollouts of different prompts"
        )
