"""`advantages`: how much better each rollout did than the others of its group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample

from trainer_bridge.credit import (
    Credit,
    Step,
    check_discount,
    choose_credit,
    returns,
    rollout_steps,
    step_rewards,
)
from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import RemoteRollout, Rollout, group_samples, trained_mask
from trainer_bridge.options import check_options

AdvantageRule = Literal["grpo", "dr_grpo", "rloo", "reward"]
"""With r the reward, and mean and deviation over the rollouts of the group that count:

- `grpo`: (r - mean) / (deviation + epsilon), deviation over n - 1 (arXiv:2402.03300, as TRL and verl do it).
- `dr_grpo`: r - mean, not divided (arXiv:2503.20783); goes with weight rule `constant`.
- `rloo`: r - mean of the others (arXiv:2402.14740).
- `reward`: r itself, no baseline.
"""


class GroupBaseline(NamedTuple):
    """What the rollouts of one group were compared with."""

    group_id: str
    rollouts: int
    """Rollouts that count: graded, and `in_baseline`."""
    mean: float
    """NaN if no rollout counts."""
    deviation: float
    """Over n - 1. NaN if fewer than two rollouts count."""
    has_signal: bool
    """False: fewer than two rollouts count, or all of them did equally well."""


class Advantages(NamedTuple):
    """The advantages of a step."""

    tokens: tuple[npt.NDArray[np.float32], ...]
    """One per sample, each of the sample's length: the advantage on trained tokens, 0 elsewhere."""
    groups: tuple[GroupBaseline, ...]
    """In the order in which the groups first appear."""


class _Scored(NamedTuple):
    rollout: Rollout
    steps: tuple[Step, ...]
    returns: npt.NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.returns.mean())


def advantages(
    samples: Sequence[Sample],
    rule: AdvantageRule = "grpo",
    *,
    credit: Credit | None = None,
    discount: float = 1.0,
    epsilon: float = 1e-6,
    elsewhere: Mapping[str, Sequence[RemoteRollout]] | None = None,
) -> Advantages:
    """Advantage of every trained token of a step.

    Mean and deviation go over rollouts, each once whatever its number of parts (miles#2378), and only over
    those that are graded and `in_baseline`: an infrastructure failure shifts nothing. A rollout outside the
    baseline that is in the loss is compared with the baseline of the others. All trained tokens of all parts
    get their rollout's advantage.

    Under turn credit a rollout's turns get an advantage each, from what was earned from that turn on. The
    baseline is the mean over rollouts of the mean over their turns, so a rollout with many turns does not
    count more, and without turn rewards the result is that of credit `rollout`.

    If fewer than two rollouts of a group count, there is nothing to compare with, and all of its advantages
    are 0; likewise for `grpo` if the rollouts that count did all equally well. `has_signal` says so.

    Args:
        samples: all samples of the step; of each rollout all parts, of each group all rollouts (but for
            those in `elsewhere`).
        rule: how a rollout is compared.
        credit: which rewards count. None: the rollout's, and turn rewards are refused.
        discount: per turn, 0 to 1; for turn credit alone.
        epsilon: added to the deviation of `grpo`.
        elsewhere: group id -> the rollouts that other data-parallel ranks hold of it. The result is that of
            the whole group, to the bit. None: every group is whole.

    Raises:
        BatchError: a rollout in the loss is not graded, a rollout is not whole, or there are turn rewards
            and `credit` is None.
    """
    given = {"rule": rule, "credit": credit, "discount": discount, "epsilon": epsilon}
    check_options(advantages, given, BatchError)
    check_discount(discount, credit)
    remote = elsewhere or {}
    chosen = choose_credit(samples, credit, [each for rollouts in remote.values() for each in rollouts])
    grouping = group_samples(samples)
    masks = tuple(trained_mask(sample) for sample in samples)
    scored: list[list[_Scored]] = [[] for _ in grouping.group_ids]
    for rollout in grouping.rollouts:
        steps = rollout_steps(samples, rollout, chosen)
        if steps is not None:
            scored[rollout.group].append(
                _Scored(rollout, steps, returns([step.reward for step in steps], discount))
            )
        elif any(bool(masks[index].any()) for index in rollout.samples):
            raise BatchError(
                f"rollout {rollout.rollout_id} is in the loss but not graded (credit {chosen!r}): it has no "
                "advantage; leave it out of the step, or use advantages=None for supervised training"
            )
    tokens = tuple(np.zeros(len(sample), np.float32) for sample in samples)
    groups: list[GroupBaseline] = []
    for group_id, members in zip(grouping.group_ids, scored, strict=True):
        counted = [member.returns for member in members if member.rollout.in_baseline]
        counted += _remote_returns(remote.get(group_id, ()), chosen, discount)
        baseline = _baseline(group_id, counted)
        groups.append(baseline)
        for member in members:
            values = _compare(member, baseline, rule, epsilon)
            for step, value in zip(member.steps, values, strict=True):
                for index, start, end in step.spans:
                    tokens[index][start:end] = masks[index][start:end] * np.float32(value)
    return Advantages(tokens, tuple(groups))


def _remote_returns(
    rollouts: Sequence[RemoteRollout], credit: Credit, discount: float
) -> list[npt.NDArray[np.float64]]:
    rewards = [step_rewards(r.turn_rewards, r.reward, credit) for r in rollouts if r.in_baseline]
    return [returns(each, discount) for each in rewards if each is not None]


def _baseline(group_id: str, counted: Sequence[npt.NDArray[np.float64]]) -> GroupBaseline:
    count = len(counted)
    if not count:
        return GroupBaseline(group_id, 0, float("nan"), float("nan"), has_signal=False)
    # `fsum` is exact, so that ranks which know the rollouts in another order find the very same numbers.
    mean = math.fsum(float(each.mean()) for each in counted) / count
    if count == 1:
        return GroupBaseline(group_id, 1, mean, float("nan"), has_signal=False)
    everything = np.concatenate(counted)
    # Not by comparing the deviation with 0: equal rewards leave rounding dust, which division would blow up.
    if everything.min() == everything.max():
        return GroupBaseline(group_id, count, float(everything[0]), 0.0, has_signal=False)
    square = math.fsum(float(((each - mean) ** 2).mean()) for each in counted)
    return GroupBaseline(group_id, count, mean, (square / (count - 1)) ** 0.5, has_signal=True)


def _compare(
    member: _Scored, baseline: GroupBaseline, rule: AdvantageRule, epsilon: float
) -> npt.NDArray[np.float64]:
    if rule == "reward":
        return member.returns
    if baseline.rollouts < 2 or (rule == "grpo" and not baseline.has_signal):
        return np.zeros_like(member.returns)
    if rule == "grpo":
        return (member.returns - baseline.mean) / (baseline.deviation + epsilon)
    if rule == "rloo" and member.rollout.in_baseline:
        others = (baseline.mean * baseline.rollouts - member.mean) / (baseline.rollouts - 1)
        return member.returns - others
    return member.returns - baseline.mean
