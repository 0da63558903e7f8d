"""`Row`: a sample as trainers read it, with one mask and log-probabilities without NaN, checked to fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import NOT_SAMPLED, Sample

from trainer_bridge.adapters.omissions import Note, Omission, Omissions
from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import Rollout, group_samples, trained_mask

Float32 = npt.NDArray[np.float32]


class Trainer(NamedTuple):
    """What a trainer's own object has a place for."""

    name: str
    holds: frozenset[Omission | Note]
    temperature: float | None = None
    """The only temperature of log-probabilities that it knows. None: any, but one for the whole batch."""


class Row(NamedTuple):
    """A sample and its token arrays of shape `[n]`; `sample.prompt_length` splits prompt and response."""

    sample: Sample
    mask: npt.NDArray[np.uint8]
    """1 where a token enters the loss: all 0 if the sample is not in the loss."""
    logprobs: Float32
    """0 where none was recorded: where `mask` is 0, or everywhere if the sample may go without."""
    advantages: Float32
    """0 where `mask` is 0, and everywhere if none were given."""

    def prompt(self, array: npt.NDArray[Any]) -> list[Any]:
        """The prompt's entries, as Python numbers."""
        return array[: self.sample.prompt_length].tolist()

    def response(self, array: npt.NDArray[Any]) -> list[Any]:
        """The entries after the prompt, as Python numbers."""
        return array[self.sample.prompt_length :].tolist()

    def reward(self) -> float:
        """The rollout's reward.

        Raises:
            BatchError: it is not graded; a failure is never a reward of 0.
        """
        if self.sample.reward is None:
            raise BatchError(
                f"rollout {self.sample.rollout_id} is in the batch but not graded: leave it out, or set "
                "in_loss and in_baseline to False"
            )
        return self.sample.reward


class RolloutRows(NamedTuple):
    """One rollout: its parts in order, and whether it does anything at all in the step."""

    rows: tuple[Row, ...]
    idle: bool
    """Neither trained nor compared with: no part in the loss, and not graded or not in the baseline."""


def make_groups(
    samples: Sequence[Sample],
    trainer: Trainer,
    omissions: Omissions | None,
    *,
    ratio: bool = True,
    advantages: Sequence[Float32] | None = None,
) -> list[list[RolloutRows]]:
    """Rows by group and rollout, both in the order in which they first appear.

    Args:
        samples: of each rollout all parts.
        trainer: what it holds.
        omissions: what may be left out. None: nothing.
        ratio: whether log-probabilities are needed; if so, every sample in the loss must have them.
        advantages: one array per sample, of its length. Given, the group's statistics are settled, so
            parts, the baseline and turn rewards cannot be miscounted by the trainer.

    Raises:
        BatchError: a rollout is not whole, or something does not fit the trainer and may not be left out.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
    """
    omissions = Omissions() if omissions is None else omissions
    settled: set[Omission | Note] = set() if advantages is None else {"parts", "baseline", "turn_rewards"}
    trainer = trainer._replace(holds=trainer.holds | settled)
    if advantages is not None and [len(a) for a in advantages] != [len(s) for s in samples]:
        raise BatchError("advantages must have one array per sample, each as long as the sample")
    grouping = group_samples(samples)
    temperatures: set[float | None] = set() if trainer.temperature is None else {trainer.temperature}
    groups: list[list[RolloutRows]] = [[] for _ in grouping.group_ids]
    for rollout in grouping.rollouts:
        rows: list[Row] = []
        for index in rollout.samples:
            sample = samples[index]
            if ratio and sample.in_loss:
                sample.require_logprobs()
            row = _row(sample, None if advantages is None else advantages[index])
            present = _features(row, rollout)
            if ratio:
                present |= _ratio_features(row, temperatures)
            for what in sorted(present - trainer.holds):
                omissions.leave_out(what, trainer.name, sample.rollout_id)
            notes: tuple[Note, ...] = ("versions", "provenance")
            omissions.note(note for note in notes if note not in trainer.holds)
            rows.append(row)
        groups[rollout.group].append(RolloutRows(tuple(rows), _is_idle(rollout, rows)))
    return groups


