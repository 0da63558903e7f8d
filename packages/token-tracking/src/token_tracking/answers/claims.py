"""What an engine's answer claims of itself, checked without the prompt or a tokenizer."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from token_tracking import kept as kept_sets
from token_tracking.errors import RecordCode, RecordError
from token_tracking.kept import KeptSets
from token_tracking.sample import FinishReason, LogprobKind

VLLM_MISSING_LOGPROB = -9999.0
"""What vLLM writes where it has no log-probability."""


def check_flat(name: str, array: Any, dtype: type[np.generic]) -> None:
    """Check that a field is a flat numpy array of `dtype` (`array`)."""
    found = type(array).__name__
    if isinstance(array, np.ndarray):
        values = cast("npt.NDArray[Any]", array)
        if values.ndim == 1 and values.dtype == dtype:
            return
        found = f"{values.dtype} {values.shape}"
    raise RecordError(f"{name} must be a flat numpy array of {np.dtype(dtype)}, got {found}", code="array")


def check_not_negative(name: str, ids: npt.NDArray[np.int32]) -> None:
    """Check that no id is negative (`vocabulary`)."""
    if len(ids) and (lowest := int(np.minimum.reduce(ids))) < 0:
        raise RecordError(f"{name} holds the negative id {lowest}", code="vocabulary")


def check_below(what: str, ids: npt.NDArray[np.int32], size: int, code: RecordCode) -> None:
    """Check that all ids lie in a vocabulary of `size` ids (`code`)."""
    if len(ids) and (highest := int(np.maximum.reduce(ids))) >= size:
        raise RecordError(
            f"{what} {int(ids.argmax())} has id {highest}, the tokenizer's ids end at {size - 1}: the engine "
            "serves another model, or samples padding rows of its vocabulary (ban those ids)",
            code=code,
        )


def check_logprobs(
    values: npt.NDArray[np.float32] | None, kind: LogprobKind, ids: npt.NDArray[np.int32]
) -> None:
    """Check that there is one log-probability per id, and that each can be one.

    Raises:
        RecordError: `logprob_kind`, `array`, `logprob_count` or `logprob_value`.
    """
    if (values is None) != (kind == "none"):
        given = "no" if values is None else "some"
        raise RecordError(
            f"logprob_kind is {kind!r}, but there are {given} log-probabilities", code="logprob_kind"
        )
    if values is None:
        return
    check_flat("logprobs", values, np.float32)
    if values.shape != ids.shape:
        raise RecordError(f"{values.size} log-probabilities for {len(ids)} output ids", code="logprob_count")
    # NaN goes through minimum and maximum, and compares false: two passes show that all is well.
    if not len(values) or (
        np.minimum.reduce(values) > VLLM_MISSING_LOGPROB and np.maximum.reduce(values) <= 0
    ):
        return
    good = np.isfinite(values) & (values <= 0) & (values != VLLM_MISSING_LOGPROB)
    if not bool(good.all()):
        at = int(np.flatnonzero(~good)[0])
        raise RecordError(
            f"log-probability {values[at]} of output token {at}: need finite, <= 0, and no stand-in; "
            "GenerationRecord.without_logprobs() takes the tokens alone, for supervised training",
            code="logprob_value",
        )


def check_sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, min_p: float | None
) -> None:
    """Check that sampling parameters are ones that an engine takes (`sampling`); None: not known."""
    for name, value, good in (
        ("temperature", temperature, temperature is None or 0 <= temperature < float("inf")),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1),
        ("top_k", top_k, top_k is None or -1 <= top_k < 2**63),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1),
    ):
        if not good:
            raise RecordError(
                f"{name} is {value!r}: need temperature >= 0, 0 < top_p <= 1, top_k >= -1 (-1 and 0: off), "
                "0 <= min_p <= 1, or None for not known",
                code="sampling",
            )


def check_stop_fields(
    reason: FinishReason, stop_id: int | None, stop_string: str | None, ids: npt.NDArray[np.int32]
) -> None:
    """Check that stop token, stop string and finish reason agree with each other and with the last id.

    Raises:
        RecordError: `stop_reason`, `stop_missing` or `empty`.
    """
    last = int(ids[-1]) if len(ids) else None
    for name, value in (("stop_id", stop_id), ("stop_string", stop_string)):
        if value is not None and reason != "stop":
            raise RecordError(f"{name} {value!r} with finish reason {reason!r}", code="stop_reason")
    if stop_id is not None and last != stop_id:
        raise RecordError(
            f"stop_id is {stop_id}, but the last output id is {last}: the engine cut the stop token off (ask "
            "it to keep it) or went on after it",
            code="stop_missing",
        )
    if stop_string == "":
        raise RecordError("stop_string is empty: it would stop every turn", code="stop_reason")
    if reason == "stop" and last is None:
        raise RecordError("finish reason 'stop' without a single output id", code="empty")


def check_count(name: str, said: int | None, found: int) -> None:
    """Compare the engine's own count with the ids that are here (`counts`); None: it gave none."""
    if said is not None and said != found:
        raise RecordError(
            f"the engine counts {said} {name}, {found} ids are here: ids were lost or added on the way (a "
            "stream without its last chunk, a parser that drops tool-call tokens, ids past a stop)",
            code="counts",
        )


def check_kept(
    ids: npt.NDArray[np.int32] | None,
    offsets: npt.NDArray[np.int64] | None,
    chosen: npt.NDArray[np.int32],
) -> None:
    """Check that kept sets can be the ones that `chosen` were sampled from.

    Raises:
        RecordError: one of the `kept_` codes.
    """
    if (ids is None) != (offsets is None):
        raise RecordError("kept_ids and kept_offsets come together", code="kept_set")
    if ids is None or offsets is None:
        return
    fault = kept_sets.fault(KeptSets(ids, offsets), chosen)
    if fault is not None:
        raise RecordError(fault.why, code=fault.code)
