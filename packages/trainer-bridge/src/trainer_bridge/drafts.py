"""From what a caller gives to `send` to one message per rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from token_tracking.sample import Sample

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.codec import Draft, draft_all
from trainer_bridge.config import MAX_GROUP_SIZE
from trainer_bridge.errors import UnsendableError


def drafts_of(
    samples: Sample | Sequence[Sample],
    *,
    group_size: int | None,
    max_payload_bytes: int,
    pool: BlockPool,
) -> list[Draft]:
    """A draft for each rollout, in order; its arrays are copied into memory of the pool, next to each other.

    Raises:
        UnsendableError: no samples, not whole rollouts, a value that the wire cannot carry, or a group size
            that cannot be.
    """
    if group_size is not None and not 1 <= group_size <= MAX_GROUP_SIZE:
        raise UnsendableError(f"group_size is {group_size}, 1 to {MAX_GROUP_SIZE} can be")
    rollouts = _by_rollout(_samples(samples))
    return draft_all(rollouts, max_payload_bytes=max_payload_bytes, group_size=group_size or 0, pool=pool)


def size_of_group(samples: Sequence[Sample]) -> int | None:
    """How many rollouts there are. None: no samples.

    Raises:
        UnsendableError: they belong to several groups, or are something else.
    """
    samples = _samples(samples)
    groups = {sample.group_id for sample in samples}
    if len(groups) > 1:
        raise UnsendableError(
            f"send_group takes the rollouts of one group, these belong to {len(groups)}: {min(groups)} and "
            f"{max(groups)}, for example"
        )
    return len({sample.rollout_id for sample in samples}) or None


def _samples(given: object) -> list[Sample]:
    if isinstance(given, Sample):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | str | bytes):
        kind = type(cast("object", given)).__name__
        raise UnsendableError(f"got {kind}: a token_tracking.Sample, or a sequence of them, can be sent")
    samples: list[Sample] = []
    for n, each in enumerate(cast("Iterable[object]", given)):
        if not isinstance(each, Sample):
            raise UnsendableError(
                f"item {n} is of type {type(each).__name__}: only token_tracking.Sample can be sent"
            )
        samples.append(each)
    return samples


def _by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    rollouts: list[list[Sample]] = []
    for sample in samples:
        if rollouts and sample.part > 0 and rollouts[-1][0].key[:2] == sample.key[:2]:
            rollouts[-1].append(sample)
        else:
            rollouts.append([sample])
    return rollouts or [[]]
