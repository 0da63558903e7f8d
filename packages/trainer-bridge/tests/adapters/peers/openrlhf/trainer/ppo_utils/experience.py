"""Field names of `Experience` in OpenRLHF/OpenRLHF, openrlhf/trainer/ppo_utils/experience.py, commit
3c3be6234e0cb353e76bb8019947db9dfe99fca7."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Experience:
    sequences: Any = None
    attention_mask: Any = None
    action_mask: Any = None
    action_log_probs: Any = None
    base_action_log_probs: Any = None
    rollout_log_probs: Any = None
    values: Any = None
    returns: Any = None
    advantages: Any = None
    kl: Any = None
    rewards: Any = None
    scores: Any = None
    response_length: Any = None
    truncated: Any = None
    total_length: Any = None
    index: list[int] | None = None
    prompts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    images: list = field(default_factory=list)
    mm_train_inputs: list = field(default_factory=list)
    info: dict = field(default_factory=dict)
