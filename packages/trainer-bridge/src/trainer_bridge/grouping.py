"""`Grouping`: which samples of a training step belong to one rollout, and which rollouts to one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError


class Rollout(NamedTuple):
    """A rollout of the step, whole: what its parts agree on."""

    rollout_id: str
    group: int
    """Index into `Grouping.group_ids`."""
    reward: float | None
    """None: not graded."""
    in_baseline: bool
    samples: tuple[int, ...]
    """Where its parts are among the samples, in the order of the parts."""


class RemoteRollout(NamedTuple):
    """A rollout of a group that is split over ranks, as the ranks that do not hold it know it."""

    rollout_id: str
    """32 hex characters."""
    trained_tokens: int
    """Of all of its parts; 0 if it is out of the loss."""
    reward: float | None
    """None: not graded."""
    in_baseline: bool
    turn_rewards: tuple[float | None, ...]
    """What each of its turns earned, in order, as `trainer_bridge.credit.turn_rewards` counts turns."""


class Grouping(NamedTuple):
    """Samples by rollout and group, both in the order in which they first appear."""

    rollouts: tuple[Rollout, ...]
    group_ids: tuple[str, ...]
    rollout_of: npt.NDArray[np.int32]
    """`[samples]`: index into `rollouts`."""
    group_of: npt.NDArray[np.int32]
    """`[samples]`: index into `group_ids`."""


def group_samples(samples: Sequence[Sample]) -> Grouping:
    """Sort samples by rollout and group.

    A rollout counts once, however many samples it was cut into (miles#2378), so it must be whole.

    Raises:
        BatchError: a part is missing or comes twice, two attempts of one rollout meet, or the parts of a
            rollout disagree on its group, its reward or `in_baseline`.
    """
    members: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.rollout_id, []).append(index)
    groups: dict[str, int] = {}
    rollouts: list[Rollout] = []
    rollout_of = np.zeros(len(samples), np.int32)
    group_of = np.zeros(len(samples), np.int32)
    for number, (rollout_id, indexes) in enumerate(members.items()):
        parts = sorted(indexes, key=lambda index: samples[index].part)
        _check_whole(rollout_id, [samples[index] for index in parts])
        first = samples[parts[0]]
        group = groups.setdefault(first.group_id, len(groups))
        rollouts.append(Rollout(rollout_id, group, first.reward, first.in_baseline, tuple(parts)))
        rollout_of[parts] = number
        group_of[parts] = group
    return Grouping(tuple(rollouts), tuple(groups), rollout_of, group_of)


def trained_mask(sample: Sample) -> npt.NDArray[np.bool_]:
    """Which tokens of a sample enter the loss, bool `[n]`: loss mask 1, sample in the loss, not the first.

    Nothing precedes a sequence's first token, so no model gives it a log-probability.
    """
    mask = sample.loss_mask.astype(bool) & sample.in_loss
    mask[:1] = False
    return mask


def trained_count(sample: Sample) -> int:
    """How many tokens `trained_mask` holds."""
    return int(np.count_nonzero(sample.loss_mask[1:])) if sample.in_loss else 0


def _check_whole(rollout_id: str, parts: list[Sample]) -> None:
    first = parts[0]
    for name, values in (
        ("attempt", {part.attempt for part in parts}),
        ("parts", {part.parts for part in parts}),
        ("group_id", {part.group_id for part in parts}),
        ("reward", {part.reward for part in parts}),
        ("in_baseline", {part.in_baseline for part in parts}),
    ):
        if len(values) > 1:
            raise BatchError(
                f"the samples of rollout {rollout_id} disagree on {name}: {sorted(map(str, values))}; give "
                "one attempt of a rollout, with what holds for the rollout the same in all of its parts"
            )
    held = [part.part for part in parts]
    if held != list(range(first.parts)):
        raise BatchError(
            f"rollout {rollout_id} has {first.parts} parts, but parts {held} were given: a rollout is "
            "weighted and graded as a whole, so give each of its parts once"
        )
