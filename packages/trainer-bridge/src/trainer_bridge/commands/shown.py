"""A message, a record or a dead letter as lines for people and as an object for scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from token_tracking.sample import Sample

from trainer_bridge.bundle import split
from trainer_bridge.codec import Frames, decode_data
from trainer_bridge.commands.output import plain
from trainer_bridge.dead_letters import DeadLetter
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import decode_head
from trainer_bridge.messages import Bundle, DataHead, Message
from trainer_bridge.payload import Array, Buffer

FIRST = 8
"""Elements shown of each array."""

Shown = tuple[list[str], dict[str, object], bool]


def summary_of(number: int, frames: Frames) -> Shown:
    """One line for a record, and whether it is damaged."""
    try:
        head = decode_head(frames.head)
        if not isinstance(head, DataHead):
            text = f"record {number}: a {type(head).__name__}, not a sample"
            return [text], {"event": "record", "record": number, "kind": type(head).__name__}, True
        samples = decode_data(head, frames.payload).samples
    except ProtocolError as error:
        text = f"record {number}: DAMAGED {error}"
        return [text], {"event": "record", "record": number, "fault": str(error)}, True
    rewards = ", ".join("-" if sample.reward is None else f"{sample.reward:.3g}" for sample in samples)
    tokens = sum(len(sample) for sample in samples)
    line = (
        f"record {number}: rollout {head.rollout_id.hex()} attempt {head.attempt}, {plain(head.task_id)}, "
        f"{len(samples)} parts, {tokens} tokens, reward {rewards}"
    )
    event: dict[str, object] = {
        "event": "record",
        "record": number,
        "rollout_id": head.rollout_id.hex(),
        "attempt": head.attempt,
        "task_id": head.task_id,
        "parts": len(samples),
        "tokens": tokens,
        "created_ns": head.created_ns,
    }
    return [line], event, False


def show_letter(letter: DeadLetter) -> Shown:
    """A dead letter; it is evidence of a fault, not a damaged file."""
    lines = [
        f"{_time(letter.at_ns)} {letter.reason} ({letter.times} times): {plain(letter.detail)}",
        f"    producer {letter.producer or '?'} epoch {letter.epoch} message {letter.sequence or '?'}, "
        f"rollout {letter.rollout_id or '?'} attempt {letter.attempt}",
    ]
    if letter.position:
        lines.append(f"    record {letter.position} of the store holds it")
    if letter.head:
        lines.append(f"    begins with {letter.head[:24].hex(' ')}")
    event: dict[str, object] = {
        **msgspec.structs.asdict(letter),
        "event": "letter",
        "head": letter.head.hex(),
    }
    return lines, event, False


def show_frames(frames: Sequence[Buffer]) -> Shown:
    """A message from its frames: every field of the head, the array table, the first elements."""
    try:
        head = decode_head(frames[0])
    except ProtocolError as error:
        line = f"DAMAGED head of {len(frames[0])} bytes: {error}"
        return [line], {"event": "message", "fault": str(error)}, True
    lines = [f"{type(head).__name__.removesuffix('Head').upper()}, head of {len(frames[0])} bytes"]
    lines += [f"  {name}: {value}" for name, value in _fields(head)]
    event: dict[str, object] = {
        "event": "message",
        "kind": type(head).__name__.removesuffix("Head").upper(),
        "head": _json_safe(msgspec.to_builtins(head, builtin_types=(bytes,))),
    }
    fault = ""
    if isinstance(head, DataHead):
        lines += _table(head)
        fault = _add_samples(head, frames, lines, event)
    elif isinstance(head, Bundle):
        fault = _add_items(head, frames, lines, event)
    elif len(frames) != 1:
        fault = f"{ErrorCode.WRONG_FRAME_COUNT.name.lower()}: {len(frames)} frames, 1 is right"
    if fault:
        lines.append(f"DAMAGED {fault}")
        event["fault"] = fault
    return lines, event, bool(fault)


def _add_samples(head: DataHead, frames: Sequence[Buffer], lines: list[str], event: dict[str, object]) -> str:
    """What the payload holds; returns what is wrong with it."""
    if len(frames) != 2:
        return f"{ErrorCode.WRONG_FRAME_COUNT.name.lower()}: {len(frames)} frames, 2 are right"
    try:
        samples = decode_data(head, frames[1]).samples
    except ProtocolError as error:
        return str(error)
    for sample in samples:
        lines += _sample(sample)
    event["tokens"] = [len(sample) for sample in samples]
    event["first_tokens"] = [sample.token_ids[:FIRST].tolist() for sample in samples]
    return ""


def _add_items(head: Bundle, frames: Sequence[Buffer], lines: list[str], event: dict[str, object]) -> str:
    """One line for each message of a bundle; returns what is wrong with it, or with one of them."""
    try:
        pairs = enumerate(split(head, frames), 1)
        items = [summary_of(number, Frames(bytes(first), second)) for number, (first, second) in pairs]
    except ProtocolError as error:
        return str(error)
    lines += [f"  {line}" for text, _, _ in items for line in text]
    event["items"] = [item for _, item, _ in items]
    damaged = sum(fault for _, _, fault in items)
    return f"{damaged} of its {len(items)} messages" if damaged else ""


def _fields(head: Message) -> list[tuple[str, str]]:
    values = msgspec.structs.asdict(head)
    if isinstance(head, DataHead):
        values = {k: v for k, v in values.items() if k not in ("arrays", "parts")}
    return [(name, _value(name, value)) for name, value in values.items()]


def _value(name: str, value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if name == "created_ns" and isinstance(value, int):
        return f"{value} ({_time(value)})"
    if name == "payload_hash":
        return f"{value:016x}"
    return plain(str(value))


def _json_safe(value: Any) -> Any:
    """Bytes as hex, and null for numbers that JSON does not have."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _json_safe(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json_safe(each) for each in cast("list[Any]", value)]
    return value


