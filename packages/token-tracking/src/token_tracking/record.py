"""`GenerationRecord`: one answer of an inference engine, checked against itself and its prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.errors import RecordError
from token_tracking.sample import UNKNOWN_VERSION, FinishReason, LogprobKind, is_version


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine sampled after one prompt.

    Raises:
        RecordError: a field contradicts another (checked on construction), or the prompt is not the one that
            was sent (`check_prompt`).
    """

    prompt_ids: npt.NDArray[np.int32]
    """The prompt as the engine says it read it, `[p]`; the ids that were sent if it does not say."""
    output_ids: npt.NDArray[np.int32]
    """Sampled ids in order, the stop token included when one was sampled, `[n]`."""
    logprobs: npt.NDArray[np.float32] | None = None
    """Log-probability of each output id, `[n]`. None: not recorded."""
    finish_reason: FinishReason
    """`stop`: a stop token or stop string. `length`: a limit. `abort`: cut by us; the turn can be
    continued."""
    stop_id: int | None = None
    """The sampled stop token; it must be the last output id. None: the turn did not end with one (a limit, an
    abort, or a stop string)."""
    weight_version: int = UNKNOWN_VERSION
    """`0 <= version < 2**31`, or -2 for unknown."""
    logprob_kind: LogprobKind = "none"
    """Which distribution `logprobs` belong to; `none` exactly when there are none."""
    temperature: float | None = None
    """Sampling parameters; None: not known."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "output_ids"):
            ids: npt.NDArray[np.int32] = self.prompt_ids if name == "prompt_ids" else self.output_ids
            _check_flat(name, ids, np.int32)
            if len(ids) and int(ids.min()) < 0:
                raise RecordError(f"{name} holds the negative id {int(ids.min())}")
        if not is_version(self.weight_version):
            raise RecordError(f"weight version {self.weight_version!r}: need an int in 0..2**31-1, or -2")
        self._check_logprobs()
        self._check_stop()

    def _check_logprobs(self) -> None:
        if (self.logprobs is None) != (self.logprob_kind == "none"):
            given = "no" if self.logprobs is None else "some"
            raise RecordError(
                f"logprob_kind is {self.logprob_kind!r}, but there are {given} log-probabilities"
            )
        if self.logprobs is None:
            return
        _check_flat("logprobs", self.logprobs, np.float32)
        if self.logprobs.shape != self.output_ids.shape:
            raise RecordError(f"{self.logprobs.size} log-probabilities for {len(self.output_ids)} output ids")
        good = np.isfinite(self.logprobs) & (self.logprobs <= 0)
        if not bool(np.all(good)):
            at = int(np.flatnonzero(~good)[0])
            raise RecordError(f"log-probability {self.logprobs[at]} of output token {at}: need finite, <= 0")

    def _check_stop(self) -> None:
        last = int(self.output_ids[-1]) if len(self.output_ids) else None
        if self.stop_id is not None:
            if self.finish_reason != "stop":
                raise RecordError(f"stop_id {self.stop_id} with finish reason {self.finish_reason!r}")
            if last != self.stop_id:
                raise RecordError(
                    f"stop_id is {self.stop_id}, but the last output id is {last}: the engine cut the stop "
                    "token off (ask it to keep it) or went on after it"
                )
        if self.finish_reason == "stop" and last is None:
            raise RecordError("finish reason 'stop' without a single output id")

    def ended_by(self, stop_ids: Collection[int]) -> GenerationRecord:
        """The record with its stop token named: the last id, where it is one of `stop_ids`.

        Such a turn has ended, whatever the finish reason says: a limit or an abort came with its last token.
        """
        last = int(self.output_ids[-1]) if len(self.output_ids) else None
        if self.stop_id is not None or last not in stop_ids:
            return self
        return msgspec.structs.replace(self, finish_reason="stop", stop_id=last)

    def check_vocabulary(self, size: int) -> None:
        """Compare the sampled ids with the tokenizer's.

        Raises:
            RecordError: an id is `size` or more.
        """
        if len(self.output_ids) and (highest := int(self.output_ids.max())) >= size:
            at = int(self.output_ids.argmax())
            raise RecordError(
                f"output token {at} has id {highest}, the tokenizer's ids end at {size - 1}: the engine "
                "serves another model, or samples padding rows of its vocabulary (ban those ids)"
            )

    def check_prompt(self, sent: npt.NDArray[np.int32]) -> None:
        """Compare the engine's prompt with the ids that were sent.

        Raises:
            RecordError: they differ; the engine tokenized text again, cut the prompt, or answered another
                request. Also if the output repeats the whole prompt in front.
        """
        if len(self.prompt_ids) != len(sent):
            raise RecordError(
                f"the engine read a prompt of {len(self.prompt_ids)} ids, {len(sent)} were sent"
            )
        if not np.array_equal(self.prompt_ids, sent):
            at = int(np.flatnonzero(self.prompt_ids != sent)[0])
            raise RecordError(
                f"the engine read id {self.prompt_ids[at]} at {at}, id {sent[at]} was sent: it re-tokenized"
            )
        n = len(sent)
        if n > 8 and len(self.output_ids) > n and np.array_equal(self.output_ids[:n], sent):
            raise RecordError("output_ids begin with the whole prompt: pass the sampled ids alone")


def _check_flat(name: str, array: Any, dtype: type[np.generic]) -> None:
    found = type(array).__name__
    if isinstance(array, np.ndarray):
        values = cast("npt.NDArray[Any]", array)
        if values.ndim == 1 and values.dtype == dtype:
            return
        found = f"{values.dtype} {values.shape}"
    raise RecordError(f"{name} must be a flat numpy array of {np.dtype(dtype)}, got {found}")