def working_rows(groups: Sequence[Sequence[RolloutRows]], omissions: Omissions | None) -> list[Row]:
    """All rows in order, without idle rollouts, which are counted.

    Raises:
        BatchError: nothing is left.
    """
    rows: list[Row] = []
    for rollout in (rollout for group in groups for rollout in group):
        if not rollout.idle:
            rows.extend(rollout.rows)
        elif omissions is not None:
            omissions.note(("idle",) * len(rollout.rows))
    if not rows:
        raise BatchError(
            "no sample is in the loss or in the baseline: there is nothing to hand to the trainer"
        )
    return rows


def split_rows(rows: Sequence[Row]) -> None:
    """Raise `BatchError` unless every row can be split into a prompt and a response, neither empty."""
    for row in rows:
        if not 0 < row.sample.prompt_length < len(row.sample):
            raise BatchError(
                f"rollout {row.sample.rollout_id}, part {row.sample.part}: {row.sample.prompt_length} of "
                f"{len(row.sample)} tokens are prompt; this trainer needs a prompt and a response"
            )


def routed_experts(rows: Sequence[Row]) -> list[npt.NDArray[np.integer]] | None:
    """Routed experts of every row, or None if no row has any.

    Raises:
        BatchError: some rows have them and some do not; trainers look at the first row only
            (NVIDIA-NeMo/labs-molt#5).
    """
    held = [row.sample.routed_experts for row in rows]
    present = [experts for experts in held if experts is not None]
    if present and len(present) < len(rows):
        raise BatchError(
            f"{len(present)} of {len(rows)} samples have routed experts: give all or none of them"
        )
    return present or None


def versions(row: Row) -> list[int]:
    """Weight versions of the sampled tokens, each run of equal ones once, in order."""
    sampled = row.sample.versions[row.sample.versions != NOT_SAMPLED]
    starts = np.flatnonzero(np.diff(sampled, prepend=NOT_SAMPLED))
    return sampled[starts].tolist()


def temperature_of(row: Row) -> set[float | None]:
    """Temperatures of what the trained tokens' log-probabilities were taken from; None: unknown."""
    return {
        1.0 if turn.logprob_kind == "raw" else turn.temperature
        for turn in row.sample.turns
        if turn.logprob_kind != "none" and bool(row.mask[turn.start : turn.end].any())
    }


def _row(sample: Sample, advantages: Float32 | None) -> Row:
    mask = trained_mask(sample)
    return Row(
        sample=sample,
        mask=mask.astype(np.uint8),
        logprobs=np.nan_to_num(sample.logprobs, nan=0.0),
        advantages=np.where(mask, np.float32(0) if advantages is None else advantages, np.float32(0)),
    )


def _is_idle(rollout: Rollout, rows: Sequence[Row]) -> bool:
    counted = rollout.in_baseline and rollout.reward is not None
    return not counted and not any(row.sample.in_loss for row in rows)


def _features(row: Row, rollout: Rollout) -> set[Omission]:
    sample = row.sample
    present: dict[Omission, bool] = {
        "parts": sample.parts > 1,
        "baseline": sample.in_loss and not rollout.in_baseline,
        "turn_rewards": any(turn.reward is not None for turn in sample.turns),
        "routed_experts": sample.routed_experts is not None,
    }
    return {what for what, is_present in present.items() if is_present}


def _ratio_features(row: Row, temperatures: set[float | None]) -> set[Omission]:
    """What matters only for a ratio. `temperatures`: the trainer's, else it gets the batch's first."""
    present: set[Omission] = set()
    if any(turn.logprob_kind == "processed" and turn.truncated for turn in row.sample.turns):
        present.add("kept_sets")
    own = temperature_of(row)
    if not temperatures:
        temperatures.update(sorted(own, key=str)[:1])
    if own - temperatures:
        present.add("temperatures")
    return present