def _table(head: DataHead) -> list[str]:
    width = max((len(plain(entry.name)) for entry in head.arrays), default=0)
    return [
        f"  array {plain(entry.name).ljust(width)}  {plain(entry.dtype):>4}  {list(entry.shape)} at "
        f"{entry.offset}, {entry.nbytes} bytes"
        for entry in head.arrays
    ]


def _sample(sample: Sample) -> list[str]:
    lines = [
        f"  part {sample.part + 1} of {sample.parts}: {len(sample)} tokens, {sample.prompt_length} of the "
        f"prompt, {sample.trained_tokens} trained, reward {sample.reward}, {sample.status}, {sample.source}, "
        f"in_loss {sample.in_loss}, in_baseline {sample.in_baseline}, policy run {plain(sample.policy_run)!r}"
    ]
    lines += [
        f"    turn {turn.start} to {turn.end}: {turn.finish_reason}, logprobs {turn.logprob_kind}, "
        f"temperature {turn.temperature}, top_p {turn.top_p}, top_k {turn.top_k}, min_p {turn.min_p}, "
        f"reward {turn.reward}"
        for turn in sample.turns
    ]
    arrays: dict[str, Array] = {
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "logprobs": sample.logprobs,
        "versions": sample.versions,
    }
    lines += [f"    {name}: {_first(array)}" for name, array in arrays.items()]
    lines += _scalars("provenance", sample.provenance) + _scalars("extra", sample.extra)
    return lines


def _scalars(name: str, values: Mapping[str, object]) -> list[str]:
    return [f"    {name}: {plain(str(dict(values)))}"] if values else []


def _first(array: Array) -> str:
    text = " ".join(str(value) for value in array[:FIRST].tolist())
    return f"{text} …" if len(array) > FIRST else text or "(none)"


def _time(ns: int) -> str:
    # Whoever wrote the number may have written anything.
    seconds = min(max(ns // 1_000_000_000, 0), 253_402_300_799)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
