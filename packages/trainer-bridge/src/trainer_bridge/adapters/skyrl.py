"""SkyRL: `GeneratorOutput` (NovaSky-AI/SkyRL a956457, `skyrl/train/generators/base.py`), a dict of lists.

Each row is a step of a trajectory, so the trainer must run with `generator.step_wise_trajectories=true`: the
parts of a rollout are its steps. They are adjacent, share a `TrajectoryID(group id, number in the group)`,
and `is_last_step` marks the last one. SkyRL takes the advantage from the last steps alone, so each rollout
counts once, and gives it to all steps.

Layout: `response_ids`, `loss_masks`, `rollout_logprobs` and `rewards` go over the response alone, not shifted
(SkyRL pads left and aligns them right); logprobs are 0 where the mask is 0 and none was recorded; the reward
stands on the last token of the last part. `rollout_expert_indices` has n - 1 rows. A sample outside the loss
has a mask of 0; a rollout outside loss and baseline is left out. There is no place for `in_baseline`, turn
rewards, kept sets and versions. `stop_reasons` are those of the last turn: stop, length or abort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from token_tracking.sample import Sample

from trainer_bridge.adapters.loading import load
from trainer_bridge.adapters.omissions import Omissions
from trainer_bridge.adapters.rows import Row, Trainer, make_groups, routed_experts, split_rows, working_rows

_SKYRL = Trainer("SkyRL", frozenset({"parts", "routed_experts"}))


def generator_output(
    samples: Sequence[Sample], *, ratio: bool = True, omissions: Omissions | None = None
) -> dict[str, Any]:
    """What a SkyRL generator returns from `generate`, one row per part.

    Args:
        samples: of each rollout all parts, of each group all rollouts.
        ratio: False gives `rollout_logprobs=None`.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: a rollout is not graded, or something does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
        TrainerMissingError: SkyRL is not installed.
    """
    groups = make_groups(samples, _SKYRL, omissions, ratio=ratio)
    rows = working_rows(groups, omissions)
    split_rows(rows)
    trajectory = load("skyrl.train.generators.base", "SkyRL from its repository").TrajectoryID
    identities = [
        trajectory(instance_id=row.sample.group_id, repetition_id=repetition)
        for group in groups
        for repetition, rollout in enumerate(r for r in group if not r.idle)
        for row in rollout.rows
    ]
    experts = routed_experts(rows)
    return {
        "prompt_token_ids": [row.prompt(row.sample.token_ids) for row in rows],
        "response_ids": [row.response(row.sample.token_ids) for row in rows],
        "rewards": [_rewards(row) for row in rows],
        "loss_masks": [row.response(row.mask) for row in rows],
        "stop_reasons": [row.sample.turns[-1].finish_reason for row in rows],
        "rollout_metrics": {},
        "rollout_logprobs": [row.response(row.logprobs) for row in rows] if ratio else None,
        "trajectory_ids": identities,
        "trajectory_generation_times": None,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None if experts is None else [np.array(e) for e in experts],
        "is_last_step": [row.sample.part == row.sample.parts - 1 for row in rows],
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


def _rewards(row: Row) -> list[float]:
    rewards = [0.0] * (len(row.sample) - row.sample.prompt_length)
    if row.sample.part == row.sample.parts - 1:
        rewards[-1] = row.reward()
    return rewards
