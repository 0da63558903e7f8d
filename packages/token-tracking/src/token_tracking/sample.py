"""`Sample`: the one record that reaches a trainer. It needs numpy and msgspec, nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.errors import MissingLogprobsError, SampleError
from token_tracking.kept import KeptSets, truncated
from token_tracking.sample_arrays import check_channels, read_only_view, require_array
from token_tracking.sample_fields import (
    NUMBER_OR_NONE,
    TEXT,
    TRUTH,
    WHOLE,
    WHOLE_OR_NONE,
    hold_exact,
    one_of,
)

Scalar = str | int | float | bool | None
Status = Literal["completed", "truncated", "aborted", "failed"]
Source = Literal["sampled", "replayed"]
LogprobKind = Literal["none", "raw", "processed"]
FinishReason = Literal["stop", "length", "abort"]

NOT_SAMPLED = -1
"""Weight version of a token that no model sampled (prompt, template, tool output)."""
UNKNOWN_VERSION = -2
"""Weight version of a token that was sampled under weights whose version is not known."""
MAX_VERSION = 2**31 - 1


def is_version(value: object) -> bool:
    """Whether a value can be the weight version of a sampled token: an int in 0..2**31-1, or -2."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        return False
    return int(value) == UNKNOWN_VERSION or 0 <= int(value) <= MAX_VERSION


