"""`GenerationRecord`: one answer of an inference engine, checked against itself and its prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking import kept as kept_sets
from token_tracking.errors import RecordCode, RecordError
from token_tracking.experts import Rows, check_rows
from token_tracking.kept import KeptSets
from token_tracking.sample import UNKNOWN_VERSION, FinishReason, LogprobKind, is_version
from token_tracking.stops import Decode, stop_end

VLLM_MISSING_LOGPROB = -9999.0
"""What vLLM writes where it has no log-probability."""


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine sampled after one prompt.

    Raises:
        RecordError: a field contradicts another (checked on construction), or the prompt is not the one that
            was sent (`check_prompt`). Its `code` names what is wrong; `without_echo` and `cut_at_stop` repair
            what can be repaired.
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
    abort, or a stop string), or the engine does not say which."""
    stop_string: str | None = None
    """The stop string that ended the turn (what was matched, if it is a pattern); it must end in the last
    output id."""
    weight_version: int = UNKNOWN_VERSION
    """`0 <= version < 2**31`, or -2 for unknown."""
    logprob_kind: LogprobKind = "none"
    """Which distribution `logprobs` belong to; `none` exactly when there are none."""
    temperature: float | None = None
    """Sampling parameters; None: not known."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    prompt_tokens: int | None = None
    """The engine's own count of prompt tokens (`usage`, `meta_info`). None: not given."""
    completion_tokens: int | None = None
    """The engine's own count of output tokens. None: not given."""
    kept_ids: npt.NDArray[np.int32] | None = None
    """Where sampling was truncated: the vocabulary ids that each token was chosen from, one set after the
    other. None: not recorded."""
    kept_offsets: npt.NDArray[np.int64] | None = None
    """`[n + 1]`: token i was chosen from `kept_ids[kept_offsets[i]:kept_offsets[i + 1]]`, itself in it."""
    routed_experts: Rows | None = None
    """`[p + n - 1 - routed_start, layers, top_k]`, uint8, int16, uint16 or int32: row i routed token
    `routed_start + i`. Held, not copied. None: not recorded."""
    routed_start: int = 0
    """Position of the first row: 0 for the full sequence; a delta begins at the last token of the turn
    before, whose row its prefill brings."""
    repairs: tuple[str, ...] = ()
    """Repairs that were applied, by name; the conversation counts them."""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "output_ids"):
            ids: npt.NDArray[np.int32] = self.prompt_ids if name == "prompt_ids" else self.output_ids
            _check_flat(name, ids, np.int32)
            # A prompt is compared with the one that was sent; to read it here would cost more each turn.
            if name == "output_ids" and len(ids) and int(ids.min()) < 0:
                raise RecordError(f"{name} holds the negative id {int(ids.min())}", code="vocabulary")
        if not is_version(self.weight_version):
            raise RecordError(
                f"weight version {self.weight_version!r}: need an int in 0..2**31-1, or -2", code="version"
            )
        self._check_logprobs()
        self._check_stop()
        self._check_counts()
        self._check_kept()
        if self.routed_experts is not None:
            seen = len(self.prompt_ids) + self._sampled
            check_rows(self.routed_experts, self.routed_start, seen)

    @property
    def kept(self) -> KeptSets | None:
        """`kept_ids` and `kept_offsets`; None: not recorded."""
        if self.kept_ids is None or self.kept_offsets is None:
            return None
        return KeptSets(self.kept_ids, self.kept_offsets)

    @property
    def echoes(self) -> bool:
        """Whether `output_ids` begin with the whole prompt, which is then longer than eight ids."""
        n = len(self.prompt_ids)
        return 8 < n <= len(self.output_ids) and np.array_equal(self.output_ids[:n], self.prompt_ids)

    @property
    def _sampled(self) -> int:
        """Output ids that were sampled: all, but for an echo of the prompt."""
        return len(self.output_ids) - (len(self.prompt_ids) if self.echoes else 0)

    def _check_logprobs(self) -> None:
        if (self.logprobs is None) != (self.logprob_kind == "none"):
            given = "no" if self.logprobs is None else "some"
            raise RecordError(
                f"logprob_kind is {self.logprob_kind!r}, but there are {given} log-probabilities",
                code="logprob_kind",
            )
        if self.logprobs is None:
            return
        _check_flat("logprobs", self.logprobs, np.float32)
        if self.logprobs.shape != self.output_ids.shape:
            raise RecordError(
                f"{self.logprobs.size} log-probabilities for {len(self.output_ids)} output ids",
                code="logprob_count",
            )
        good = np.isfinite(self.logprobs) & (self.logprobs <= 0) & (self.logprobs != VLLM_MISSING_LOGPROB)
        if not bool(np.all(good)):
            at = int(np.flatnonzero(~good)[0])
            raise RecordError(
                f"log-probability {self.logprobs[at]} of output token {at}: need finite, <= 0, "
                "and no stand-in",
                code="logprob_value",
            )

    def _check_stop(self) -> None:
        last = int(self.output_ids[-1]) if len(self.output_ids) else None
        for name, value in (("stop_id", self.stop_id), ("stop_string", self.stop_string)):
            if value is not None and self.finish_reason != "stop":
                raise RecordError(
                    f"{name} {value!r} with finish reason {self.finish_reason!r}", code="stop_reason"
                )
        if self.stop_id is not None and last != self.stop_id:
            raise RecordError(
                f"stop_id is {self.stop_id}, but the last output id is {last}: the engine cut the stop "
                "token off (ask it to keep it) or went on after it",
                code="stop_missing",
            )
        if self.stop_string == "":
            raise RecordError("stop_string is empty: it would stop every turn", code="stop_reason")
        if self.finish_reason == "stop" and last is None:
            raise RecordError("finish reason 'stop' without a single output id", code="empty")

    def _check_counts(self) -> None:
        for name, said, found in (
            ("prompt_tokens", self.prompt_tokens, len(self.prompt_ids)),
            ("completion_tokens", self.completion_tokens, self._sampled),
        ):
            if said is not None and said != found:
                raise RecordError(
                    f"the engine counts {said} {name}, {found} ids are here: ids were lost or added on "
                    "the way (a stream without its last chunk, a parser that drops tool-call tokens, ids "
                    "past a stop)",
                    code="counts",
                )

    def _check_kept(self) -> None:
        if (self.kept_ids is None) != (self.kept_offsets is None):
            raise RecordError("kept_ids and kept_offsets come together", code="kept_set")
        if self.kept is not None and (fault := kept_sets.fault(self.kept, self.output_ids)) is not None:
            raise RecordError(fault, code="kept_set")

    def ended_by(self, stop_ids: Collection[int]) -> GenerationRecord:
        """The record with its stop token named: the last id, where it is one of `stop_ids`.

        Such a turn has ended, whatever the finish reason says: a limit or an abort came with its last token.
        """
        last = int(self.output_ids[-1]) if len(self.output_ids) else None
        if self.stop_id is not None or last not in stop_ids:
            return self
        return msgspec.structs.replace(self, finish_reason="stop", stop_id=last)

    def check_vocabulary(self, size: int) -> None:
        """Compare the sampled ids, and the sets they were chosen from, with the tokenizer's.

        Raises:
            RecordError: an output id is `size` or more.
        """
        if len(self.output_ids) and (highest := int(self.output_ids.max())) >= size:
            at = int(self.output_ids.argmax())
            raise RecordError(
                f"output token {at} has id {highest}, the tokenizer's ids end at {size - 1}: the engine "
                "serves another model, or samples padding rows of its vocabulary (ban those ids)",
                code="vocabulary",
            )

    def check_prompt(self, sent: npt.NDArray[np.int32]) -> None:
        """Compare the engine's prompt with the ids that were sent.

        Raises:
            RecordError: they differ; the engine tokenized text again, cut the prompt, read it twice, or
                answered another request. Also if the output repeats the whole prompt in front
                (`prompt_echoed`: `without_echo` repairs it).
        """
        if len(self.prompt_ids) != len(sent):
            raise _prompt_length_error(self.prompt_ids, sent)
        if not (_same_memory(self.prompt_ids, sent) or np.array_equal(self.prompt_ids, sent)):
            at = int(np.flatnonzero(self.prompt_ids != sent)[0])
            raise RecordError(
                f"the engine read id {self.prompt_ids[at]} at {at}, id {sent[at]} was sent: it re-tokenized",
                code="prompt",
            )
        if self.echoes:
            raise RecordError(
                "output_ids begin with the whole prompt: pass the sampled ids alone, or call without_echo()",
                code="prompt_echoed",
            )

    def check_stop(self, stop_ids: Collection[int], decode: Decode) -> None:
        """Check what finish reason `stop` claims against the ids.

        Args:
            stop_ids: the template's stop tokens; empty: none are known, and only `stop_id` and `stop_string`
                are checked.
            decode: ids to text.

        Raises:
            RecordError: the turn does not end with a stop (`stop_missing`), or goes on after one
                (`stop_passed`, vllm#47616: `cut_at_stop` repairs it).
        """
        known = self.stop_id is not None or self.stop_string is not None or len(stop_ids) > 0
        if self.finish_reason != "stop" or not known:
            return
        ids = {self.stop_id} if self.stop_id is not None else set(stop_ids)
        end = stop_end(self.output_ids, ids if self.stop_string is None else (), self.stop_string, decode)
        if end is None:
            what = "a stop token" if self.stop_string is None else f"the stop string {self.stop_string!r}"
            raise RecordError(
                f"finish reason 'stop', but the {len(self.output_ids)} output ids do not hold {what}: ask "
                "the engine to keep it, or pass stop_id or stop_string as the engine matched it",
                code="stop_missing",
            )
        if end < len(self.output_ids):
            raise RecordError(
                f"the turn stopped at output token {end - 1}, but {len(self.output_ids) - end} ids follow: "
                "the engine went on after the stop; call cut_at_stop()",
                code="stop_passed",
            )

    def without_echo(self, prompt: npt.NDArray[np.int32]) -> GenerationRecord:
        """The record without the prompt that its output begins with; unchanged if it does not.

        Safe for a prompt of nine ids or more: a model does not sample all of it, control tokens and all, by
        itself. Counted as `echo_removed`.

        Raises:
            RecordError: nothing is left.
        """
        if not (self.echoes and np.array_equal(self.prompt_ids, prompt)):
            return self
        return self._part(len(prompt), len(self.output_ids), "echo_removed", {})

    def cut_at_stop(self, stop_ids: Collection[int], decode: Decode | None = None) -> GenerationRecord:
        """The record without the ids after its first stop; unchanged if there are none, or no stop is found.

        What is cut was sampled after the turn had ended, so it was not seen by the agent and has no part in
        the turn. Counted as `cut_at_stop`.

        Args:
            stop_ids: the stop tokens.
            decode: ids to text; needed to find `stop_string`.
        """
        end = stop_end(self.output_ids, stop_ids, self.stop_string, decode)
        if end is None or end >= len(self.output_ids):
            return self
        last = int(self.output_ids[end - 1])
        change: dict[str, Any] = {"finish_reason": "stop", "stop_id": last if last in stop_ids else None}
        rows = self.routed_experts
        if rows is not None:
            change["routed_experts"] = rows[: max(len(self.prompt_ids) + end - 1 - self.routed_start, 0)]
        return self._part(0, end, "cut_at_stop", {**change, "completion_tokens": None})

    def _part(self, start: int, end: int, repair: str, change: dict[str, Any]) -> GenerationRecord:
        kept = None if self.kept is None else self.kept.part(start, end)
        return msgspec.structs.replace(
            self,
            output_ids=self.output_ids[start:end],
            logprobs=None if self.logprobs is None else self.logprobs[start:end],
            kept_ids=None if kept is None else kept.ids,
            kept_offsets=None if kept is None else kept.offsets,
            repairs=(*self.repairs, repair),
            **change,
        )


