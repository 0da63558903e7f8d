"""Branches to `Sample`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from token_tracking.branch import Branch, HeldTurn
from token_tracking.sample import Sample, Scalar, Turn


def samples(
    branches: Sequence[Branch],
    common: dict[str, Any],
    provenance: dict[str, Scalar],
    turn_rewards: Sequence[float | None] | None,
) -> tuple[Sample, ...]:
    """One sample per branch with turns of its own; see `Conversation.samples`."""
    trained = [branch for branch in branches if len(branch.turns) > branch.inherited]
    return tuple(
        _sample(branch, part, len(trained), common, provenance, turn_rewards)
        for part, branch in enumerate(trained)
    )


def _sample(
    branch: Branch,
    part: int,
    parts: int,
    common: dict[str, Any],
    provenance: dict[str, Scalar],
    turn_rewards: Sequence[float | None] | None,
) -> Sample:
    end = branch.turns[-1].end
    ledger = branch.ledger
    mask = np.array(ledger.mask[:end])
    if branch.inherited:
        mask[: branch.turns[branch.inherited - 1].end] = 0
    turns = tuple(
        turn
        for index, held in enumerate(branch.turns)
        for turn in _turns(held, turn_rewards if index >= branch.inherited else None)
    )
    return Sample(
        **common,
        part=part,
        parts=parts,
        token_ids=np.array(ledger.ids[:end]),
        loss_mask=mask,
        logprobs=np.array(ledger.logprobs[:end]),
        versions=np.array(ledger.versions[:end]),
        prompt_length=branch.turns[0].start,
        turns=turns,
        provenance={
            "template": branch.template.fingerprint,
            "tokenizer": branch.template.tokenizer.fingerprint,
            "branch": branch.why,
            **provenance,
        },
    )


def _turns(held: HeldTurn, turn_rewards: Sequence[float | None] | None) -> list[Turn]:
    reward = None if turn_rewards is None else turn_rewards[held.number]
    return [
        Turn(
            start=segment.start,
            end=segment.end,
            finish_reason=segment.finish_reason,
            logprob_kind=segment.logprob_kind,
            temperature=segment.temperature,
            top_p=segment.top_p,
            top_k=segment.top_k,
            min_p=segment.min_p,
            reward=reward if segment is held.last else None,
        )
        for segment in held.segments
    ]
