"""Made-up samples, and an exact comparison."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from token_tracking.sample import Sample, Turn

VOCABULARY = 151_000


def make_rollout(
    index: int, *, parts: int = 1, tokens: int = 64, attempt: int = 0, group: int = 0
) -> tuple[Sample, ...]:
    """All parts of one rollout, the same for the same arguments: a prompt, two sampled turns, NaN elsewhere.

    Args:
        index: becomes the rollout id.
        parts: number of samples.
        tokens: of each part; at least 8.
        attempt: restarts of the rollout.
        group: becomes the group id.
    """
    return tuple(
        _part(index, part=part, parts=parts, tokens=tokens, attempt=attempt, group=group)
        for part in range(parts)
    )


def make_sample(index: int, *, tokens: int = 64) -> Sample:
    """A rollout of one part."""
    return make_rollout(index, tokens=tokens)[0]


def differences(a: Sample, b: Sample) -> list[str]:
    """Names of the fields in which two samples differ, bit for bit; arrays also by dtype and shape."""
    return [field for field in a.__struct_fields__ if not _same(getattr(a, field), getattr(b, field))]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if type(a) is np.ndarray:
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    # Encoded, because NaN differs from itself and 1 equals True.
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def _part(index: int, *, part: int, parts: int, tokens: int, attempt: int, group: int) -> Sample:
    rng = np.random.default_rng([index, part, attempt])
    first, second = _turn_spans(tokens)
    sampled = np.zeros(tokens, dtype=bool)
    for start, end in (first, second):
        sampled[start:end] = True
    logprobs = np.full(tokens, np.nan, dtype=np.float32)
    logprobs[sampled] = -rng.random(int(sampled.sum()), dtype=np.float32)
    return Sample(
        rollout_id=f"{index:032x}",
        group_id=f"{group:032x}",
        attempt=attempt,
        part=part,
        parts=parts,
        task_id=f"task-{index}",
        token_ids=rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
        loss_mask=sampled.astype(np.uint8),
        logprobs=logprobs,
        versions=np.where(sampled, 3, -1).astype(np.int32),
        prompt_length=first[0],
        turns=tuple(
            Turn(
                start=start,
                end=end,
                finish_reason="stop",
                logprob_kind="raw",
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                min_p=0.0,
            )
            for start, end in (first, second)
        ),
        reward=float(index % 2),
        status="completed",
        source="sampled",
        policy_run="run-1",
        provenance={"engine": "made up"},
        extra={"index": index},
    )


def _turn_spans(tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    quarter = tokens // 4
    return (quarter, 2 * quarter), (3 * quarter, tokens)
