"""`Collator`: the samples of a training step to padded or packed batches, weights and advantages included."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample

from trainer_bridge import channels
from trainer_bridge.advantages import AdvantageRule, advantages
from trainer_bridge.batch import Batch
from trainer_bridge.credit import Credit, check_discount, token_rewards
from trainer_bridge.errors import BatchError
from trainer_bridge.filler import filler
from trainer_bridge.grouping import Grouping, group_samples, trained_mask
from trainer_bridge.lease import BatchLease
from trainer_bridge.options import check_options
from trainer_bridge.placement import Placement, Side, place_packed, place_padded
from trainer_bridge.step_context import StepContext, context_of
from trainer_bridge.truncation import cut_rewards, truncate
from trainer_bridge.weights import TrainedCounts, WeightRule, check_weight_rule, loss_weights

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
MissingExperts = Literal["fill", "drop", "refuse"]


class _Step(NamedTuple):
    """A step's samples and what holds for all of them together."""

    samples: tuple[Sample, ...]
    grouping: Grouping
    weights: tuple[npt.NDArray[np.float32], ...]
    advantages: tuple[npt.NDArray[np.float32], ...] | None
    token_rewards: tuple[npt.NDArray[np.float32], ...]
    experts: tuple[tuple[int, int], type[np.signedinteger[Any]]] | None


