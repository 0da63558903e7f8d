"""`engine.dump` of a rollout: all that is needed to run it again without its engine.

`AFDUMP`, a version, a length, a CRC-32, then MessagePack: token arrays are bytes, never numbers in JSON.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample, Source, Status

from agent_flow.engine_calls import CallImage
from agent_flow.errors import RecordingError
from agent_flow.rollout import Mode, Rollout

NAME = "engine.dump"
_KIND = b"AFDUMP\0\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIQI")


class SampleImage(msgspec.Struct, frozen=True, kw_only=True):
    """The per-token arrays of one sample, little-endian."""

    token_ids: bytes
    """int32."""
    loss_mask: bytes
    """uint8."""
    logprobs: bytes
    """float32."""
    versions: bytes
    """int32."""

    @classmethod
    def of(cls, sample: Sample) -> SampleImage:
        """Of a sample."""
        return cls(
            token_ids=sample.token_ids.astype("<i4", copy=False).tobytes(),
            loss_mask=sample.loss_mask.tobytes(),
            logprobs=sample.logprobs.astype("<f4", copy=False).tobytes(),
            versions=sample.versions.astype("<i4", copy=False).tobytes(),
        )

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """`token_ids` as an array."""
        return np.frombuffer(self.token_ids, "<i4").astype(np.int32)

    @property
    def sampled(self) -> tuple[bytes, bytes, bytes]:
        """Ids, log-probabilities and versions of the tokens in the loss mask alone."""
        mask = np.frombuffer(self.loss_mask, np.uint8).astype(bool)
        ids, logprobs, versions = (
            np.frombuffer(data, kind)[mask].tobytes()
            for data, kind in ((self.token_ids, "<i4"), (self.logprobs, "<f4"), (self.versions, "<i4"))
        )
        return ids, logprobs, versions


class RolloutDump(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout: what its engine gave, and what became of it."""

    rollout_id: str
    group_id: str
    task_id: str
    member: int
    attempt: int
    mode: Mode
    source: Source
    template_now: str
    """The date that the chat template saw, ISO 8601."""
    template_fingerprint: str
    calls: tuple[CallImage, ...]
    exit_status: str
    reward: float | None
    turn_rewards: tuple[float | None, ...] | None
    status: Status
    in_loss: bool
    in_baseline: bool
    samples: tuple[SampleImage, ...]


def dump_of(
    rollout: Rollout, source: Source, calls: tuple[CallImage, ...], samples: Sequence[Sample]
) -> RolloutDump:
    """What is written of a rollout that has ended."""
    template = rollout.conversation.template
    return RolloutDump(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        task_id=rollout.task.instance_id,
        member=rollout.member,
        attempt=rollout.attempt,
        mode=rollout.mode,
        source=source,
        template_now=template.now.isoformat(),
        template_fingerprint=template.fingerprint,
        calls=calls,
        exit_status=rollout.exit_status,
        reward=rollout.reward,
        turn_rewards=rollout.turn_rewards,
        status=rollout.status,
        in_loss=rollout.in_loss,
        in_baseline=rollout.in_baseline,
        samples=tuple(map(SampleImage.of, samples)),
    )


def write_dump(path: Path, dump: RolloutDump) -> None:
    """Write the file."""
    body = msgspec.msgpack.encode(dump)
    path.write_bytes(_HEAD.pack(_KIND, _VERSION, len(body), zlib.crc32(body)) + body)


def read_dump(path: Path) -> RolloutDump:
    """Read the file.

    Raises:
        RecordingError: it is missing, of another kind or version, cut short, or damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(
            f"cannot be read: {error.strerror}", where=str(path), fix="agent-flow run CONFIG --dump"
        ) from error
    if len(data) < _HEAD.size or data[: len(_KIND)] != _KIND:
        raise RecordingError("not a rollout's dump", where=str(path))
    _, version, length, checksum = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if version != _VERSION:
        raise RecordingError(f"version {version}, this release reads {_VERSION}", where=str(path))
    if len(body) != length:
        raise RecordingError(
            f"{len(body)} of {length} bytes: it was cut short or has a tail", where=str(path)
        )
    if zlib.crc32(body) != checksum:
        raise RecordingError("damaged: its checksum does not match", where=str(path))
    try:
        return msgspec.msgpack.decode(body, type=RolloutDump)
    except msgspec.DecodeError as error:
        raise RecordingError(f"does not decode: {error}", where=str(path)) from error
