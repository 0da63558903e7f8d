"""What an engine was asked and what it gave, call by call: kept with `--dump`, given again by `--replay`."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking import GenerationRecord
from token_tracking.sample import FinishReason, LogprobKind

from agent_flow.errors import EngineError, Fault


class RecordImage(msgspec.Struct, frozen=True, kw_only=True):
    """A `GenerationRecord` without its prompt; arrays as little-endian bytes, so that NaN comes back."""

    output_ids: bytes
    """int32."""
    logprobs: bytes | None
    """float32. None: not recorded."""
    finish_reason: FinishReason
    stop_id: int | None
    stop_string: str | None
    weight_version: int
    logprob_kind: LogprobKind
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    kept_ids: bytes | None
    """int32."""
    kept_offsets: bytes | None
    """int64."""
    repairs: tuple[str, ...]
    routed_experts_left_out: bool
    """The engine gave routed experts; a dump does not hold them."""


class ErrorImage(msgspec.Struct, frozen=True, kw_only=True):
    """An `EngineError`."""

    cause: str
    message: str
    fault: Fault
    retryable: bool
    evidence: str
    partial: tuple[RecordImage, ...]


class CallImage(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `Engine.generate`."""

    shared: int
    """How many of its prompt's ids are those of the call before it, prompt and answer together."""
    rest: bytes
    """The prompt's other ids, int32."""
    records: tuple[RecordImage, ...] = ()
    error: ErrorImage | None = None
    """None: it gave `records`."""


class CallLog:
    """Takes the calls of one rollout down."""

    def __init__(self) -> None:
        self._calls: list[CallImage] = []
        self._before = np.zeros(0, np.int32)

    @property
    def calls(self) -> tuple[CallImage, ...]:
        """In order."""
        return tuple(self._calls)

    def answered(self, prompt_ids: npt.NDArray[np.int32], records: tuple[GenerationRecord, ...]) -> None:
        """The engine gave records."""
        self._add(prompt_ids, records, None)

    def failed(self, prompt_ids: npt.NDArray[np.int32], error: EngineError) -> None:
        """The engine raised."""
        self._add(prompt_ids, (), error)

    def _add(
        self,
        prompt_ids: npt.NDArray[np.int32],
        records: tuple[GenerationRecord, ...],
        error: EngineError | None,
    ) -> None:
        shared = shared_length(self._before, prompt_ids)
        self._calls.append(
            CallImage(
                shared=shared,
                rest=_bytes(prompt_ids[shared:], "<i4"),
                records=tuple(map(_record_image, records)),
                error=None if error is None else _error_image(error),
            )
        )
        self._before = np.concatenate([prompt_ids, *(record.output_ids for record in records)])


class CallReader:
    """Gives the calls of one rollout again, with their whole prompts."""

    def __init__(self, calls: tuple[CallImage, ...]) -> None:
        self._calls = calls
        self._next = 0
        self._before = np.zeros(0, np.int32)

    @property
    def given(self) -> int:
        """Calls that were read."""
        return self._next

    @property
    def total(self) -> int:
        """Calls that there are."""
        return len(self._calls)

    def read(self) -> tuple[npt.NDArray[np.int32], CallImage]:
        """The next call's prompt and the call; not past `total`."""
        call = self._calls[self._next]
        self._next += 1
        prompt = np.concatenate([self._before[: call.shared], _ints(call.rest)])
        outputs = [_ints(record.output_ids) for record in call.records]
        self._before = np.concatenate([prompt, *outputs])
        return prompt, call


def records_of(
    prompt_ids: npt.NDArray[np.int32], images: tuple[RecordImage, ...]
) -> tuple[GenerationRecord, ...]:
    """Records as they were, after a prompt; each goes on where the one before it ended."""
    made: list[GenerationRecord] = []
    for image in images:
        offsets = image.kept_offsets
        made.append(
            GenerationRecord(
                prompt_ids=np.concatenate([prompt_ids, *(record.output_ids for record in made)]),
                output_ids=_ints(image.output_ids),
                logprobs=None
                if image.logprobs is None
                else np.frombuffer(image.logprobs, "<f4").astype(np.float32),
                finish_reason=image.finish_reason,
                stop_id=image.stop_id,
                stop_string=image.stop_string,
                weight_version=image.weight_version,
                logprob_kind=image.logprob_kind,
                temperature=image.temperature,
                top_p=image.top_p,
                top_k=image.top_k,
                min_p=image.min_p,
                kept_ids=None if image.kept_ids is None else _ints(image.kept_ids),
                kept_offsets=None if offsets is None else np.frombuffer(offsets, "<i8").astype(np.int64),
                repairs=image.repairs,
            )
        )
    return tuple(made)


def error_of(prompt_ids: npt.NDArray[np.int32], image: ErrorImage) -> EngineError:
    """The error as it was."""
    error = EngineError(
        image.cause, image.message, fault=image.fault, retryable=image.retryable, evidence=image.evidence
    )
    error.partial = records_of(prompt_ids, image.partial)
    return error


def shared_length(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _record_image(record: GenerationRecord) -> RecordImage:
    return RecordImage(
        output_ids=_bytes(record.output_ids, "<i4"),
        logprobs=None if record.logprobs is None else _bytes(record.logprobs, "<f4"),
        finish_reason=record.finish_reason,
        stop_id=record.stop_id,
        stop_string=record.stop_string,
        weight_version=record.weight_version,
        logprob_kind=record.logprob_kind,
        temperature=record.temperature,
        top_p=record.top_p,
        top_k=record.top_k,
        min_p=record.min_p,
        kept_ids=None if record.kept_ids is None else _bytes(record.kept_ids, "<i4"),
        kept_offsets=None if record.kept_offsets is None else _bytes(record.kept_offsets, "<i8"),
        repairs=record.repairs,
        routed_experts_left_out=record.routed_experts is not None,
    )


def _error_image(error: EngineError) -> ErrorImage:
    return ErrorImage(
        cause=error.cause,
        message=error.message,
        fault=error.fault,
        retryable=error.retryable,
        evidence=error.evidence,
        partial=tuple(map(_record_image, error.partial)),
    )


def _bytes(array: npt.NDArray[np.generic], dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _ints(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, "<i4").astype(np.int32)
