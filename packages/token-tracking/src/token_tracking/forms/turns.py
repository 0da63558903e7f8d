"""Samples in another form: one per turn, for step-wise trainers; and what each form costs a trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from token_tracking.forms.tree import hang
from token_tracking.sample import NOT_SAMPLED, Sample

Form = Literal["branch", "turn", "tree"]


class FormCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer reads in one form."""

    rows: int
    """Sequences: samples, or roots of prefix trees."""
    trained_tokens: int
    """Tokens with loss mask 1; the same in every form."""
    total_tokens: int
    """Tokens of a forward pass, without padding."""


def turn_samples(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """One sample per trained turn: all that came before it as the prompt, and the turn. Nothing is shared.

    The form of step-wise trainers. Tokens of earlier turns are prompt: no log-probability, version -1. A turn
    that was aborted and continued is one sample with several `turns`. Part i of n counts the turns of the
    rollout; reward, `in_loss` and `in_baseline` are those of the sample that the turn stands in. The forward
    pass grows with the square of the turns (see `form_costs`).

    Args:
        samples: as `Conversation.samples` gives them, of one rollout or of many.
    """
    spans = [(sample, start, end) for sample in samples for start, end in _trained_turns(sample)]
    parts = Counter((sample.rollout_id, sample.attempt) for sample, _, _ in spans)
    seen: Counter[tuple[str, int]] = Counter()
    made: list[Sample] = []
    for sample, start, end in spans:
        rollout = (sample.rollout_id, sample.attempt)
        made.append(_turn_sample(sample, start, end, seen[rollout], parts[rollout]))
        seen[rollout] += 1
    return tuple(made)


def form_costs(samples: Sequence[Sample]) -> dict[Form, FormCost]:
    """Trained and total tokens of samples in each form, counted without making the forms."""
    trained = sum(sample.trained_tokens for sample in samples)
    ends = [end for sample in samples for _, end in _trained_turns(sample)]
    hangs = hang(samples)
    own = sum(len(sample) - at for sample, (_, at) in zip(samples, hangs, strict=True))
    branches = sum(map(len, samples))
    rows = {"branch": len(samples), "turn": len(ends), "tree": sum(on is None for on, _ in hangs)}
    total = {"branch": branches, "turn": sum(ends), "tree": own}
    forms: tuple[Form, ...] = ("branch", "turn", "tree")
    return {
        form: FormCost(rows=rows[form], trained_tokens=trained, total_tokens=total[form]) for form in forms
    }


def _trained_turns(sample: Sample) -> Iterator[tuple[int, int]]:
    """Start and end of each turn with a token that is trained; segments of one turn are one."""
    spans: list[tuple[int, int]] = []
    for turn in sample.turns:
        if spans and spans[-1][1] == turn.start:
            spans[-1] = (spans[-1][0], turn.end)
        else:
            spans.append((turn.start, turn.end))
    return ((start, end) for start, end in spans if bool(sample.loss_mask[start:end].any()))


def _turn_sample(sample: Sample, start: int, end: int, part: int, parts: int) -> Sample:
    prompt = np.arange(end) < start
    changes: dict[str, Any] = {}
    if sample.kept_ids is not None and sample.kept_offsets is not None:
        low, high = (int(sample.kept_offsets[at]) for at in (start, end))
        changes["kept_ids"] = sample.kept_ids[low:high]
        changes["kept_offsets"] = np.maximum(sample.kept_offsets[: end + 1] - low, 0)
    if sample.routed_experts is not None:
        changes["routed_experts"] = sample.routed_experts[: end - 1]
    return msgspec.structs.replace(
        sample,
        part=part,
        parts=parts,
        token_ids=sample.token_ids[:end],
        loss_mask=np.where(prompt, np.uint8(0), sample.loss_mask[:end]),
        logprobs=np.where(prompt, np.float32(np.nan), sample.logprobs[:end]),
        versions=np.where(prompt, np.int32(NOT_SAMPLED), sample.versions[:end]),
        prompt_length=start,
        turns=tuple(turn for turn in sample.turns if start <= turn.start and turn.end <= end),
        **changes,
    )
