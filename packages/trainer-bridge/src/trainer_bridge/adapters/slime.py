"""slime and miles: their `Sample` (THUDM/slime 624b824, radixark/miles 31f1ca9; `slime/utils/types.py`).

PyPI's `slime` and `miles` are other projects: both trainers are installed from their repositories.

Layout: `tokens` is the whole sequence; `loss_mask`, `rollout_log_probs` and slime's top-p ids and offsets go
over the last `response_length` tokens, not shifted, 0 where the mask is 0 and nothing was recorded.
`rollout_routed_experts` is int32 `[n - 1, layers, top_k]`. Nothing is padded. `weight_versions` has a string
per run of one version; "unknown" is not read as a number. `prompt` and `response` (text for logs) stay empty.

`group_index`, `index` and `rollout_id` are ints there: the last 52 bits of our ids, exact as a float too. The
parts of a rollout share `rollout_id`, so both trainers weight its tokens as one rollout. miles also counts it
once in the group's statistics; slime counts each part, and neither knows `in_baseline`. Start the trainer
with `--custom-reward-post-process-path trainer_bridge.adapters.slime.reward_post_process` and pass
`reward_hook=True`: then both hold. A sample outside the loss has `remove_sample=True`; a rollout outside loss
and baseline is left out. `metadata` carries ids, `in_baseline`, temperatures and version spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from token_tracking.sample import UNKNOWN_VERSION, Sample

from trainer_bridge.adapters.loading import load
from trainer_bridge.adapters.omissions import Note, Omission, Omissions
from trainer_bridge.adapters.rows import (
    Row,
    Trainer,
    make_groups,
    routed_experts,
    split_rows,
    versions,
    working_rows,
)
from trainer_bridge.errors import BatchError

_HOLDS: dict[str, frozenset[Omission | Note]] = {
    "slime": frozenset({"routed_experts", "versions", "kept_sets"}),
    "miles": frozenset({"routed_experts", "versions", "parts"}),
}


def training_samples(
    samples: Sequence[Sample],
    *,
    trainer: Literal["slime", "miles"] = "slime",
    reward_hook: bool = False,
    ratio: bool = True,
    omissions: Omissions | None = None,
) -> list[list[list[Any]]]:
    """The trainer's samples by group, rollout and part: the `samples` that a rollout function returns.

    Args:
        samples: of each rollout all parts, of each group all rollouts.
        trainer: whose class.
        reward_hook: whether the trainer runs with `reward_post_process`.
        ratio: False leaves `rollout_log_probs` out.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: a rollout is not graded, or something does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
        TrainerMissingError: the trainer or torch is not installed.
    """
    hook: set[Omission | Note] = {"parts", "baseline"} if reward_hook else set()
    groups = make_groups(samples, Trainer(trainer, _HOLDS[trainer] | hook), omissions, ratio=ratio)
    rows = working_rows(groups, omissions)
    split_rows(rows)
    routed_experts(rows)
    for ids in ({row.sample.rollout_id for row in rows}, {row.sample.group_id for row in rows}):
        if len({number(hex_id) for hex_id in ids}) < len(ids):
            raise BatchError("two ids of this batch have the same last 13 characters: mint ids at random")
    made = load(
        f"{trainer}.utils.types", f"{trainer} from its repository (PyPI has another project of that name)"
    )
    out = [
        [
            [_sample(made.Sample, row, trainer, ratio) for row in rollout.rows]
            for rollout in group
            if not rollout.idle
        ]
        for group in groups
    ]
    return [group for group in out if group]


def number(hex_id: str) -> int:
    """The int below 2**52 that stands for a group or rollout in the trainer."""
    return int(hex_id[-13:], 16)


class _Scored(Protocol):
    group_index: int | None
    rollout_id: int | None
    metadata: dict[str, Any]

    def get_reward_value(self, args: Any) -> float: ...


def reward_post_process(args: Any, samples: Sequence[_Scored]) -> tuple[list[float], list[float]]:
    """Both trainers' reward hook: raw rewards, and rewards compared within the group.

    Mean and deviation go over the rollouts of a group that are in the baseline, each once whatever its number
    of parts; a group with fewer than two of them, or with equal rewards, gives 0. The trainer's own settings
    `advantage_estimator`, `rewards_normalization` and `grpo_std_normalization` apply.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    compared = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if args.advantage_estimator not in compared or not args.rewards_normalization:
        return raw, raw
    divide = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    groups: dict[int | None, dict[int | None, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        members = groups.setdefault(sample.group_index, {})
        if sample.metadata["in_baseline"]:
            members[sample.rollout_id] = reward
    rewards: list[float] = []
    for sample, reward in zip(samples, raw, strict=True):
        values = np.array(list(groups[sample.group_index].values()))
        if len(values) < 2 or values.min() == values.max():
            rewards.append(0.0)
        else:
            scale = float(values.std(ddof=1)) + 1e-6 if divide else 1.0
            rewards.append((reward - float(values.mean())) / scale)
    return raw, rewards


def _sample(made: Any, row: Row, trainer: str, ratio: bool) -> Any:
    sample = row.sample
    fields: dict[str, Any] = {
        "group_index": number(sample.group_id),
        "index": number(sample.rollout_id),
        "rollout_id": number(sample.rollout_id),
        "tokens": sample.token_ids.tolist(),
        "response_length": len(sample) - sample.prompt_length,
        "reward": row.reward(),
        "loss_mask": row.response(row.mask),
        "rollout_log_probs": row.response(row.logprobs) if ratio else None,
        "weight_versions": ["unknown" if v == UNKNOWN_VERSION else str(v) for v in versions(row)],
        "remove_sample": not sample.in_loss,
        "status": made.Status(sample.status),
        "metadata": _metadata(sample),
    }
    if sample.routed_experts is not None:
        fields["rollout_routed_experts"] = sample.routed_experts.astype(np.int32)
    if trainer == "slime" and sample.kept_ids is not None and sample.kept_offsets is not None:
        first = sample.kept_offsets[sample.prompt_length]
        fields["rollout_top_p_token_ids"] = sample.kept_ids[first:].tolist()
        fields["rollout_top_p_token_offsets"] = (sample.kept_offsets[sample.prompt_length :] - first).tolist()
    return made(**fields)


def _metadata(sample: Sample) -> dict[str, Any]:
    edges = np.flatnonzero(np.diff(sample.versions)) + 1
    starts = [0, *edges.tolist()]
    return {
        "group_id": sample.group_id,
        "rollout_id": sample.rollout_id,
        "attempt": sample.attempt,
        "part": sample.part,
        "parts": sample.parts,
        "task_id": sample.task_id,
        "in_baseline": sample.in_baseline,
        "policy_run": sample.policy_run,
        "temperatures": [turn.temperature for turn in sample.turns],
        "version_spans": [
            (start, end, int(sample.versions[start]))
            for start, end in zip(starts, [*edges.tolist(), len(sample)], strict=True)
        ],
    }
