"""Samples to frames and back. One DATA message carries all parts of one rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash
from token_tracking.errors import SampleError
from token_tracking.sample import Sample, Turn

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.config import MAX_GROUP_SIZE, MAX_PARTS, MAX_PAYLOAD_BYTES
from trainer_bridge.errors import ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import ArrayEntry, DataHead, PartBody, Scalar, TurnBody
from trainer_bridge.payload import Array, Buffer, Layout, lay_out, unpack, write

SCHEMA = "sample/1"
SCHEMA_TEXT = """\
sample/1
array token_ids i4 [n] required
array loss_mask u1 [n] required
array logprobs f4 [n] required
array versions i4 [n] required
array kept_ids i4 [k] optional
array kept_offsets i8 [n+1] optional
array routed_experts integer [n-1,layers,top_k] optional
part prompt_length turns reward in_loss in_baseline status source policy_run provenance extra
turn start end finish_reason logprob_kind temperature top_p top_k min_p reward
"""
"""The schema in canonical form; both ends compare its hash in HELLO, so that drift shows at connect, not in
the loss."""
SCHEMA_HASH = xxhash.xxh3_64_intdigest(SCHEMA_TEXT.encode())

_NOBODY = bytes(16)
_REQUIRED = ("token_ids", "loss_mask", "logprobs", "versions")
_OPTIONAL = ("kept_ids", "kept_offsets", "routed_experts")
_ALL = _REQUIRED + _OPTIONAL
_SCALARS = (str, int, float, bool, type(None))


def _array_names(part: int) -> tuple[str, ...]:
    """What the arrays of a part are called in the table, in the order of `_ALL`."""
    return tuple(f"{part}/{field}" for field in _ALL)


_FIRST_NAMES = _array_names(0)
_FIRST_PLAIN = _FIRST_NAMES[: len(_REQUIRED)]
_FIRST_REQUIRED = frozenset(_FIRST_PLAIN)
_FIRST_ALL = frozenset(_FIRST_NAMES)
"""Most rollouts have one part."""


class Frames(NamedTuple):
    """A DATA message as it travels and lies on disk."""

    head: bytes
    payload: Buffer

    @property
    def nbytes(self) -> int:
        """Bytes of both frames."""
        return len(self.head) + len(self.payload)


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A rollout made ready to send, but for its place in a producer's sequence.

    The heavy work (the copy and the hash) is done before a number is taken, so that it needs no lock.
    """

    head: DataHead
    payload: Buffer

    def numbered(self, producer: bytes, epoch: int, sequence: int, created_ns: int) -> Frames:
        """The frames, under this identity."""
        head = msgspec.structs.replace(
            self.head, producer=producer, epoch=epoch, sequence=sequence, created_ns=created_ns
        )
        return Frames(encode_head(head), self.payload)


class Data(msgspec.Struct, frozen=True, gc=False):
    """A decoded DATA message. The samples' arrays are read-only views of the payload."""

    head: DataHead
    samples: tuple[Sample, ...]

    @property
    def rollout_id(self) -> str:
        """32 hex characters."""
        return self.head.rollout_id.hex()


def draft(
    samples: Sequence[Sample],
    *,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    group_size: int = 0,
    pool: BlockPool | None = None,
) -> Draft:
    """Make all parts of one rollout ready to send: `draft_all` of one."""
    return draft_all([samples], max_payload_bytes=max_payload_bytes, group_size=group_size, pool=pool)[0]


def draft_all(
    rollouts: Sequence[Sequence[Sample]],
    *,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    group_size: int = 0,
    pool: BlockPool | None = None,
) -> list[Draft]:
    """Make rollouts ready to send; their arrays are copied and may be reused at once.

    Args:
        rollouts: each all its parts, 0 to `parts - 1` in order, of one attempt. Their payloads come to lie in
            one piece of memory, which is free again when all of them are settled.
        max_payload_bytes: upper bound of each payload.
        group_size: rollouts that make their group complete; 0: not said.
        pool: memory of large payloads. None: allocated.

    Raises:
        UnsendableError: not the complete parts of one rollout, or a value that the wire cannot carry.
    """
    layouts = [_lay_out(samples, max_payload_bytes) for samples in rollouts]
    payloads = write(layouts, pool)
    return [
        Draft(_head(samples, layout.table, payload, group_size), payload)
        for samples, layout, payload in zip(rollouts, layouts, payloads, strict=True)
    ]


