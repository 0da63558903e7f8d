"""Names and types in NovaSky-AI/SkyRL, skyrl/train/generators/base.py, commit
a9564572eb8e91076be43c1bd5e4615e3de17265."""

from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


class GeneratorOutput(TypedDict):
    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: list[TrajectoryID] | None
    trajectory_generation_times: list[float] | None
    trajectory_time_splits: dict[str, list[float]] | None
    rollout_expert_indices: list[Any] | None
    is_last_step: list[bool] | None
    env_metrics: list[dict[str, Any]] | None
    pixel_values: list[Any] | None
    image_grid_thw: list[Any] | None