_HEX_ID = re.compile(r"[0-9a-f]{32}\Z")
_TURN_FIELDS = {
    **dict.fromkeys(("start", "end"), WHOLE),
    "finish_reason": one_of(get_args(FinishReason)),
    "logprob_kind": one_of(get_args(LogprobKind)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "reward"), NUMBER_OR_NONE),
    "top_k": WHOLE_OR_NONE,
}
_SAMPLE_FIELDS = {
    **dict.fromkeys(("rollout_id", "group_id", "task_id", "policy_run"), TEXT),
    **dict.fromkeys(("attempt", "part", "parts", "prompt_length"), WHOLE),
    **dict.fromkeys(("in_loss", "in_baseline"), TRUTH),
    "reward": NUMBER_OR_NONE,
    "status": one_of(get_args(Status)),
    "source": one_of(get_args(Source)),
}


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled span of a sample: what the model produced in one assistant turn."""

    start: int
    """First token of the span, an index into the sample's arrays."""
    end: int
    """One past the last token of the span."""
    finish_reason: FinishReason
    """Why the engine stopped: a stop token, a length limit, or an abort."""
    logprob_kind: LogprobKind
    """Which distribution the log-probabilities belong to. `none`: not recorded, they are NaN. `raw`: the
    model's own softmax. `processed`: after temperature, and over the kept ids where sampling was truncated
    (SGLang's `output_token_sampling_logprobs`; its default is over all ids). `logprob_probe` tells."""
    temperature: float | None = None
    """None: not known, or the turn was not sampled from a model."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    reward: float | None = None
    """Reward of this turn alone. None: no turn reward was given."""

    def __post_init__(self) -> None:
        hold_exact(self, _TURN_FIELDS)

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Parameters that could truncate, and are not known."""
        values = (("top_p", self.top_p), ("top_k", self.top_k), ("min_p", self.min_p))
        return tuple(name for name, value in values if value is None)

    @property
    def truncated(self) -> bool:
        """Whether `top_p`, `top_k` or `min_p` cut the vocabulary that its tokens were chosen from."""
        return truncated(self.top_p, self.top_k, self.min_p)


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One training sample: a part of a rollout as flat, equally long per-token arrays.

    `token_ids`, `loss_mask`, `logprobs` and `versions` all have shape `[n]`. The sample holds
    read-only views of the arrays it is given, without a copy; a sample that contradicts itself cannot be
    built (`SampleError`).
    """

    rollout_id: str
    """32 hex characters, minted at admission; kept over abort, park and resume."""
    group_id: str
    """32 hex characters. Rollouts of one prompt share it (GRPO group)."""
    attempt: int = 0
    """Restarts of the rollout from scratch, from zero."""
    part: int = 0
    """This sample is part `part` (from zero) of the rollout's `parts` samples."""
    parts: int = 1
    task_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    """1 where the token was sampled and is to be trained on in this sample, else 0."""
    logprobs: npt.NDArray[np.float32]
    """NaN where no log-probability was recorded; never a sentinel."""
    versions: npt.NDArray[np.int32]
    """Weight version of each sampled token; -1: not sampled, -2: sampled under an unknown version."""
    prompt_length: int
    """Tokens before the first sampled token."""
    turns: tuple[Turn, ...]
    """The sampled spans in order, without overlap."""
    reward: float | None
    """Reward of the whole rollout. None: not graded (never a stand-in for an infrastructure failure)."""
    in_loss: bool = True
    """False: evidence only, the sample must not contribute to the loss."""
    in_baseline: bool = True
    """False: the rollout's reward must not enter its group's mean and deviation."""
    status: Status
    source: Source
    """`replayed`: the turns come from a recording. Good for supervised training, refused where a ratio is
    needed."""
    policy_run: str = ""
    """Names the training run that counts the weight versions. Empty: no policy (replayed)."""
    kept_ids: npt.NDArray[np.int32] | None = None
    """Vocabulary ids that truncated sampling kept, for all sampled tokens one after the other. None: not
    truncated."""
    kept_offsets: npt.NDArray[np.int64] | None = None
    """Shape `[n + 1]`: token i kept `kept_ids[kept_offsets[i]:kept_offsets[i + 1]]`."""
    routed_experts: npt.NDArray[np.integer] | None = None
    """Shape `[n - 1, layers, top_k]`: row i routed token i when it was read to predict token i + 1. None: not
    recorded."""
    provenance: Mapping[str, Scalar] = {}
    """What produced the sample: engine, template program, tokenizer, grader, and their versions."""
    extra: Mapping[str, Scalar] = {}
    """The user's own values; carried, never read."""

    def __post_init__(self) -> None:
        hold_exact(self, _SAMPLE_FIELDS)
        _check_identity(self)
        sampled = _check_arrays(self)
        _check_turns(self, sampled)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def key(self) -> tuple[str, int, int]:
        """`(rollout_id, attempt, part)`: what deduplication goes by."""
        return (self.rollout_id, self.attempt, self.part)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with loss mask 1."""
        return int(np.count_nonzero(self.loss_mask))

    def require_logprobs(self) -> None:
        """Raise unless every trained token carries a log-probability of a live policy.

        Call it before a ratio (PPO, GRPO, importance weights) is computed.

        Raises:
            MissingLogprobsError: the sample is replayed, a trained token's log-probability is NaN, a turn
                does not say how it was sampled (an engine's default may truncate unasked), or a trained token
                was chosen from a truncated vocabulary that the sample does not carry: whatever
                its log-probability says, its id was drawn from another distribution (trl#6789). With kept
                sets, `kept.logprobs` gives the trainer's number over them; log-probabilities that the engine
                did not normalise over them (`raw`) are to be computed again in the same way, with the weights
                that sampled.
        """
        if self.source == "replayed":
            raise MissingLogprobsError(
                f"rollout {self.rollout_id} was replayed from a recording: its tokens were not sampled by "
                "the policy under training; use it for supervised training, or run against a real engine"
            )
        missing = int(np.count_nonzero(np.isnan(self.logprobs[self.loss_mask == 1])))
        if missing:
            raise MissingLogprobsError(
                f"rollout {self.rollout_id}: {missing} of {self.trained_tokens} trained tokens have no "
                "log-probability; ask the engine for logprobs, or use the sample for supervised training only"
            )
        for index, turn in enumerate(self.turns):
            if turn.truncated or turn.unsaid:
                self._require_kept_sets(index, turn)

    def _require_kept_sets(self, index: int, turn: Turn) -> None:
        trained = self.loss_mask[turn.start : turn.end] == 1
        if self.kept_offsets is not None:
            trained = trained & (np.diff(self.kept_offsets[turn.start : turn.end + 1]) == 0)
        if not bool(np.any(trained)):
            return
        if not turn.truncated:
            raise MissingLogprobsError(
                f"rollout {self.rollout_id}, turn {index}: it is not known whether sampling was truncated "
                f"({', '.join(turn.unsaid)} not recorded; an engine may take them from the model's "
                "generation config). Send them with every request, and record what was sent: top_p=1, "
                "top_k=-1, min_p=0 keep the whole vocabulary"
            )
        raise MissingLogprobsError(
            f"rollout {self.rollout_id}, turn {index}: sampled with top_p={turn.top_p}, "
            f"top_k={turn.top_k}, min_p={turn.min_p}, and {int(np.count_nonzero(trained))} of its "
            "trained tokens come without the ids that were kept. They were drawn from the kept ids "
            f"alone, {_OFF[turn.logprob_kind]}: a ratio would be off by the kept mass (trl#6789). Sample "
            "with top_p=1, top_k=-1, min_p=0; or ask the engine for its sampling mask (SGLang "
            "return_sampling_mask, vLLM sampling_mask) and record it as kept_ids and kept_offsets; or "
            "use the sample for supervised training only"
        )

    @property
    def kept(self) -> KeptSets | None:
        """`kept_ids` and `kept_offsets`; None: no token was truncated."""
        if self.kept_ids is None or self.kept_offsets is None:
            return None
        return KeptSets(self.kept_ids, self.kept_offsets)


_OFF = {
    "none": "and have no log-probabilities",
    "raw": "their log-probabilities are over the whole vocabulary",
    "processed": "a trainer's log-probabilities are over the whole vocabulary",
}
_FLAT = (
    ("token_ids", np.dtype(np.int32)),
    ("loss_mask", np.dtype(np.uint8)),
    ("logprobs", np.dtype(np.float32)),
    ("versions", np.dtype(np.int32)),
)
_OPTIONAL = ("kept_ids", "kept_offsets", "routed_experts")


def _hold_read_only(sample: Sample, name: str, array: npt.NDArray[Any]) -> None:
    if array.flags.writeable:
        msgspec.structs.force_setattr(sample, name, read_only_view(array))


def _check_identity(s: Sample) -> None:
    for name, value in (("rollout_id", s.rollout_id), ("group_id", s.group_id)):
        if not _HEX_ID.match(value):
            raise SampleError(f"{name} must be 32 lower-case hex characters, got {value!r}")
    if not (s.attempt >= 0 and 0 <= s.part < s.parts):
        raise SampleError(
            f"attempt {s.attempt}, part {s.part} of {s.parts}: need attempt >= 0 and 0 <= part < parts"
        )
    if s.reward is not None and not math.isfinite(s.reward):
        raise SampleError(f"reward must be finite or None (not graded), got {s.reward}")


def _check_arrays(s: Sample) -> npt.NDArray[np.bool_]:
    """Returns which tokens have a weight version."""
    n = -1
    for (name, dtype), array in zip(_FLAT, (s.token_ids, s.loss_mask, s.logprobs, s.versions), strict=True):
        require_array(name, array)
        if array.dtype != dtype or array.ndim != 1:
            raise SampleError(f"{name} must be a flat {dtype} array, got {array.dtype} {array.shape}")
        if n < 0:
            n = len(array)
        elif len(array) != n:
            raise SampleError(f"{name} has {len(array)} entries for {n} tokens")
        _hold_read_only(s, name, array)
    if s.kept_ids is not None or s.kept_offsets is not None or s.routed_experts is not None:
        for name, array in zip(_OPTIONAL, (s.kept_ids, s.kept_offsets, s.routed_experts), strict=True):
            if array is not None:
                require_array(name, array)
                _hold_read_only(s, name, array)
        check_channels(s.kept_ids, s.kept_offsets, s.routed_experts, n)
    return _check_values(s, n)


def _check_values(s: Sample, n: int) -> npt.NDArray[np.bool_]:
    # A reduction called by name costs half of what the array's own method does.
    if n and np.minimum.reduce(s.token_ids) < 0:
        raise SampleError("token_ids must not be negative")
    if n and np.minimum.reduce(s.versions) < UNKNOWN_VERSION:
        raise SampleError("versions must be >= -2 (-1: not sampled, -2: unknown)")
    # One pass for two rules: every value of the mask is at most 1, and 0 where nothing was sampled.
    sampled = s.versions != NOT_SAMPLED
    if np.count_nonzero(s.loss_mask > sampled.view(np.uint8)):
        if np.maximum.reduce(s.loss_mask) > 1:
            raise SampleError("loss_mask must hold only 0 and 1")
        raise SampleError(
            "a token with loss mask 1 has weight version -1 (not sampled): only sampled tokens are trained"
        )
    # fmin and fmax pass over NaN.
    if n and (np.fmax.reduce(s.logprobs) > 0 or np.fmin.reduce(s.logprobs) == -np.inf):
        raise SampleError("logprobs must be finite and <= 0, or NaN where none was recorded")
    return sampled


def _check_turns(s: Sample, sampled: npt.NDArray[np.bool_]) -> None:
    at = s.prompt_length
    n = len(s.token_ids)
    if not 0 <= at <= n:
        raise SampleError(f"prompt_length {at} lies outside 0..{n}")
    covered = np.zeros(n, dtype=bool)
    for i, turn in enumerate(s.turns):
        if not at <= turn.start < turn.end <= n:
            raise SampleError(f"turn {i} spans {turn.start}..{turn.end}: need {at} <= start < end <= {n}")
        at = turn.end
        covered[turn.start : turn.end] = True
        if turn.logprob_kind == "none" and not bool(np.all(np.isnan(s.logprobs[turn.start : turn.end]))):
            raise SampleError(f"turn {i} says logprobs: none, but carries log-probabilities")
        if turn.reward is not None and not math.isfinite(turn.reward):
            raise SampleError(f"turn {i}: reward must be finite or None, got {turn.reward}")
    if s.turns and s.turns[0].start != s.prompt_length:
        raise SampleError(
            f"prompt_length is {s.prompt_length}, but the first sampled token is {s.turns[0].start}"
        )
    if covered.tobytes() != sampled.tobytes():
        raise SampleError("a token is sampled (weight version other than -1) exactly where a turn covers it")