class Collator:
    """Makes batches of whole training steps.

    Give it a whole step at once, as `next_batch` hands it out: advantages compare the rollouts of a group,
    and weights add up to 1 over all batches it returns, so that a step is
    `for batch in batches: (batch.weights * loss).sum().backward()`, then one optimizer step, whatever the
    number and size of the batches.

    On data-parallel ranks, give it the rank's lease: weights and advantages are then those of the whole step,
    also where a group is split over ranks, and the weights of all ranks together add up to 1. The step's
    gradient is the sum of the ranks' gradients; where the trainer averages them (DDP, FSDP), multiply the
    loss by `lease.world`.

    Args:
        weights: what counts the same in the loss. `token`: every trained token of the step (DAPO). `sample`:
            every sample, so a rollout that was cut into three counts three times. `rollout`: every rollout,
            whatever its length and number of parts. `group`: every group, and within it every trained token.
            `constant`: every trained token, over `length_norm` instead of the step's count (Dr. GRPO).
        advantages: how rollouts of a group are compared, r being the reward. `grpo`: (r - mean) / (deviation
            + 1e-6), the deviation over n - 1. `dr_grpo`: r - mean. `rloo`: r - mean of the others. `reward`:
            r itself. None: not at all (supervised training).
        credit: which rewards count. `rollout`: the rollout's alone. `turn`: those of the turns alone; a turn
            is credited with its own and those of the turns after it. `turn_and_rollout`: both, the rollout's
            added to its last turn. None: the rollout's, and turn rewards are refused.
        discount: per turn, 0 to 1; for turn credit alone.
        length_norm: tokens; for weight rule `constant` alone, commonly the longest completion allowed.
        ratio: the trainer needs the engine's log-probabilities (PPO, GRPO, importance weights): samples
            without them are refused, replayed ones too. False: they are let in, for supervised training.
        recompute: the trainer computes the old log-probabilities itself, with the weights that sampled:
            `temperature` and `kept` are then those that tokens were chosen with, for `raw` turns too.
        pad_id: token id of padding.
        side: where padding goes: `right` or `left`.
        multiple_of: padded rows get a length that this divides.
        max_length: tokens; longer samples are refused, or cut with `truncate`. None: no limit.
        truncate: cut longer samples to their first `max_length` tokens, after advantages were taken: what was
            earned beyond the cut counts (in `token_rewards`, on the last trained token that is left).
        missing_experts: a step in which some samples carry routed experts and others do not (labs-molt#5):
            `fill` gives those -1, `drop` drops the channel for the step, `refuse` raises.
        sampling: add the engine's sampling parameters per token.

    Raises:
        BatchError: an option is none of those above, or goes with a rule that does not use it.
    """

    def __init__(
        self,
        *,
        weights: WeightRule = "rollout",
        advantages: AdvantageRule | None = "grpo",
        credit: Credit | None = None,
        discount: float = 1.0,
        length_norm: int | None = None,
        ratio: bool = True,
        recompute: bool = False,
        pad_id: int = 0,
        side: Side = "right",
        multiple_of: int = 1,
        max_length: int | None = None,
        truncate: bool = False,
        missing_experts: MissingExperts = "fill",
        sampling: bool = False,
    ) -> None:
        check_options(Collator.__init__, {k: v for k, v in locals().items() if k != "self"}, BatchError)
        check_weight_rule(weights, length_norm)
        check_discount(discount, credit)
        if multiple_of < 1 or (max_length is not None and max_length < 1) or pad_id < 0:
            raise BatchError(
                f"multiple_of={multiple_of}, max_length={max_length}, pad_id={pad_id}: the first two must be "
                "1 or more, pad_id 0 or more"
            )
        self._weights: WeightRule = weights
        self._advantages: AdvantageRule | None = advantages
        self._credit: Credit | None = credit
        self._discount = discount
        self._length_norm = length_norm
        self._ratio = ratio
        self._recompute = recompute
        self._pad_id = pad_id
        self._side: Side = side
        self._multiple_of = multiple_of
        self._max_length = max_length
        self._truncate = truncate
        self._missing_experts: MissingExperts = missing_experts
        self._sampling = sampling
        self._counts: Counter[str] = Counter()

    def pad(
        self,
        step: BatchLease | Sequence[Sample],
        *,
        max_rows: int | None = None,
        totals: TrainedCounts | None = None,
        batches: int | None = None,
    ) -> tuple[Batch[Array], ...]:
        """A step as padded batches: a sample per row, in the order given.

        Args:
            step: a lease, or all samples of a step; of each rollout all parts, of each group all rollouts.
            max_rows: samples per batch. None: all in one.
            totals: with data-parallel ranks and plain samples, `count_trained` summed over the ranks; see
                `loss_weights`. A lease knows it; if given, this holds.
            batches: how many to return, filled up with batches of weight 0 (see `filler`). None: as many as
                it takes; of a rank's lease, as many as it takes on the rank that needs most, so that all run
                the same number of passes (also a rank whose share is empty: fewer rollouts than ranks).

        Returns:
            The batches.

        Raises:
            BatchError: the samples do not go together, one is too long, or it takes more than `batches`. On
                data-parallel ranks all raise if one sample of the step is too long, and also if one is to be
                cut and no `totals` are given.
            MissingLogprobsError: `ratio`, and a trained token's log-probability is missing or unusable.
        """
        place = partial(place_padded, side=self._side, multiple_of=self._multiple_of, max_rows=max_rows)
        return self._batches("padded", step, totals, batches, place)

    def pack(
        self,
        step: BatchLease | Sequence[Sample],
        *,
        row_tokens: int | None = None,
        totals: TrainedCounts | None = None,
        batches: int | None = None,
    ) -> tuple[Batch[Array], ...]:
        """A step as packed batches: one row each, samples end to end, first fit by falling length.

        Args:
            step: as for `pad`.
            row_tokens: most tokens in a row. None: everything in one row.
            totals: as for `pad`.
            batches: as for `pad`.

        Returns:
            As `pad`.

        Raises:
            BatchError: as for `pad`, or a sample does not fit in a row.
            MissingLogprobsError: as for `pad`.
        """
        return self._batches("packed", step, totals, batches, partial(place_packed, row_tokens=row_tokens))

    def counters(self) -> dict[str, int]:
        """What was cut, filled or left without effect so far, by name.

        `samples_out_of_loss`, `samples_truncated`, `samples_without_experts`, `first_tokens_not_trained`,
        `groups_without_signal` (all advantages 0).
        """
        return dict(self._counts)

    # -- inside

    def _batches(
        self,
        layout: Literal["padded", "packed"],
        step: BatchLease | Sequence[Sample],
        totals: TrainedCounts | None,
        number: int | None,
        place: Callable[[Sequence[int]], list[Placement]],
    ) -> tuple[Batch[Array], ...]:
        context = context_of(
            step, totals, weights=self._weights, max_length=self._max_length, truncate=self._truncate
        )
        if not context.samples and not context.lengths:
            raise BatchError("there are no samples to make a batch of")
        prepared = self._prepare(context) if context.samples else None
        places = [] if prepared is None else place([len(sample) for sample in prepared.samples])
        needed = max((len(place(lengths)) for lengths in context.lengths), default=len(places))
        if number is not None and number < needed:
            raise BatchError(f"this step takes {needed} batches, batches={number} were asked for")
        made = [] if prepared is None else [self._batch(prepared, each) for each in places]
        if len(made) < (number or needed):
            tokens = self._multiple_of if layout == "padded" else 1
            experts = None if prepared is None else prepared.experts
            scored = self._advantages is not None
            empty = filler(
                layout,
                tokens,
                pad_id=self._pad_id,
                advantages=scored,
                sampling=self._sampling,
                experts=experts,
            )
            made += [empty] * ((number or needed) - len(made))
        return tuple(made)

    def _prepare(self, context: StepContext) -> _Step:
        samples = context.samples
        held = tuple(self._fitted(sample) for sample in samples)
        if self._ratio:
            for sample in held:
                channels.check_ratio(sample)
        grouping = group_samples(held)
        weights = loss_weights(
            held,
            self._weights,
            totals=context.totals,
            length_norm=self._length_norm,
            elsewhere=context.elsewhere,
        )
        # Supervised training asks for no advantages, and so need not say what turn rewards are for.
        credit = self._credit or "rollout"
        scored = None
        if self._advantages is not None:
            # Of the whole samples: what was earned beyond a cut was earned.
            scored = advantages(
                samples,
                self._advantages,
                credit=self._credit,
                discount=self._discount,
                elsewhere=context.elsewhere,
            )
            self._count("groups_without_signal", sum(not group.has_signal for group in scored.groups))
        self._count("samples_out_of_loss", sum(not sample.in_loss for sample in held))
        for sample in held:
            if sample.in_loss and sample.loss_mask[:1].any():
                self._fall_back("first_tokens_not_trained", "a sequence's first token cannot be trained")
        return _Step(
            held,
            grouping,
            weights,
            None
            if scored is None
            else tuple(each[: len(s)] for each, s in zip(scored.tokens, held, strict=True)),
            cut_rewards(token_rewards(samples, grouping.rollouts, credit), held, grouping.rollouts),
            self._experts(held),
        )

    def _fitted(self, sample: Sample) -> Sample:
        if self._max_length is None or len(sample) <= self._max_length:
            return sample
        if not self._truncate:
            raise BatchError(
                f"rollout {sample.rollout_id}, part {sample.part} has {len(sample)} tokens, max_length is "
                f"{self._max_length}: raise it, limit the context where the rollouts are sampled, or cut "
                "them with truncate=True"
            )
        self._fall_back("samples_truncated", f"samples are cut to their first {self._max_length} tokens")
        return truncate(sample, self._max_length)

    def _experts(
        self, samples: Sequence[Sample]
    ) -> tuple[tuple[int, int], type[np.signedinteger[Any]]] | None:
        shape = channels.experts_shape(samples)
        missing = [sample for sample in samples if sample.routed_experts is None]
        if shape is None or not missing:
            return shape
        if self._missing_experts == "refuse":
            raise BatchError(
                f"{len(missing)} of {len(samples)} samples carry no routed experts, among them rollout "
                f"{missing[0].rollout_id}, part {missing[0].part}, and the others do"
            )
        dropped = self._missing_experts == "drop"
        done = "the channel is dropped for the step" if dropped else "their tokens get -1"
        self._fall_back(
            "samples_without_experts",
            f"some samples of a step carry routed experts and others do not: {done}",
            len(missing),
        )
        return None if dropped else shape

    def _batch(self, step: _Step, place: Placement) -> Batch[Array]:
        samples, spread = step.samples, place.spread
        order = {index: number for number, index in enumerate(place.chosen)}
        chosen = np.array(place.chosen, np.int32)
        scored, again = step.advantages, self._recompute
        return Batch(
            layout=place.layout,
            token_ids=spread(np.int64, self._pad_id, lambda i: samples[i].token_ids),
            attention_mask=spread(np.int64, 0, lambda i: 1) if place.layout == "padded" else None,
            position_ids=spread(np.int64, 0, lambda i: np.arange(len(samples[i]))),
            sequence_ids=spread(np.int32, -1, lambda i: order[i]),
            loss_mask=spread(np.bool_, False, lambda i: trained_mask(samples[i])),
            logprobs=spread(np.float32, 0, lambda i: channels.logprobs_of(samples[i])),
            temperature=spread(np.float32, 1, lambda i: channels.temperature_of(samples[i], recompute=again)),
            kept=channels.spread_kept(place, samples, recompute=again),
            versions=spread(np.int32, -1, lambda i: samples[i].versions),
            weights=spread(np.float32, 0, lambda i: step.weights[i]),
            advantages=None if scored is None else spread(np.float32, 0, lambda i: scored[i]),
            token_rewards=spread(np.float32, 0, lambda i: step.token_rewards[i]),
            sampling=channels.spread_sampling(place, samples) if self._sampling else None,
            routed_experts=None
            if step.experts is None
            else channels.spread_experts(place, samples, *step.experts),
            rewards=np.array([_reward(samples[i]) for i in place.chosen], np.float32),
            sample_index=chosen,
            rollout_index=step.grouping.rollout_of[chosen],
            group_index=step.grouping.group_of[chosen],
            cu_seqlens=np.cumsum([0, *place.lengths], dtype=np.int32),
            max_seqlen=max(place.lengths),
        )

    def _count(self, name: str, number: int) -> None:
        if number:
            self._counts[name] += number

    def _fall_back(self, name: str, said: str, number: int = 1) -> None:
        if not self._counts[name]:
            log.warning("%s (counted as %s; said once)", said, name)
        self._counts[name] += number


def _reward(sample: Sample) -> float:
    return float("nan") if sample.reward is None else sample.reward
