"""`StepContext`: the samples of a step that are here, and what they are weighted and compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import RemoteRollout
from trainer_bridge.lease import BatchLease, WholeStep
from trainer_bridge.weights import TrainedCounts, WeightRule


class StepContext(NamedTuple):
    """Of a step, or of a rank's share of it."""

    samples: Sequence[Sample]
    totals: TrainedCounts | None
    """Over all ranks. None: there are no others."""
    elsewhere: Mapping[str, Sequence[RemoteRollout]]
    """Group id -> rollouts of it that other ranks hold."""
    lengths: Sequence[Sequence[int]]
    """Tokens of every sample of every rank, as they are batched. Empty: there are no ranks."""


def context_of(
    step: BatchLease | Sequence[Sample],
    totals: TrainedCounts | None,
    *,
    weights: WeightRule,
    max_length: int | None,
    truncate: bool,
) -> StepContext:
    """What a collator needs to know of a step.

    Args:
        step: a lease, or all samples of a step.
        totals: as the caller counted over all ranks. None: as the lease says.
        weights: what counts the same.
        max_length: tokens. None: no limit.
        truncate: longer samples are cut.

    Raises:
        BatchError: on every rank, so that none waits for another: a sample that one of them holds is too
            long, or its cut would change the weights of all.
    """
    if not isinstance(step, BatchLease):
        return StepContext(step, totals, {}, ())
    samples = [sample for rollout in step.rollouts for sample in rollout.samples]
    whole = step.whole
    if whole is None:
        return StepContext(samples, totals, {}, ())
    elsewhere = {group.group_id: group.elsewhere for group in step.groups if group.is_split}
    lengths: Sequence[Sequence[int]] = whole.lengths
    if max_length is not None and whole.longest > max_length:
        if not truncate or totals is None or (weights == "group" and elsewhere):
            raise BatchError(_too_long(whole, max_length, truncate=truncate, counts=weights != "group"))
        lengths = [[min(length, max_length) for length in each] for each in lengths]
    return StepContext(samples, totals or whole.totals, elsewhere, lengths)


def _too_long(whole: WholeStep, max_length: int, *, truncate: bool, counts: bool) -> str:
    rank = next(n for n, lengths in enumerate(whole.lengths) if max(lengths, default=0) > max_length)
    said = f"rank {rank} of {whole.world} has a sample of more than max_length={max_length} tokens (the "
    said += f"longest of the step has {whole.longest}): limit the context where the rollouts are sampled, "
    if not truncate:
        return said + "raise max_length, or cut them with truncate=True"
    said += "or raise max_length. All ranks' weights depend on what a cut leaves"
    if not counts:
        return said + ", and with weight rule 'group' and groups that are split over ranks no count tells it"
    return (
        f"{said}: to cut, count on every rank c = count_trained([truncate(s, {max_length}) for r in "
        "step.rollouts for s in r.samples]) (from trainer_bridge.weights and trainer_bridge.truncation), add "
        "its four numbers up over the ranks (all_reduce), and give them as totals=TrainedCounts(...)"
    )
