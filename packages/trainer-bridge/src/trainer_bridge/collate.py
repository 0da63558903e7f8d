"""`Collator`: the samples of a training step to padded or packed batches, weights and advantages included."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample

from trainer_bridge import channels
from trainer_bridge.advantages import AdvantageRule, advantages
from trainer_bridge.batch import Batch
from trainer_bridge.credit import Credit, choose_credit, token_rewards
from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import Grouping, group_samples, trained_mask
from trainer_bridge.placement import Placement, Side, place_packed, place_padded
from trainer_bridge.truncation import truncate
from trainer_bridge.weights import TrainedCounts, WeightRule, loss_weights

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

    Give it all samples of a step at once: advantages compare the rollouts of a group, and weights add up to
    1 over all batches it returns, so that a step is
    `for batch in batches: (batch.weights * loss).sum().backward()`, then one optimizer step, whatever the
    number and size of the batches.

    Args:
        weights: what counts the same; see `WeightRule`.
        advantages: how rollouts are compared; see `AdvantageRule`. None: not at all (supervised training).
        credit: which rewards count; see `Credit`. None: the rollout's, and turn rewards are refused.
        discount: per turn, 0 to 1; for turn credit alone.
        length_norm: tokens; for weight rule `constant` alone.
        ratio: the trainer needs the engine's log-probabilities (PPO, GRPO, importance weights): samples
            without them are refused, replayed ones too. False: they are let in, for supervised training.
        recompute: the trainer computes the old log-probabilities itself, with the weights that sampled:
            `temperature` and `kept` are then those that tokens were chosen with, for `raw` turns too.
        pad_id: token id of padding.
        side: where padding goes.
        multiple_of: padded rows get a length that this divides.
        max_length: tokens; longer samples are refused, or cut with `truncate`. None: no limit.
        truncate: cut longer samples to their first `max_length` tokens, all channels together.
        missing_experts: a step in which some samples carry routed experts and others do not (labs-molt#5):
            `fill` gives those -1, `drop` drops the channel for the step, `refuse` raises.
        sampling: add the engine's sampling parameters per token.

    Raises:
        BatchError: a number is out of range.
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
        self, samples: Sequence[Sample], *, max_rows: int | None = None, totals: TrainedCounts | None = None
    ) -> tuple[Batch[Array], ...]:
        """A step as padded batches: a sample per row, in the order given.

        Args:
            samples: all samples of the step; of each rollout all parts, of each group all rollouts.
            max_rows: samples per batch. None: all in one.
            totals: with data-parallel ranks, `count_trained` summed over them; see `loss_weights`.

        Raises:
            BatchError: the samples do not go together, or a sample is too long.
            MissingLogprobsError: `ratio`, and a trained token's log-probability is missing or unusable.
        """
        step = self._prepare(samples, totals)
        places = place_padded(
            [len(sample) for sample in step.samples],
            side=self._side,
            multiple_of=self._multiple_of,
            max_rows=max_rows,
        )
        return tuple(self._batch(step, place) for place in places)

    def pack(
        self, samples: Sequence[Sample], *, row_tokens: int | None = None, totals: TrainedCounts | None = None
    ) -> tuple[Batch[Array], ...]:
        """A step as packed batches: one row each, samples end to end, first fit by falling length.

        Args:
            samples: as for `pad`.
            row_tokens: most tokens in a row. None: everything in one row.
            totals: as for `pad`.

        Raises:
            BatchError: as for `pad`, or a sample does not fit in a row.
            MissingLogprobsError: as for `pad`.
        """
        step = self._prepare(samples, totals)
        places = place_packed([len(sample) for sample in step.samples], row_tokens=row_tokens)
        return tuple(self._batch(step, place) for place in places)

    def counters(self) -> dict[str, int]:
        """What was cut, filled or left without effect so far, by name.

        `samples_out_of_loss`, `samples_truncated`, `samples_without_experts`, `first_tokens_not_trained`,
        `groups_without_signal` (all advantages 0).
        """
        return dict(self._counts)

    # -- inside

    def _prepare(self, samples: Sequence[Sample], totals: TrainedCounts | None) -> _Step:
        if not samples:
            raise BatchError("there are no samples to make a batch of")
        held = tuple(self._fitted(sample) for sample in samples)
        if self._ratio:
            for sample in held:
                channels.check_ratio(sample)
        grouping = group_samples(held)
        weights = loss_weights(held, self._weights, totals=totals, length_norm=self._length_norm)
        # Supervised training asks for no advantages, and so need not say what turn rewards are for.
        credit = self._credit or ("rollout" if self._advantages is None else choose_credit(held, None))
        scored = None
        if self._advantages is not None:
            scored = advantages(held, self._advantages, credit=credit, discount=self._discount)
            self._count("groups_without_signal", sum(not group.has_signal for group in scored.groups))
        self._count("samples_out_of_loss", sum(not sample.in_loss for sample in held))
        for sample in held:
            if sample.in_loss and sample.loss_mask[:1].any():
                self._fall_back("first_tokens_not_trained", "a sequence's first token cannot be trained")
        return _Step(
            held,
            grouping,
            weights,
            None if scored is None else scored.tokens,
            token_rewards(held, grouping.rollouts, credit),
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
