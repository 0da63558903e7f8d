"""Branches to `Sample`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from token_tracking.errors import ConversationError
from token_tracking.history.branch import Branch
from token_tracking.history.findings import RoutedExperts, media_turn, records_experts
from token_tracking.history.turn import HeldTurn
from token_tracking.sample import Sample, Scalar, Turn


def samples(
    branches: Sequence[Branch],
    common: dict[str, Any],
    provenance: dict[str, Scalar],
    turn_rewards: Sequence[float | None] | None,
    media_in_loss: bool,
) -> tuple[Sample, ...]:
    """One sample per branch with turns of its own; see `Conversation.samples`.

    Raises:
        ConversationError: `turn_rewards` are not one per turn.
    """
    trained = [branch for branch in branches if len(branch.turns) > branch.inherited]
    turns = sum(len(branch.turns) - branch.inherited for branch in trained)
    if turn_rewards is not None and len(turn_rewards) != turns:
        raise ConversationError(f"{len(turn_rewards)} turn rewards for {turns} turns")
    wanted = records_experts(branches)
    made: list[Sample] = []
    for part, branch in enumerate(trained):
        notes: dict[str, Scalar] = {}
        experts = RoutedExperts(branch, wanted, join=True)
        if experts.why is not None:
            notes["routed_experts_missing"] = experts.why
        shared = dict(common)
        media = media_turn(branch)
        if media is not None:
            notes["media_placeholder"] = f"turn {media[0]} sampled id {media[1]}"
            shared["in_loss"] = common["in_loss"] and media_in_loss
        shared["routed_experts"] = experts.rows
        made.append(_sample(branch, part, len(trained), shared, {**notes, **provenance}, turn_rewards))
    return tuple(made)


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
    kept = ledger.kept_sets(end)
    turns = tuple(
        turn
        for index, held in enumerate(branch.turns)
        for turn in _turns(held, turn_rewards if index >= branch.inherited else None)
    )
    return Sample(
        **common,
        part=part,
        parts=parts,
        token_ids=np.array(ledger.slice_ids(0, end)),
        loss_mask=mask,
        logprobs=np.array(ledger.logprobs[:end]),
        versions=np.array(ledger.versions[:end]),
        prompt_length=branch.turns[0].start,
        turns=turns,
        kept_ids=None if kept is None else kept.ids,
        kept_offsets=None if kept is None else kept.offsets,
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