def _lay_out(samples: Sequence[Sample], max_payload_bytes: int) -> Layout:
    first = _one_rollout(samples)
    named: list[tuple[str, Array]] = []
    for part, sample in enumerate(samples):
        names = _array_names(part) if part else _FIRST_NAMES
        named += [(n, a) for n, a in zip(names, _arrays_of(sample), strict=True) if a is not None]
    layout = lay_out(named)
    nbytes = sum(entry.nbytes for entry in layout.table)
    if nbytes > max_payload_bytes:
        raise UnsendableError(
            f"rollout {first.rollout_id}: {nbytes} bytes of arrays, at most {max_payload_bytes} are allowed "
            "(max_payload_bytes)"
        )
    return layout


def _head(
    samples: Sequence[Sample], table: tuple[ArrayEntry, ...], payload: Buffer, group_size: int
) -> DataHead:
    """Without its place in a producer's sequence."""
    first = samples[0]
    return DataHead(
        schema=SCHEMA,
        producer=_NOBODY,
        epoch=0,
        sequence=0,
        created_ns=0,
        rollout_id=bytes.fromhex(first.rollout_id),
        group_id=bytes.fromhex(first.group_id),
        attempt=first.attempt,
        task_id=first.task_id,
        parts=tuple(_part_body(sample) for sample in samples),
        arrays=table,
        payload_nbytes=len(payload),
        payload_hash=xxhash.xxh3_64_intdigest(payload),
        group_size=group_size,
    )


def decode_data(head: DataHead, payload: Buffer) -> Data:
    """Check a payload against its head, and build the samples.

    Raises:
        ProtocolError: with the code of the first rule that is broken.
    """
    if head.schema != SCHEMA:
        raise ProtocolError(ErrorCode.UNKNOWN_SCHEMA, f"schema {head.schema!r}, this side knows {SCHEMA!r}")
    if not 1 <= len(head.parts) <= MAX_PARTS:
        raise ProtocolError(ErrorCode.BAD_BODY, f"{len(head.parts)} parts, 1 to {MAX_PARTS} are allowed")
    if not 0 <= head.group_size <= MAX_GROUP_SIZE:
        raise ProtocolError(
            ErrorCode.BAD_BODY, f"group_size {head.group_size}, 0 to {MAX_GROUP_SIZE} is allowed"
        )
    if len(payload) != head.payload_nbytes:
        raise ProtocolError(
            ErrorCode.BAD_PAYLOAD_LENGTH, f"{len(payload)} bytes, the head says {head.payload_nbytes}"
        )
    if xxhash.xxh3_64_intdigest(payload) != head.payload_hash:
        raise ProtocolError(
            ErrorCode.BAD_PAYLOAD_HASH, "the payload's bytes do not match the hash in the head"
        )
    _check_names(head.arrays, len(head.parts))
    arrays = unpack(head.arrays, payload)
    return Data(head, tuple(_sample(head, i, part, arrays) for i, part in enumerate(head.parts)))


def decode_frames(frames: Sequence[Buffer]) -> Data:
    """Decode a DATA message from its frames (also from a spool record).

    Raises:
        ProtocolError: also if the message is of another kind.
    """
    if not frames:
        raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, "a message without frames")
    head = decode_head(frames[0])
    if not isinstance(head, DataHead):
        raise ProtocolError(ErrorCode.UNKNOWN_KIND, f"expected DATA, got {type(head).__name__}")
    if len(frames) != 2:
        raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"DATA has 2 frames, got {len(frames)}")
    return decode_data(head, frames[1])


