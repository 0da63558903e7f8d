"""`GenerationRecord`: one answer of an inference engine, checked against itself and its prompt."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.answers import claims, engine_text
from token_tracking.answers.experts import DeferredRows, Rows, check_rows, head
from token_tracking.answers.fields import inexact, repair_names
from token_tracking.answers.prompt_claim import check_read
from token_tracking.answers.stops import Decode, stop_end
from token_tracking.errors import RecordError
from token_tracking.kept import KeptSets
from token_tracking.sample import UNKNOWN_VERSION, FinishReason, LogprobKind, is_version


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine sampled after one prompt.

    Raises:
        RecordError: a field contradicts another (checked on construction), or the prompt is not the one that
            was sent (`check_prompt`). Its `code` names what is wrong; `without_echo`, `cut_at_stop`,
            `as_cut_off` and `without_logprobs` repair what can be repaired.
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
    """Sampling parameters as they were sent; None: not known, and `Sample.require_logprobs` then refuses the
    turn: an engine may truncate by the model's own defaults."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    prompt_tokens: int | None = None
    """The engine's own count of prompt tokens (`usage`, `meta_info`). None: not given."""
    completion_tokens: int | None = None
    """The engine's own count of output tokens. None: not given."""
    text: str | None = None
    """The engine's own text of the whole output, compared with the text of the ids; not what a tool or
    reasoning parser left of it. None: not compared."""
    kept_ids: npt.NDArray[np.int32] | None = None
    """Where sampling was truncated: the vocabulary ids that each token was chosen from, one set after the
    other. None: not recorded."""
    kept_offsets: npt.NDArray[np.int64] | None = None
    """`[n + 1]`: token i was chosen from `kept_ids[kept_offsets[i]:kept_offsets[i + 1]]`, itself in it."""
    routed_experts: Rows | DeferredRows | None = None
    """`[p + n - 1 - routed_start, layers, top_k]`, uint8, int16, uint16 or int32: row i routed token
    `routed_start + i`. Held, not copied; `DeferredRows` are read when a sample is made. None: not
    recorded."""
    routed_start: int = 0
    """Position of the first row: 0 for the full sequence; a delta begins at the last token of the turn
    before, whose row its prefill brings."""
    repairs: tuple[str, ...] = ()
    """Repairs that were applied, by name; the conversation counts them."""

    def __post_init__(self) -> None:
        for name, value in inexact(self):
            msgspec.structs.force_setattr(self, name, value)
        claims.check_flat("prompt_ids", self.prompt_ids, np.int32)
        claims.check_flat("output_ids", self.output_ids, np.int32)
        # The prompt is compared with the one that was sent; to read it here would cost more each turn.
        claims.check_not_negative("output_ids", self.output_ids)
        if not is_version(self.weight_version):
            raise RecordError(
                f"weight version {self.weight_version!r}: need an int in 0..2**31-1, or -2", code="version"
            )
        claims.check_logprobs(self.logprobs, self.logprob_kind, self.output_ids)
        claims.check_sampling(self.temperature, self.top_p, self.top_k, self.min_p)
        claims.check_stop_fields(self.finish_reason, self.stop_id, self.stop_string, self.output_ids)
        claims.check_count("prompt_tokens", self.prompt_tokens, len(self.prompt_ids))
        if self.completion_tokens is not None:
            claims.check_count("completion_tokens", self.completion_tokens, self._sampled)
        claims.check_kept(self.kept_ids, self.kept_offsets, self.output_ids)
        if self.routed_experts is not None:
            check_rows(self.routed_experts, self.routed_start, len(self.prompt_ids) + self._sampled)

    @classmethod
    def without_logprobs(cls, **fields: Any) -> GenerationRecord:
        """A record of an answer whose log-probabilities are refused (`logprob_value`, `logprob_count`).

        Its tokens are good for supervised training; `Sample.require_logprobs` refuses them where a ratio is
        needed. Counted as `logprobs_left_out`.

        Args:
            **fields: those of `GenerationRecord`; `logprobs` and `logprob_kind` are left out.

        Raises:
            RecordError: another field is wrong.
        """
        change: dict[str, Any] = {"logprobs": None, "logprob_kind": "none"}
        change["repairs"] = (*repair_names(fields.get("repairs", ())), "logprobs_left_out")
        return cls(**(fields | change))

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

    def ended_by(self, stop_ids: Collection[int]) -> GenerationRecord:
        """The record with its stop token named: the last id, where it is one of `stop_ids`.

        Such a turn has ended, whatever the finish reason says: a limit or an abort came with its last token.
        """
        last = int(self.output_ids[-1]) if len(self.output_ids) else None
        if self.stop_id is not None or last not in stop_ids:
            return self
        ended = copy.copy(self)  # not `replace`: what was checked stays checked
        msgspec.structs.force_setattr(ended, "finish_reason", "stop")
        msgspec.structs.force_setattr(ended, "stop_id", last)
        return ended

    def check_vocabulary(self, size: int) -> None:
        """Compare the sampled ids, and the sets they were chosen from, with the tokenizer's.

        Args:
            size: one past the tokenizer's highest id.

        Raises:
            RecordError: an output id (`vocabulary`) or a kept id (`kept_vocabulary`) is `size` or more.
        """
        claims.check_below("output token", self.output_ids, size, "vocabulary")
        if self.kept_ids is not None:
            claims.check_below("entry of kept_ids", self.kept_ids, size, "kept_vocabulary")

    def check_prompt(self, sent: npt.NDArray[np.int32], decode: Decode | None = None) -> None:
        """Compare the engine's prompt with the ids that were sent.

        Args:
            sent: the ids that were sent.
            decode: ids to text, to tell a prompt that was tokenized again (sglang#26555). None: not told.

        Raises:
            RecordError: they differ (`prompt`, `prompt_doubled`, `prompt_truncated`, `prompt_retokenized`):
                the engine answered another prompt, and nothing can be repaired. Also if the output repeats
                the whole prompt in front (`prompt_echoed`: `without_echo` repairs it).
        """
        check_read(self.prompt_ids, sent, decode)
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
            RecordError: the turn does not end with a stop (`stop_missing`: `as_cut_off` repairs it), or goes
                on after one (`stop_passed`, vllm#47616: `cut_at_stop` repairs it).
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
                "the engine to keep it, pass stop_id or stop_string as the engine matched it, or call "
                "as_cut_off()",
                code="stop_missing",
            )
        if end < len(self.output_ids):
            raise RecordError(
                f"the turn stopped at output token {end - 1}, but {len(self.output_ids) - end} ids follow: "
                "the engine went on after the stop; call cut_at_stop()",
                code="stop_passed",
            )

    def check_text(self, special_ids: Collection[int], decode: Decode) -> None:
        """Compare the engine's own text, where it is given, with the text of the ids.

        Args:
            special_ids: control tokens, which engines leave out of their text.
            decode: ids to text, control tokens included.

        Raises:
            RecordError: tokens were lost or added on the way (`text`; vllm#27482, vllm#47616).
        """
        if self.text is not None:
            engine_text.check_text(
                self.text,
                self.output_ids.tolist(),
                stop_id=self.stop_id,
                stop_string=self.stop_string,
                special_ids=special_ids,
                decode=decode,
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
        return self._part(len(prompt), len(self.output_ids), "echo_removed", {"text": None})

    def cut_at_stop(self, stop_ids: Collection[int], decode: Decode | None = None) -> GenerationRecord:
        """The record without the ids after its first stop; unchanged if there are none, or no stop is found.

        What is cut was sampled after the turn had ended, so it was not seen by the agent and has no part in
        the turn. `text` and `completion_tokens`, which may count it, are not compared any more. Counted as
        `cut_at_stop`.

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
            seen = len(self.prompt_ids) + end
            change["routed_experts"] = head(rows, max(seen - 1 - self.routed_start, 0))
        return self._part(0, end, "cut_at_stop", {**change, "completion_tokens": None, "text": None})

    def as_cut_off(self) -> GenerationRecord:
        """The record of a turn that claims a stop which its ids do not hold, as one that was cut off.

        The conversation then closes the turn with tokens of its own, loss mask 0: a stop token that the
        engine sampled and threw away has no log-probability, and is not invented. Unchanged unless the finish
        reason is `stop` without a `stop_id`. Counted as `stop_not_sampled`.
        """
        if self.finish_reason != "stop" or self.stop_id is not None:
            return self
        change: dict[str, Any] = {"finish_reason": "length", "stop_string": None}
        return self._part(0, len(self.output_ids), "stop_not_sampled", change)

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
