"""The single values of an engine's answer: exact Python values of the kind that each field needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast, get_args

from token_tracking.errors import RecordCode, RecordError
from token_tracking.sample import FinishReason, LogprobKind
from token_tracking.scalars import plain_float, plain_int, plain_text

_TEXT = frozenset({str})
_TEXT_OR_NONE = frozenset({str, type(None)})
_INT = frozenset({int})
_INT_OR_NONE = frozenset({int, type(None)})
_FLOAT_OR_NONE = frozenset({float, type(None)})

_ENDS = {
    **dict.fromkeys(("tool_calls", "function_call", "tool_use", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("eos", "eos_token", "stop_token", "stop_string"), "stop"),
    **dict.fromkeys(("max_tokens", "max_length", "max_new_tokens", "repetition"), "length"),
    **dict.fromkeys(("aborted", "cancel", "cancelled", "canceled", "interrupted"), "abort"),
}
"""Finish reasons of servers and engines (OpenAI, Anthropic, TGI, vLLM), and what they are here."""


class _Field(NamedTuple):
    name: str
    exact: frozenset[type]
    """Types that are held as they come."""
    plain: Callable[[object], object]
    """Gives the exact value; None: it has none."""
    code: RecordCode
    need: str


_NUMBER = "a number, or None for not known"
_COUNT = "the engine's count as an int, or None"
_STOP_ID = "the id of the sampled stop token, or None; vLLM's stop_reason is that, or text for stop_string"
_STOP_STRING = "the text of the stop string, or None"
_ENGINE_TEXT = "the engine's text as a str, or None"
_VERSION = "an int in 0..2**31-1, or -2"

_FIELDS = (
    _Field("stop_id", _INT_OR_NONE, plain_int, "stop_reason", _STOP_ID),
    _Field("stop_string", _TEXT_OR_NONE, plain_text, "stop_reason", _STOP_STRING),
    _Field("weight_version", _INT, plain_int, "version", _VERSION),
    _Field("temperature", _FLOAT_OR_NONE, plain_float, "sampling", _NUMBER),
    _Field("top_p", _FLOAT_OR_NONE, plain_float, "sampling", _NUMBER),
    _Field("top_k", _INT_OR_NONE, plain_int, "sampling", "an int, or None for not known"),
    _Field("min_p", _FLOAT_OR_NONE, plain_float, "sampling", _NUMBER),
    _Field("prompt_tokens", _INT_OR_NONE, plain_int, "counts", _COUNT),
    _Field("completion_tokens", _INT_OR_NONE, plain_int, "counts", _COUNT),
    _Field("text", _TEXT_OR_NONE, plain_text, "text", _ENGINE_TEXT),
    _Field("routed_start", _INT, plain_int, "routed_rows", "the position of the first row as an int"),
)
_EXACT = tuple(field.exact for field in _FIELDS)
_values = attrgetter("finish_reason", "logprob_kind", "repairs", *(field.name for field in _FIELDS))
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_KINDS: tuple[LogprobKind, ...] = get_args(LogprobKind)


def inexact(record: object) -> Iterator[tuple[str, Any]]:
    """Fields of a `GenerationRecord` whose value is not of an exact type, and the exact value.

    Raises:
        RecordError: a value is of another kind, or not one of the few that the field may have (`array`,
            `counts`, `finish_reason`, `logprob_kind`, `routed_rows`, `sampling`, `stop_reason`, `text`,
            `version`).
    """
    reason, kind, repairs, *others = _values(record)
    if type(reason) is not str or reason not in _REASONS:
        yield "finish_reason", _finish_reason(reason)
    if type(kind) is not str or kind not in _KINDS:
        yield "logprob_kind", _logprob_kind(kind)
    if type(repairs) is not tuple or repairs:
        yield "repairs", repair_names(cast("object", repairs))
    for index, (value, exact) in enumerate(zip(others, _EXACT, strict=True)):
        if type(value) not in exact:
            field = _FIELDS[index]
            plain = field.plain(value)
            if plain is None:
                raise RecordError(f"{field.name} is {value!r:.80}: need {field.need}", code=field.code)
            yield field.name, plain


def _finish_reason(value: object) -> FinishReason:
    text = plain_text(value)
    for name in _REASONS:
        if text == name:
            return name
    if text in _ENDS:
        hint = f"{text!r} is {_ENDS[text]!r} here"
    elif value is None:
        hint = "None is an answer that has not ended: take its last chunk, or pass 'abort' if it was cut off"
    elif isinstance(value, Mapping):
        hint = "SGLang's is a mapping: pass its 'type', and its 'matched' as stop_id or stop_string"
    elif text in ("error", "content_filter"):
        hint = f"with {text!r} the answer is not the model's alone: ask again"
    else:
        hint = "'stop' is a stop token or stop string, 'length' a limit, 'abort' a turn that was cut by us"
    raise RecordError(
        f"finish_reason is {value!r:.80}: need 'stop', 'length' or 'abort'; {hint}", code="finish_reason"
    )


def _logprob_kind(value: object) -> LogprobKind:
    text = plain_text(value)
    for name in _KINDS:
        if text == name:
            return name
    raise RecordError(
        f"logprob_kind is {value!r:.80}: need 'none', 'raw' or 'processed' (logprob_probe tells which)",
        code="logprob_kind",
    )


def repair_names(value: object) -> tuple[str, ...]:
    """Names of repairs as a record holds them.

    Raises:
        RecordError: they are no tuple or list of names (`array`).
    """
    given = cast("Sequence[object]", value if isinstance(value, (tuple, list)) else [None])
    found = [plain_text(name) for name in given]
    names = tuple(name for name in found if name is not None)
    if len(names) != len(found):
        raise RecordError(f"repairs are {value!r:.80}: need a tuple of names", code="array")
    return names
