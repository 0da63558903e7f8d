"""What a router checks of a replica's answer, before it goes on from it."""

from __future__ import annotations

from collections.abc import Sequence

from token_tracking import GenerationRecord
from token_tracking.sample import UNKNOWN_VERSION

from agent_flow.engines.replica import ReplicaRequest
from agent_flow.errors import EngineError


def check_answer(address: str, sent: ReplicaRequest, records: Sequence[GenerationRecord]) -> None:
    """Records of one call go on where the one before them ended, within the call's budget.

    Raises:
        EngineError: they do not.
    """
    tokens = 0
    for place, record in enumerate(records, 1):
        follows = len(record.prompt_ids) == len(sent.prompt_ids) + tokens
        tokens += len(record.output_ids)
        if not follows or (place < len(records) and record.finish_reason != "abort"):
            raise EngineError(
                "answer", f"{address}: record {place} does not follow the one before it", retryable=True
            )
    if not records or tokens > sent.max_new_tokens:
        raise EngineError(
            "answer",
            f"{address} gave {len(records)} records with {tokens} tokens of {sent.max_new_tokens}",
            retryable=True,
        )


def of_reported_weights(records: Sequence[GenerationRecord], reported: int) -> Sequence[GenerationRecord]:
    """The records before the first that is of older weights than reported, or of unknown ones.

    So answers a server that was started again between two calls (`default`), or one whose stream was cut just
    when its weights changed. What follows is sampled again: any staleness rule refuses tokens of unknown
    weights, and with them the whole rollout.

    Args:
        records: of one call.
        reported: the version when it was called; -2: no version was known, and nothing is compared.
    """
    if reported == UNKNOWN_VERSION:
        return records
    least = reported
    for place, record in enumerate(records):
        if len(record.output_ids):
            if record.weight_version < least:
                return records[:place]
            least = record.weight_version
    return records
