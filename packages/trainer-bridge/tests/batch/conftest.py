from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from token_tracking.kept import KeptSets
from token_tracking.sample import Sample, Turn


def build(
    rollout: int,
    *,
    turns: tuple[int, ...] = (4,),
    rewards: tuple[float | None, ...] = (),
    group: int = 0,
    prompt: int = 3,
    gap: int = 2,
    kept: list[list[int]] | None = None,
    mask: list[int] | None = None,
    experts: np.ndarray[Any, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **changes: Any,
) -> Sample:
    """A sample with sampled turns of the given lengths, `gap` tokens between them, all of them trained."""
    known = {"logprob_kind": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    sampling = {**known, **(sampling or {})}
    spans: list[tuple[int, int]] = []
    end = prompt
    for length in turns:
        start = end if not spans else end + gap
        end = start + length
        spans.append((start, end))
    rng = np.random.default_rng([rollout, changes.get("part", 0)])
    sampled = np.zeros(end, bool)
    for start, stop in spans:
        sampled[start:stop] = True
    rewards = rewards or (None,) * len(spans)
    sets = None if kept is None else KeptSets.from_lists(kept)
    values: dict[str, Any] = {
        "rollout_id": f"{rollout:032x}",
        "group_id": f"{group:032x}",
        "task_id": f"task-{group}",
        "token_ids": rng.integers(1, 50, end).astype(np.int32),
        "loss_mask": np.array(mask, np.uint8) if mask is not None else sampled.astype(np.uint8),
        "logprobs": np.where(sampled, -rng.random(end), np.nan).astype(np.float32),
        "versions": np.where(sampled, 3, -1).astype(np.int32),
        "prompt_length": prompt,
        "turns": tuple(
            Turn(start=start, end=stop, finish_reason="stop", reward=reward, **sampling)
            for (start, stop), reward in zip(spans, rewards, strict=True)
        ),
        "reward": 0.0,
        "status": "completed",
        "source": "sampled",
        "policy_run": "run-1",
        "kept_ids": None if sets is None else sets.ids,
        "kept_offsets": None if sets is None else sets.offsets,
        "routed_experts": experts,
    }
    return Sample(**{**values, **changes})


@pytest.fixture(scope="session")
def sample() -> Callable[..., Sample]:
    return build


@pytest.fixture(scope="session")
def miles_2378() -> list[Sample]:
    """A rollout with reward 1 in three samples of 10, 20 and 30 trained tokens; one with 0 in one of 40."""
    return [
        *(build(1, turns=(n,), part=part, parts=3, reward=1.0) for part, n in enumerate((10, 20, 30))),
        build(2, turns=(40,), reward=0.0),
    ]
