"""Writes the golden vectors into a folder: `python make_vectors.py DIR`. The same bytes every time.

`index.json` lists them. A message has its frames as files, and what they mean or why they are refused;
arrays are given as the hex of their bytes, because JSON has no NaN. A frame that is too large for a file is
`{"hex": ..., "then_zeros_to": its length}`. What is refused only after a HELLO names it (`after`). A bundle
says what each of its messages is refused as, null: it is good.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hostile_vectors import (
    Hostile,
    odd_bundle,
    of_bodies,
    of_bundles,
    of_frames,
    of_places,
    of_samples,
    of_tables,
    signed,
)
from token_tracking.sample import Sample, Turn
from trainer_bridge.block_pool import BlockPool
from trainer_bridge.bundle import join
from trainer_bridge.codec import SCHEMA_HASH, Frames, draft
from trainer_bridge.config import MAX_HEAD_BYTES
from trainer_bridge.head import encode_head
from trainer_bridge.messages import (
    Ack,
    Bye,
    Control,
    Credit,
    Error,
    Hello,
    Levels,
    Message,
    Report,
    Status,
    Welcome,
    WireSet,
)
from trainer_bridge.payload import DTYPES, Bfloat16, pack
from trainer_bridge.rank_messages import (
    Ask,
    Done,
    Ready,
    Share,
    ShareGroup,
    ShareRemote,
    ShareRollout,
    ShareTotals,
    Verdict,
)
from trainer_bridge.segment import Segment
from trainer_bridge.testing import make_sample

PRODUCER, RECEIVER = bytes(range(16)), bytes(range(16, 32))
U63, U64 = 2**63 - 1, 2**64 - 1


def rich_rollout() -> tuple[Sample, ...]:
    """Three parts: NaN with payload bits and -0.0, every optional array, no tokens at all."""
    bits = np.array([0x7FC00000, 0x7FC00001, 0xFFC0BEEF, 0x80000000, 0xBF800000, 0x7FC00000], np.uint32)
    shared: dict[str, Any] = {
        "rollout_id": "00112233445566778899aabbccddeeff",
        "group_id": "ff" * 16,
        "attempt": 2,
        "parts": 3,
        "task_id": "pkg__repo-7 ünï",
        "status": "completed",
        "source": "sampled",
        "policy_run": "run-1",
    }
    turn = Turn(
        start=3,
        end=5,
        finish_reason="stop",
        logprob_kind="raw",
        temperature=1.0,
        top_p=0.95,
        top_k=-1,
        min_p=0.0,
        reward=0.5,
    )
    first = Sample(
        part=0,
        token_ids=np.array([1, 2, 3, 151643, 2**31 - 1, 0], np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1, 0], np.uint8),
        logprobs=bits.view(np.float32),
        versions=np.array([-1, -1, -1, 7, -2, -1], np.int32),
        prompt_length=3,
        turns=(turn,),
        reward=1.0,
        provenance={"engine": "sglang 0.5", "seed": U64, "low": -(2**63), "greedy": False, "none": None},
        extra={"weight": 0.1},
        **shared,
    )
    second = Sample(
        part=1,
        token_ids=np.array([5, 6], np.int32),
        loss_mask=np.array([0, 1], np.uint8),
        logprobs=np.array([np.nan, -0.25], np.float32),
        versions=np.array([-1, 8], np.int32),
        prompt_length=1,
        turns=(Turn(start=1, end=2, finish_reason="length", logprob_kind="processed"),),
        reward=None,
        in_loss=False,
        in_baseline=False,
        kept_ids=np.array([6, 9, 12], np.int32),
        kept_offsets=np.array([0, 0, 3], np.int64),
        routed_experts=np.arange(6, dtype=np.int16).reshape(1, 3, 2),
        **shared,
    )
    empty = Sample(
        part=2,
        token_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.uint8),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        prompt_length=0,
        turns=(),
        reward=-0.0,
        **shared,
    )
    return first, second, empty


def session_messages() -> dict[str, Message]:
    schemas = (("sample/1", SCHEMA_HASH),)
    share_group = ShareGroup(
        PRODUCER,
        4,
        True,
        (
            ShareRollout(RECEIVER, 0, "worker-3", False, 0, 1),
            ShareRollout(PRODUCER, 2, "worker-4", True, 2, None),
        ),
        (
            ShareRemote(bytes(16), 300, 0.5, True, (None, -0.25, 1.0)),
            ShareRemote(b"\xff" * 16, 0, None, False, ()),
        ),
    )
    levels = Levels(2, WireSet(7, ((9, 9), (11, 20))), WireSet(7), WireSet(3, ((5, 5),)))
    return {
        "hello": Hello(1, "producer", PRODUCER, "worker-3", 0, 0, schemas, (), 2, ((1, 4), (2, 9)), (1, 8)),
        "hello-observer": Hello(3, "observer", RECEIVER, "tail", 0, 0, schemas),
        "welcome": Welcome(1, RECEIVER, 0, "sample/1", (), 64, 1 << 29, "", (levels,), 264, 1 << 28),
        "ack-with-gaps": Ack(1, (levels,)),
        "control": Control(1, 1_700_000_000_000_000_001, "pause", 12, -1, "run-1", "s3://weights/12"),
        "control-drain": Control(1, 2, "drain", -1, -1),
        "credit-edges": Credit(U63, U63, 0),
        "bye": Bye(1, "closed"),
        "error": Error(1, 11, "the payload's bytes do not match the hash in the head", 2, 10),
        "report": Report(1, 5, 300, 17),
        "report-of-holes": Report(1, 5, 300, 17, ((1, 5, 5), (2, 12, 20))),
        "hello-rank": Hello(1, "rank", RECEIVER, "rank 3", 0, 0, schemas),
        "ask": Ask(1, 3, 8, 64, 16),
        "share": Share(
            1, 17, (share_group, ShareGroup(bytes(16), 4, False, ())), ShareTotals(1234, 9, 7, 3),
            ((512, 70_000), (), (1, 0, 64)),
        ),
        "share-of-nothing": Share(1, 18, ()),
        "ready": Ready(1, 17),
        "verdict-go": Verdict(1, 17, "go"),
        "verdict-aborted": Verdict(1, 17, "aborted", "rank 2 was lost in step 17"),
        "done": Done(1, 17, True),
        "done-given-back": Done(1, 17, False, "the loss was NaN"),
        "status": Status(
            1, {"queued": 3.0, "dropped_stale_total": 2.0}, (("worker-3", PRODUCER, "connected", 3, 253, 17),)
        ),
    }  # fmt: skip


def bundles(items: list[Frames]) -> dict[str, tuple[list[bytes], list[str | None]]]:
    """Name -> frames, and what each message is refused as (None: it is good)."""
    messages = session_messages()
    frames = [bytes(frame) for frame in join(items, BlockPool())]
    one = [bytes(frame) for frame in join(items[:1], BlockPool())]
    others = [encode_head(messages[name]) for name in ("hello", "bye", "credit-edges")]
    return {
        "bundle": (frames, [None] * len(items)),
        "bundle-of-one": (one, [None]),
        "bundle-with-strangers": odd_bundle(items, others),
    }


def hostile(good: Frames, items: list[Frames]) -> dict[str, Hostile]:
    messages = session_messages()
    return {
        **of_frames(good),
        **of_bodies(good, messages),
        **of_tables(good),
        **of_samples(good),
        **of_places(PRODUCER),
        **of_bundles(items),
    }


def plain(value: Any) -> Any:
    """A message as JSON: bytes as hex."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def meaning(sample: Sample) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in sample.__struct_fields__:
        value = getattr(sample, name)
        if isinstance(value, np.ndarray):
            little = value.astype(value.dtype.newbyteorder("<"))
            out[name] = {
                "dtype": little.dtype.str[1:],
                "shape": list(value.shape),
                "hex": little.tobytes().hex(),
            }
        else:
            out[name] = plain(value)
    return out


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "version": 1,
        "schema_hash": SCHEMA_HASH,
        "messages": {},
        "data": {},
        "bundles": {},
        "hostile": {},
    }

    def put(name: str, frames: list[bytes]) -> list[str]:
        files = [f"{name}.{i}.bin" for i in range(len(frames))]
        for file, frame in zip(files, frames, strict=True):
            (folder / file).write_bytes(frame)
        return files

    for name, message in session_messages().items():
        index["messages"][name] = {
            "frames": put(name, [encode_head(message)]),
            "kind": type(message).__name__.upper(),
            "body": plain(message),
        }
    later = signed(b"TB\x01\x05\x07\0\0\0" + msgspec.msgpack.encode([1, "closed", "later", {"deep": [1]}]))
    index["messages"]["bye-of-minor-5"] = {
        "frames": put("bye-of-minor-5", [later]),
        "kind": "BYE",
        "body": {"session": 1, "reason": "closed"},
    }
    for name, rollout, sequence, group_size in (
        ("data-rich", rich_rollout(), U63, 8),
        ("data-plain", (make_sample(1, tokens=16),), 1, 0),
    ):
        frames = draft(rollout, group_size=group_size).numbered(
            PRODUCER, 3, sequence, 1_700_000_000_000_000_000
        )
        index["data"][name] = {
            "frames": put(name, [frames.head, bytes(frames.payload)]),
            "producer": PRODUCER.hex(),
            "epoch": 3,
            "sequence": sequence,
            "created_ns": 1_700_000_000_000_000_000,
            "group_size": group_size,
            "samples": [meaning(sample) for sample in rollout],
        }
    good = draft(rich_rollout()).numbered(PRODUCER, 3, 1, 0)
    items = [draft([make_sample(n, tokens=8 * n)]).numbered(PRODUCER, 3, n, 0) for n in (1, 2, 3)]
    for name, (bundle, errors) in bundles(items).items():
        index["bundles"][name] = {"frames": put(name, bundle), "errors": errors}
    for name, bad in hostile(good, items).items():
        file = f"hostile-{name.replace('.', '-')}"
        index["hostile"][name] = {"frames": put(file, bad.frames), "error": bad.error, "after": bad.after}
    filled = {"hex": good.head[:64].hex(), "then_zeros_to": MAX_HEAD_BYTES + 1}
    index["hostile"]["too-large"] = {"frames": [filled], "error": "too_large", "after": ""}
    table, payload = pack(every_dtype())
    index["payloads"] = {
        "every-dtype": {
            "frames": put("payload-every-dtype", [bytes(payload)]),
            "table": [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes] for e in table],
            "hex": [bytes(payload[e.offset : e.offset + e.nbytes]).hex() for e in table],
        }
    }
    index["segments"] = segments(folder)
    (folder / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n")


def every_dtype() -> list[tuple[str, Any]]:
    """Two values, an empty array and a scalar of each; bfloat16 as 1.0, -0.0, infinity and a NaN."""
    arrays: list[tuple[str, Any]] = []
    for code, dtype in DTYPES.items():
        values = np.array([0, 1], dtype)
        arrays += [
            (f"{code}/two", values),
            (f"{code}/none", values[:0]),
            (f"{code}/one", values[1].reshape(())),
        ]
    bits = np.array([[0x3F80, 0x8000], [0x7F80, 0x7FC1]], np.uint16)
    return [
        *arrays,
        ("bf2/four", Bfloat16(bits)),
        ("f4/bits", np.array([0x7FC0BEEF], np.uint32).view(np.float32)),
    ]


def segments(folder: Path) -> dict[str, Any]:
    path = folder / "good.tbs"
    path.unlink(missing_ok=True)
    segment, file = Segment.create(path, 41, 1_700_000_000_000_000_000)
    for n in range(3):
        segment.append(file, draft([make_sample(n, tokens=8)]).numbered(PRODUCER, 1, 41 + n, 0))
    file.close()
    raw = path.read_bytes()
    (folder / "torn.tbs").write_bytes(raw[:-10])
    flipped = bytearray(raw)
    flipped[segment.offsets[1] + 40] ^= 4
    (folder / "flipped.tbs").write_bytes(bytes(flipped))
    return {
        "good.tbs": {"records": [41, 42, 43], "torn": False},
        "torn.tbs": {"records": [41, 42], "torn": True},
        "flipped.tbs": {"records": [41, 43], "torn": False},
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