def _one_rollout(samples: Sequence[Sample]) -> Sample:
    if not samples:
        raise UnsendableError("no samples to send")
    first = samples[0]
    for part, sample in enumerate(samples):
        shared = (sample.rollout_id, sample.group_id, sample.attempt, sample.task_id, sample.parts)
        if shared != (first.rollout_id, first.group_id, first.attempt, first.task_id, first.parts):
            raise UnsendableError(
                f"rollout {first.rollout_id}: its parts must agree in rollout_id, group_id, attempt, "
                "task_id and parts"
            )
        if sample.part != part:
            raise UnsendableError(f"rollout {first.rollout_id}: part {sample.part} stands at place {part}")
    if first.attempt >= 2**32:
        raise UnsendableError(f"rollout {first.rollout_id}: attempt {first.attempt} has more than 32 bits")
    if len(samples) != first.parts or first.parts > MAX_PARTS:
        raise UnsendableError(
            f"rollout {first.rollout_id}: {len(samples)} of {first.parts} parts given; all parts of a "
            f"rollout are sent in one call, and there are at most {MAX_PARTS}"
        )
    return first


def _arrays_of(sample: Sample) -> tuple[Array | None, ...]:
    """In the order of `_ALL`."""
    return (
        sample.token_ids,
        sample.loss_mask,
        sample.logprobs,
        sample.versions,
        sample.kept_ids,
        sample.kept_offsets,
        sample.routed_experts,
    )


def _part_body(sample: Sample) -> PartBody:
    return PartBody(
        prompt_length=sample.prompt_length,
        turns=tuple(
            TurnBody(
                t.start,
                t.end,
                t.finish_reason,
                t.logprob_kind,
                t.temperature,
                t.top_p,
                t.top_k,
                t.min_p,
                t.reward,
            )
            for t in sample.turns
        ),
        reward=sample.reward,
        in_loss=sample.in_loss,
        in_baseline=sample.in_baseline,
        status=sample.status,
        source=sample.source,
        policy_run=sample.policy_run,
        provenance=_scalars(sample, "provenance", sample.provenance),
        extra=_scalars(sample, "extra", sample.extra),
    )


def _scalars(sample: Sample, field: str, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    for key, value in values.items():
        if type(value) not in _SCALARS or type(key) is not str:
            raise UnsendableError(
                f"rollout {sample.rollout_id}: {field}[{key!r}] is a {type(value).__name__}; "
                "only str, int, float, bool and None travel there, under str keys"
            )
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise UnsendableError(f"rollout {sample.rollout_id}: {field}[{key!r}] has more than 64 bits")
    return dict(values)


def _check_names(table: Sequence[ArrayEntry], parts: int) -> None:
    if parts == 1 and tuple(entry.name for entry in table) == _FIRST_PLAIN:
        return
    names = {entry.name for entry in table}
    required, known = _FIRST_REQUIRED, _FIRST_ALL
    if parts > 1:
        required = {f"{part}/{field}" for part in range(parts) for field in _REQUIRED}
        known = {name for part in range(parts) for name in _array_names(part)}
    if not names >= required:
        raise ProtocolError(ErrorCode.MISSING_ARRAY, f"array {min(required - names)!r} is not in the table")
    if not names <= known:
        raise ProtocolError(ErrorCode.UNKNOWN_ARRAY, f"array {min(names - known)!r} is not in {SCHEMA}")


def _sample(head: DataHead, index: int, part: PartBody, arrays: Mapping[str, Array]) -> Sample:
    names = _array_names(index) if index else _FIRST_NAMES
    try:
        return Sample(
            rollout_id=head.rollout_id.hex(),
            group_id=head.group_id.hex(),
            attempt=head.attempt,
            part=index,
            parts=len(head.parts),
            task_id=head.task_id,
            prompt_length=part.prompt_length,
            turns=tuple(_turn(turn) for turn in part.turns),
            reward=part.reward,
            in_loss=part.in_loss,
            in_baseline=part.in_baseline,
            status=part.status,
            source=part.source,
            policy_run=part.policy_run,
            provenance=part.provenance,
            extra=part.extra,
            **dict(zip(_ALL, map(arrays.get, names), strict=True)),  # pyright: ignore[reportArgumentType]
        )
    except SampleError as error:
        raise ProtocolError(ErrorCode.BAD_SAMPLE, f"part {index}: {error}") from error


def _turn(body: TurnBody) -> Turn:
    return Turn(
        start=body.start,
        end=body.end,
        finish_reason=body.finish_reason,
        logprob_kind=body.logprob_kind,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        reward=body.reward,
    )
