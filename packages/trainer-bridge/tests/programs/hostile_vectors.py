"""Messages that must be refused, and with which code: for `make_vectors.py`."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from trainer_bridge.block_pool import BlockPool
from trainer_bridge.bundle import join
from trainer_bridge.codec import Frames, decode_data, draft
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import KINDS, ArrayEntry, Bundle, Bye, DataHead, Kind, Message
from trainer_bridge.payload import Array, pack, unpack
from trainer_bridge.testing import make_sample


class Hostile(NamedTuple):
    """Frames, and the name of the rule that they break."""

    error: str
    frames: list[bytes]
    after: str = ""
    """The HELLO after which they come, by its name among the good messages."""


def signed(start: bytes) -> bytes:
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start))


def resigned(head: bytes, at: int, value: int) -> bytes:
    raw = bytearray(head[:-8])
    raw[at] = value
    return signed(bytes(raw))


def raw_head(kind: Kind, body: Any) -> bytes:
    """A head with any body at all."""
    return signed(struct.pack("<2sBBBBH", b"TB", 1, 0, kind, 0, 0) + msgspec.msgpack.encode(body))


def said_wrong(message: Message, **changes: Any) -> list[bytes]:
    """A message with fields of any value and type."""
    fields = {**msgspec.structs.asdict(message), **changes}
    return [raw_head(KINDS[type(message)], list(fields.values()))]


def of_frames(good: Frames) -> dict[str, Hostile]:
    """Wrong before the body is looked at."""
    head, payload = good.head, bytes(good.payload)
    return {
        "no-frames": Hostile("wrong_frame_count", []),
        "empty-head": Hostile("short_head", [b"", payload]),
        "short-head": Hostile("short_head", [head[:15], payload]),
        "bad-magic": Hostile("bad_magic", [resigned(head, 0, ord("X")), payload]),
        "wrong-major": Hostile("wrong_major", [resigned(head, 2, 2), payload]),
        "unknown-kind": Hostile("unknown_kind", [resigned(head, 4, 99), payload]),
        "flags": Hostile("unknown_kind", [resigned(head, 5, 1), payload]),
        "reserved": Hostile("unknown_kind", [resigned(head, 7, 1), payload]),
        "cut-head": Hostile("bad_head_hash", [head[:-1], payload]),
        "flipped-head": Hostile("bad_head_hash", [head[:20] + bytes([head[20] ^ 1]) + head[21:], payload]),
        "one-frame": Hostile("wrong_frame_count", [head]),
        "three-frames": Hostile("wrong_frame_count", [head, payload, b""]),
        "bye-with-a-payload": Hostile("wrong_frame_count", [encode_head(Bye(1, "")), payload]),
    }


def of_bodies(good: Frames, messages: Mapping[str, Message]) -> dict[str, Hostile]:
    """Heads of every kind whose bodies break a rule of the table."""
    head, payload = good.head, bytes(good.payload)
    data = decode_head(head)
    skipped = signed(b"TB\x01\x00\x07\0\0\0" + b"\x93\x01\xa0" + b"\x91" * 50_000 + b"\xc0")
    found = {
        "body-not-msgpack": [signed(head[:8] + b"\xc1"), payload],
        "body-not-an-array": [raw_head(Kind.DATA, {"schema": 1}), payload],
        "body-and-more": [signed(head[:-8] + b"\xc0"), payload],
        "wrong-types": [raw_head(Kind.DATA, ["sample/1"] * 13), payload],
        "depth-bomb": [signed(head[:8] + b"\x91" * 50_000 + b"\xc0"), payload],
        "text-not-utf8": [signed(b"TB\x01\x00\x07\0\0\0" + b"\x92\x01\xa2\xc3\x28")],
    }
    for name, changes in {
        "data-id-short": {"rollout_id": b"15 bytes only.."},
        "data-id-text": {"producer": "sixteen letters."},
        "data-no-parts": {"parts": ()},
        "data-sequence-beyond-63-bits": {"sequence": 2**63},
        "data-attempt-negative": {"attempt": -1},
        "data-epoch-beyond-32-bits": {"epoch": 2**32},
        "data-schema-long": {"schema": "s" * 65},
        "data-group-size-negative": {"group_size": -1},
        "data-group-size-absurd": {"group_size": 65_537},
        "data-array-name-long": {"arrays": [["0/" + "x" * 63, "i4", [0], 0, 0]]},
        "data-dtype-long": {"arrays": [["0/token_ids", "int32____", [0], 0, 0]]},
    }.items():
        found[name] = [*said_wrong(data, **changes), payload]
    kinds = {type(message).__name__.lower(): message for message in messages.values()}
    for name, changes in BODIES.items():
        found[name] = said_wrong(kinds[name.split(".")[0]], **changes)
    for kind in Kind:
        found[f"{kind.name.lower()}.empty"] = [raw_head(kind, [])]
    bad = {name: Hostile("bad_body", frames) for name, frames in found.items()}
    return {**bad, "depth-bomb-in-what-is-skipped": Hostile("too_deep", [skipped])}


WIDE = 2**63
BODIES: dict[str, dict[str, Any]] = {
    "hello.name-long": {"name": "w" * 257},
    "hello.session-negative": {"session": -1},
    "hello.session-beyond-63-bits": {"session": WIDE},
    "hello.role-unknown": {"role": "king"},
    "hello.peer-short": {"peer": bytes(15)},
    "hello.minor-beyond-8-bits": {"minor_max": 256},
    "hello.schemas-many": {"schemas": [["s", 1]] * 65},
    "hello.schema-long": {"schemas": [["s" * 65, 1]]},
    "hello.schema-without-hash": {"schemas": [["sample/1"]]},
    "hello.features-many": {"features": ["f"] * 65},
    "hello.epoch-beyond-32-bits": {"epoch": 2**32},
    "hello.stream-beyond-64-bits": {"streams": [[1, 2**64 - 1]]},
    "hello.start-negative": {"starts": [-1]},
    "hello.streams-many": {"streams": [[n, 1] for n in range(4097)]},
    "welcome.receiver-short": {"receiver": bytes(15)},
    "welcome.window-negative": {"window": -1},
    "welcome.window-beyond-32-bits": {"window": 2**32},
    "welcome.feature-a-number": {"features": [1]},
    "welcome.acks-a-number": {"acks": 7},
    "ack.levels-a-map": {"levels": {"1": 2}},
    "ack.range-of-three": {"levels": [[1, [0, [[1, 2, 3]]], [0, []], [0, []]]]},
    "ack.upto-negative": {"levels": [[1, [-1, []], [0, []], [0, []]]]},
    "ack.level-missing": {"levels": [[1, [0, []]]]},
    "control.run-state-unknown": {"run_state": "stop"},
    "control.version-below-none": {"weights_version": -2},
    "control.version-beyond-31-bits": {"min_version": 2**31},
    "control.policy-run-long": {"policy_run": "p" * 257},
    "control.location-long": {"weights_location": "/" * 2049},
    "credit.limit-beyond-63-bits": {"sequence_limit": WIDE},
    "credit.bytes-negative": {"byte_limit": -1},
    "bye.reason-long": {"reason": "r" * 1001},
    "bye.session-nil": {"session": None},
    "error.code-beyond-16-bits": {"code": 65_536},
    "error.text-long": {"text": "t" * 1001},
    "error.sequence-negative": {"sequence": -1},
    "report.generation-negative": {"generation": -1},
    "report.unsettled-beyond-63-bits": {"unsettled": WIDE},
    "report.sequence-text": {"last_sequence": "300"},
    "report.hole-of-two": {"holes": [[1, 5]]},
    "report.holes-many": {"holes": [[1, 2 * n, 2 * n] for n in range(1, 258)]},
    "ask.rank-negative": {"rank": -1},
    "ask.world-beyond-32-bits": {"world": 2**32},
    "ask.groups-text": {"groups": "8"},
    "share.group-id-short": {"groups": [[bytes(15), 1, True, []]]},
    "share.group-cut": {"groups": [[bytes(16), 1]]},
    "share.rollout-empty": {"groups": [[bytes(16), 1, True, [[]]]]},
    "ready.step-negative": {"step": -1},
    "verdict.verdict-unknown": {"verdict": "maybe"},
    "verdict.reason-long": {"reason": "r" * 1001},
    "done.committed-a-number": {"committed": 1},
    "done.reason-nil": {"reason": None},
    "status.metric-text": {"metrics": {"queued": "3"}},
    "status.metric-without-name": {"metrics": {1: 3.0}},
    "status.producer-cut": {"producers": [["w", bytes(16), "connected", 3, 253]]},
    "status.credit-negative": {"producers": [["w", bytes(16), "connected", 3, -1, 17]]},
}
"""Kind, and what is wrong about it -> the fields that are changed."""


def of_tables(good: Frames) -> dict[str, Hostile]:
    """DATA whose array table or payload is wrong."""
    head, payload = good.head, bytes(good.payload)
    body = decode_head(head)
    assert isinstance(body, DataHead)
    first, *rest = body.arrays

    def with_head(**changes: Any) -> list[bytes]:
        return [encode_head(msgspec.structs.replace(body, **changes)), payload]

    def with_entry(**changes: Any) -> list[bytes]:
        entry: ArrayEntry = msgspec.structs.replace(first, **changes)
        return with_head(arrays=(entry, *rest))

    def with_more(entry: ArrayEntry, **changes: Any) -> list[bytes]:
        return with_head(arrays=(*body.arrays, msgspec.structs.replace(entry, **changes)))

    overlapping = (first, msgspec.structs.replace(rest[0], offset=0), *rest[1:])
    longer = payload + bytes(64)
    left_over = msgspec.structs.replace(
        body, payload_nbytes=len(longer), payload_hash=xxhash.xxh3_64_intdigest(longer)
    )
    twice = with_more(first, offset=(len(payload) + 63) // 64 * 64, nbytes=0, shape=(0,))
    return {
        "unknown-schema": Hostile("unknown_schema", with_head(schema="sample/2")),
        "cut-payload": Hostile("bad_payload_length", [head, payload[:-1]]),
        "long-payload": Hostile("bad_payload_length", [head, payload + b"\0"]),
        "flipped-payload": Hostile("bad_payload_hash", [head, bytes([payload[0] ^ 1]) + payload[1:]]),
        "unknown-dtype": Hostile("unknown_dtype", with_entry(dtype="O")),
        "pickle-dtype": Hostile("unknown_dtype", with_entry(dtype="pickle")),
        "shape-mismatch": Hostile("bad_shape", with_entry(shape=(7,))),
        "shape-overflow": Hostile("bad_shape", with_entry(shape=(2**62, 2**62), nbytes=24)),
        "shape-negative": Hostile("bad_shape", with_entry(shape=(-6,), nbytes=24)),
        "nine-dimensions": Hostile("bad_shape", with_entry(shape=(1,) * 8 + (6,))),
        "offset-past-end": Hostile("bad_offset", with_entry(offset=1 << 40)),
        "offset-not-aligned": Hostile("bad_offset", with_entry(offset=4)),
        "offset-negative": Hostile("bad_offset", with_entry(offset=-64)),
        "offset-overlaps": Hostile("bad_offset", with_head(arrays=overlapping)),
        "duplicate-array": Hostile("duplicate_array", twice),
        "missing-array": Hostile("missing_array", with_head(arrays=tuple(rest))),
        "unknown-array": Hostile("unknown_array", with_more(rest[-1], name="0/surprise")),
        "bytes-left-over": Hostile("bad_payload_length", [encode_head(left_over), longer]),
    }


def of_samples(good: Frames) -> dict[str, Hostile]:
    """DATA that is whole, and whose first or second part is no sample."""
    body = decode_head(good.head)
    assert isinstance(body, DataHead)
    arrays = dict(unpack(body.arrays, good.payload))
    decode_data(body, good.payload)  # before it is changed it is one

    def with_part(**changes: Any) -> list[bytes]:
        parts = (msgspec.structs.replace(body.parts[0], **changes), *body.parts[1:])
        return [encode_head(msgspec.structs.replace(body, parts=parts)), bytes(good.payload)]

    def with_turn(**changes: Any) -> list[bytes]:
        return with_part(turns=(msgspec.structs.replace(body.parts[0].turns[0], **changes),))

    def with_arrays(changes: Mapping[str, Array | None]) -> list[bytes]:
        changed = {**arrays, **changes}
        table, payload = pack([(name, array) for name, array in changed.items() if array is not None])
        head = msgspec.structs.replace(
            body,
            arrays=table,
            payload_nbytes=len(payload),
            payload_hash=xxhash.xxh3_64_intdigest(payload),
        )
        return [encode_head(head), bytes(payload)]

    def with_value(field: str, at: int, value: float) -> list[bytes]:
        array = arrays[field].copy()
        array[at] = value
        return with_arrays({field: array})

    ids, offsets = arrays["1/kept_ids"], arrays["1/kept_offsets"]
    turn = body.parts[0].turns[0]
    found = {
        "mask-without-version": with_part(turns=()),
        "prompt-too-long": with_part(prompt_length=99),
        "prompt-negative": with_part(prompt_length=-1),
        "prompt-before-the-first-turn": with_part(prompt_length=2),
        "turns-overlap": with_part(turns=(turn, turn)),
        "turn-ends-before-it-starts": with_turn(start=5, end=3),
        "turn-past-the-end": with_turn(end=7),
        "turn-of-nothing-recorded": with_turn(logprob_kind="none"),
        "turn-reward-infinite": with_turn(reward=np.inf),
        "reward-not-a-number": with_part(reward=np.nan),
        "lengths-differ": with_arrays({"0/loss_mask": arrays["0/loss_mask"][:-1]}),
        "tokens-two-dimensional": with_arrays({"0/token_ids": arrays["0/token_ids"].reshape(2, 3)}),
        "tokens-a-scalar": with_arrays({"0/token_ids": arrays["0/token_ids"][0].reshape(())}),
        "tokens-of-64-bits": with_arrays({"0/token_ids": arrays["0/token_ids"].astype(np.int64)}),
        "token-negative": with_value("0/token_ids", 0, -1),
        "mask-of-2": with_value("0/loss_mask", 3, 2),
        "version-below-unknown": with_value("0/versions", 3, -3),
        "version-without-a-turn": with_value("0/versions", 0, 7),
        "logprob-positive": with_value("0/logprobs", 4, 0.25),
        "logprob-infinite": with_value("0/logprobs", 4, np.inf),
        "logprob-minus-infinite": with_value("0/logprobs", 4, -np.inf),
        "kept-offsets-fall": with_arrays({"1/kept_offsets": np.array([0, 5, 3], offsets.dtype)}),
        "kept-offsets-start-late": with_arrays({"1/kept_offsets": np.array([1, 1, 3], offsets.dtype)}),
        "kept-offsets-past-the-end": with_arrays({"1/kept_offsets": np.array([0, 0, 4], offsets.dtype)}),
        "kept-offsets-short": with_arrays({"1/kept_offsets": np.array([0, 3], offsets.dtype)}),
        "kept-offsets-of-32-bits": with_arrays({"1/kept_offsets": offsets.astype(np.int32)}),
        "kept-ids-alone": with_arrays({"1/kept_offsets": None}),
        "kept-offsets-alone": with_arrays({"1/kept_ids": None}),
        "kept-ids-a-scalar": with_arrays({"1/kept_ids": ids[0].reshape(())}),
        "kept-ids-two-dimensional": with_arrays({"1/kept_ids": ids.reshape(3, 1)}),
        "experts-of-every-token": with_arrays({"1/routed_experts": np.zeros((2, 3, 2), np.int16)}),
        "experts-flat": with_arrays({"1/routed_experts": np.zeros(6, np.int16)}),
        "experts-of-floats": with_arrays({"1/routed_experts": np.zeros((1, 3, 2), np.float32)}),
        "experts-of-truths": with_arrays({"1/routed_experts": np.zeros((1, 3, 2), np.bool_)}),
    }
    return {name: Hostile("bad_sample", frames) for name, frames in found.items()}


def of_places(producer: bytes) -> dict[str, Hostile]:
    """DATA that is good, but not from this peer, or not at this place: after the HELLO `hello`."""
    rollout = draft([make_sample(1, tokens=8)])

    def at(who: bytes, epoch: int, sequence: int) -> list[bytes]:
        frames = rollout.numbered(who, epoch, sequence, 0)
        return [frames.head, bytes(frames.payload)]

    return {
        "sequence-zero": Hostile("bad_sequence", at(producer, 2, 0), "hello"),
        "beyond-its-epoch": Hostile("bad_sequence", at(producer, 1, 8), "hello"),
        "epoch-not-named": Hostile("bad_sequence", at(producer, 3, 1), "hello"),
        "another-producer": Hostile("wrong_role", at(bytes(16), 2, 9), "hello"),
        "data-of-an-observer": Hostile("wrong_role", at(producer, 2, 9), "hello-observer"),
    }


def of_bundles(items: list[Frames]) -> dict[str, Hostile]:
    """BUNDLEs that are refused whole."""
    frames = [bytes(frame) for frame in join(items, BlockPool())]
    head, body = frames
    table = [(each.head, len(each.payload)) for each in items]

    def listed(table: Any, body: bytes = body) -> list[bytes]:
        return [raw_head(Kind.BUNDLE, [table]), body]

    short = [table[0], (table[1][0], table[1][1] - 64)]
    return {
        "bundle-of-one-frame": Hostile("wrong_frame_count", [head]),
        "bundle-of-three-frames": Hostile("wrong_frame_count", [head, body, b""]),
        "bundle-of-nothing": Hostile("bad_body", listed([], b"")),
        "bundle-of-65": Hostile("bad_body", listed([(b"", 0)] * 65, b"")),
        "bundle-size-negative": Hostile("bad_body", listed([(b"", -64)], b"")),
        "bundle-size-beyond-32-bits": Hostile("bad_body", listed([(b"", 2**32)])),
        "bundle-size-alone": Hostile("bad_body", listed([(64,)])),
        "bundle-head-of-text": Hostile("bad_body", listed([("head", 0)], b"")),
        "bundle-body-cut": Hostile("bad_payload_length", [head, body[:-64]]),
        "bundle-body-long": Hostile("bad_payload_length", [head, body + bytes(64)]),
        "bundle-table-short": Hostile("bad_payload_length", listed(short)),
        "bundle-table-cut": Hostile("bad_payload_length", listed(table[:1])),
    }


def odd_bundle(items: list[Frames], others: list[bytes]) -> tuple[list[bytes], list[str | None]]:
    """A BUNDLE that is good, of messages that are not; and what each is refused as (None: it is good)."""
    flipped = bytes([items[0].payload[0] ^ 1]) + bytes(items[0].payload[1:])
    nested = encode_head(Bundle(((b"", 0),)))
    inside = [
        (items[0], None),
        (Frames(items[0].head, flipped), "bad_payload_hash"),
        (Frames(items[0].head[:-1], items[0].payload), "bad_head_hash"),
        (Frames(b"", b""), "short_head"),
        (Frames(nested, bytes(64)), "unknown_kind"),
        *((Frames(other, b""), "unknown_kind") for other in others),
        (items[1], None),
    ]
    frames = join([frames for frames, _ in inside], BlockPool())
    return [bytes(frame) for frame in frames], [error for _, error in inside]