def _check_flat(name: str, array: Any, dtype: type[np.generic]) -> None:
    found = type(array).__name__
    if isinstance(array, np.ndarray):
        values = cast("npt.NDArray[Any]", array)
        if values.ndim == 1 and values.dtype == dtype:
            return
        found = f"{values.dtype} {values.shape}"
    raise RecordError(f"{name} must be a flat numpy array of {np.dtype(dtype)}, got {found}", code="array")


def _same_memory(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> bool:
    """Whether two equally long arrays are one: a client that got no echo hands back what it was given."""
    if left is right:
        return True
    ours, theirs = left.__array_interface__, right.__array_interface__
    return left.strides == right.strides and ours["data"][0] == theirs["data"][0]


def _prompt_length_error(read: npt.NDArray[np.int32], sent: npt.NDArray[np.int32]) -> RecordError:
    message = f"the engine read a prompt of {len(read)} ids, {len(sent)} were sent"
    code: RecordCode = "prompt"
    if len(sent) and len(read) == 2 * len(sent) and np.array_equal(read, np.concatenate([sent, sent])):
        code, message = "prompt_doubled", f"{message}: it read the prompt twice"
    elif len(sent) and len(read) == len(sent) + 1 and np.array_equal(read[1:], sent):
        code, message = "prompt_doubled", f"{message}: it put id {int(read[0])} in front (add_bos?)"
    return RecordError(message, code=code)
