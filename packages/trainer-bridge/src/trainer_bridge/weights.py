"""`loss_weights`: how much each trained token counts, so that a step's loss is one sum over its tokens.

`loss = (weights * token_loss).sum()` over all micro-batches of the step, with no further mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import Grouping, RemoteRollout, group_samples, trained_count, trained_mask
from trainer_bridge.options import check_options

WeightRule = Literal["token", "sample", "rollout", "group", "constant"]
"""What counts the same.

- `token`: every trained token of the step (DAPO, arXiv:2503.14476); long rollouts count more.
- `sample`: every sample, so a rollout that was cut into three counts three times.
- `rollout`: every rollout, whatever its length and number of parts (miles#2378).
- `group`: every group (prompt), and within it every trained token (ScaleRL, arXiv:2510.13786).
- `constant`: every trained token, over a fixed length (Dr. GRPO, arXiv:2503.20783): one rollout's tokens add
  up to its length by `length_norm`, so the weights of a step do not add up to 1.
"""


class TrainedCounts(NamedTuple):
    """What a step trains on: the number of things with at least one trained token."""

    tokens: int
    samples: int
    rollouts: int
    groups: int


def count_trained(samples: Sequence[Sample]) -> TrainedCounts:
    """Count what these samples train on.

    With data-parallel ranks, sum the counts of all ranks and pass them to `loss_weights` as `totals`.

    Raises:
        BatchError: a rollout is not whole; see `group_samples`.
    """
    return _Trained(samples, group_samples(samples)).counts


def count_groups(groups: Iterable[Iterable[Sequence[Sample]]]) -> TrainedCounts:
    """As `count_trained`, of samples that are sorted already: each group's rollouts, each rollout's parts."""
    tokens = samples = rollouts = trained_groups = 0
    for group in groups:
        in_group = 0
        for parts in group:
            counts = [trained_count(part) for part in parts]
            samples += sum(count > 0 for count in counts)
            rollouts += any(counts)
            in_group += sum(counts)
        tokens += in_group
        trained_groups += in_group > 0
    return TrainedCounts(tokens, samples, rollouts, trained_groups)


def loss_weights(
    samples: Sequence[Sample],
    rule: WeightRule = "rollout",
    *,
    totals: TrainedCounts | None = None,
    length_norm: int | None = None,
    elsewhere: Mapping[str, Sequence[RemoteRollout]] | None = None,
) -> tuple[npt.NDArray[np.float32], ...]:
    """Weight of every token of every sample.

    Samples out of the loss weigh 0 and do not change the weights of others. Under every rule but `constant`
    the weights of a step add up to 1, or to 0 if nothing trains.

    Args:
        samples: all samples of a step (or, with `totals`, a rank's share of them).
        rule: what counts the same.
        totals: counts over all ranks, if the step is spread over several. A rollout must lie on one rank. The
            weights of all ranks then add up to 1: add the ranks' gradients up, or, where the trainer averages
            them (DDP, FSDP), multiply the loss by the number of ranks.
        length_norm: tokens; needed by `constant` alone, commonly the longest completion allowed.
        elsewhere: group id -> the rollouts that other ranks hold of it, for rule `group`. None: every group
            lies on one rank.

    Returns:
        float32 arrays, one per sample, each of the sample's length; 0 where a token is not trained.

    Raises:
        BatchError: an unknown rule, `length_norm` given or missing against the rule, or a rollout that is
            not whole.
    """
    check_weight_rule(rule, length_norm)
    grouping = group_samples(samples)
    trained = _Trained(samples, grouping)
    held = totals or trained.counts
    for number, group_id in enumerate(grouping.group_ids):
        trained.by_group[number] += sum(each.trained_tokens for each in (elsewhere or {}).get(group_id, ()))
    # A denominator per sample: what its share (1 / number of things) is spread over.
    if rule == "token":
        spread = np.full(len(samples), held.tokens)
    elif rule == "sample":
        spread = held.samples * trained.by_sample
    elif rule == "rollout":
        spread = held.rollouts * trained.by_rollout[grouping.rollout_of]
    elif rule == "group":
        spread = held.groups * trained.by_group[grouping.group_of]
    else:
        spread = np.full(len(samples), held.rollouts * (length_norm or 1))
    return tuple(
        mask * np.float32(1 / max(int(each), 1)) for mask, each in zip(trained.masks, spread, strict=True)
    )


def check_weight_rule(rule: WeightRule, length_norm: int | None) -> None:
    """Refuse a rule that is none, and a length with the wrong one.

    Raises:
        BatchError: see `loss_weights`.
    """
    check_options(check_weight_rule, {"rule": rule, "length_norm": length_norm}, BatchError)
    if (length_norm is not None) != (rule == "constant") or (length_norm is not None and length_norm < 1):
        raise BatchError(
            f"weight rule {rule!r} with length_norm={length_norm}: 'constant' needs a length of 1 or more, "
            "the other rules take none"
        )


class _Trained:
    """Trained tokens, counted by sample, rollout and group."""

    def __init__(self, samples: Sequence[Sample], grouping: Grouping) -> None:
        self.masks = tuple(trained_mask(sample) for sample in samples)
        self.by_sample = np.array([np.count_nonzero(mask) for mask in self.masks], np.int64)
        self.by_rollout = np.zeros(len(grouping.rollouts), np.int64)
        self.by_group = np.zeros(len(grouping.group_ids), np.int64)
        np.add.at(self.by_rollout, grouping.rollout_of, self.by_sample)
        np.add.at(self.by_group, grouping.group_of, self.by_sample)
        self.counts = TrainedCounts(
            tokens=int(self.by_sample.sum()),
            samples=int(np.count_nonzero(self.by_sample)),
            rollouts=int(np.count_nonzero(self.by_rollout)),
            groups=int(np.count_nonzero(self.by_group)),
        )
