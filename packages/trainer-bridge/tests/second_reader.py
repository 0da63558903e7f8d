"""A reader written from docs/wire-protocol.md alone. Standard library, and the two files beside it.

It decodes heads, DATA messages, bundles and segment files into plain dicts, and names the first rule that is
broken.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from second_bodies import RefusedError, read_body
from xxh3 import xxh3_64

LIMIT = 1 << 20
FORMATS = {"bool": "?", "u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i"}
FORMATS |= {"u8": "Q", "i8": "q", "f2": "e", "f4": "f", "f8": "d"}
FORMATS["bf2"] = "H"  # bfloat16: its bits
SIZES = {code: struct.calcsize("<" + fmt) for code, fmt in FORMATS.items()}
KINDS = dict(enumerate(["HELLO", "WELCOME", "DATA", "ACK", "CONTROL", "CREDIT", "BYE", "ERROR", "REPORT"], 1))
KINDS |= dict(enumerate(["ASK", "SHARE", "READY", "VERDICT", "DONE", "STATUS", "BUNDLE"], 10))
REQUIRED = {"token_ids": "i4", "loss_mask": "u1", "logprobs": "f4", "versions": "i4"}
OPTIONAL = ["kept_ids", "kept_offsets", "routed_experts"]
INTEGERS = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"}


def read_head(head: bytes) -> tuple[str, dict[str, Any]]:
    if len(head) < 16:
        raise RefusedError("short_head")
    if head[:2] != b"TB":
        raise RefusedError("bad_magic")
    if head[2] != 1:
        raise RefusedError("wrong_major")
    if len(head) > LIMIT:
        raise RefusedError("too_large")
    if xxh3_64(head[:-8]) != int.from_bytes(head[-8:], "little"):
        raise RefusedError("bad_head_hash")
    if head[4] not in KINDS or head[5:8] != b"\0\0\0":
        raise RefusedError("unknown_kind")
    kind = KINDS[head[4]]
    return kind, read_body(kind, head[8:-8])


def read_message(frames: list[bytes]) -> Any:
    """Any message as its body; BUNDLE as a list of what each of its messages is."""
    if not frames:
        raise RefusedError("wrong_frame_count")
    kind, body = read_head(frames[0])
    if kind == "DATA":
        return read_data(frames)
    if kind == "BUNDLE":
        return [read_item(item) for item in split(body, frames)]
    if len(frames) != 1:
        raise RefusedError("wrong_frame_count")
    return body


def split(body: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
    if len(frames) != 2:
        raise RefusedError("wrong_frame_count")
    items: list[list[bytes]] = []
    at = 0
    for head, size in body["items"]:
        at = (at + 63) // 64 * 64
        items.append([head, frames[1][at : at + size]])
        at += size
    if at != len(frames[1]):
        raise RefusedError("bad_payload_length")
    return items


def read_item(frames: list[bytes]) -> Any:
    """One message of a bundle: it is refused alone, by name."""
    try:
        return read_data(frames)
    except RefusedError as error:
        return str(error)


def check_place(hello: dict[str, Any], data: dict[str, Any]) -> None:
    """Whether a producer that said this HELLO may send this message."""
    if hello["role"] != "producer" or data["producer"] != hello["peer"]:
        raise RefusedError("wrong_role")
    epochs = [epoch for epoch, _ in hello["streams"]]
    if data["epoch"] not in epochs or data["sequence"] < 1:
        raise RefusedError("bad_sequence")
    starts = hello["starts"] or [first for _, first in hello["streams"]]
    if any(data["sequence"] >= start for start in starts[epochs.index(data["epoch"]) + 1 :]):
        raise RefusedError("bad_sequence")


def read_data(frames: list[bytes]) -> dict[str, Any]:
    if not frames:
        raise RefusedError("wrong_frame_count")
    kind, body = read_head(frames[0])
    if kind != "DATA":
        raise RefusedError("unknown_kind")
    if len(frames) != 2:
        raise RefusedError("wrong_frame_count")
    if body["schema"] != "sample/1":
        raise RefusedError("unknown_schema")
    if not 1 <= len(body["parts"]) <= 1024 or not 0 <= body["group_size"] <= 65_536:
        raise RefusedError("bad_body")
    payload = frames[1]
    if len(payload) != body["payload_nbytes"]:
        raise RefusedError("bad_payload_length")
    if xxh3_64(payload) != body["payload_hash"]:
        raise RefusedError("bad_payload_hash")
    names = [entry[0] for entry in body["arrays"]]
    wanted = [f"{part}/{field}" for part in range(len(body["parts"])) for field in REQUIRED]
    if not set(wanted) <= set(names):
        raise RefusedError("missing_array")
    known = {f"{part}/{field}" for part in range(len(body["parts"])) for field in [*REQUIRED, *OPTIONAL]}
    if not set(names) <= known:
        raise RefusedError("unknown_array")
    arrays = read_arrays(body["arrays"], payload)
    for number, part in enumerate(body["parts"]):
        part |= {field: arrays.get(f"{number}/{field}") for field in [*REQUIRED, *OPTIONAL]}
        if not is_sample(part):
            raise RefusedError("bad_sample")
    return body


def read_arrays(table: list[list[Any]], payload: bytes) -> dict[str, dict[str, Any]]:
    arrays: dict[str, dict[str, Any]] = {}
    end = 0
    for name, dtype, shape, offset, nbytes in table:
        if dtype not in SIZES:
            raise RefusedError("unknown_dtype")
        if len(shape) > 8 or any(n < 0 for n in shape) or math.prod(shape) * SIZES[dtype] != nbytes:
            raise RefusedError("bad_shape")
        if offset % 64 or offset < end or offset + nbytes > len(payload):
            raise RefusedError("bad_offset")
        if name in arrays:
            raise RefusedError("duplicate_array")
        end = offset + nbytes
        raw = payload[offset:end]
        values = struct.unpack(f"<{math.prod(shape)}{FORMATS[dtype]}", raw)
        arrays[name] = {"dtype": dtype, "shape": shape, "raw": raw, "values": values}
    if end != len(payload):
        raise RefusedError("bad_payload_length")
    return arrays


def is_sample(part: dict[str, Any]) -> bool:
    n = part["token_ids"]["shape"][0] if part["token_ids"]["shape"] else -1
    if any(part[f]["dtype"] != dtype or part[f]["shape"] != [n] for f, dtype in REQUIRED.items()):
        return False
    mask, versions, logprobs = (part[field]["values"] for field in ("loss_mask", "versions", "logprobs"))
    covered = set[int]()
    at = part["prompt_length"]
    for turn in part["turns"]:
        if not at <= turn["start"] < turn["end"] <= n:
            return False
        covered |= set(range(turn["start"], turn["end"]))
        at = turn["end"]
        if turn["logprob_kind"] == "none" and not all(map(math.isnan, logprobs[turn["start"] : at])):
            return False
    rewards = [part["reward"], *(turn["reward"] for turn in part["turns"])]
    return (
        0 <= part["prompt_length"] <= n
        and all(token >= 0 for token in part["token_ids"]["values"])
        and all(m in (0, 1) for m in mask)
        and all(version >= -2 for version in versions)
        and all(math.isnan(p) or -math.inf < p <= 0 for p in logprobs)
        and all((versions[i] != -1) == (i in covered) for i in range(n))
        and not any(m and versions[i] == -1 for i, m in enumerate(mask))
        and (not part["turns"] or part["turns"][0]["start"] == part["prompt_length"])
        and all(reward is None or math.isfinite(reward) for reward in rewards)
        and has_good_channels(part, n)
    )


def has_good_channels(part: dict[str, Any], n: int) -> bool:
    ids, offsets, experts = (part[field] for field in OPTIONAL)
    if (ids is None) != (offsets is None):
        return False
    if ids is not None:
        if (ids["dtype"], len(ids["shape"]), offsets["dtype"]) != ("i4", 1, "i8"):
            return False
        ends = offsets["values"]
        if offsets["shape"] != [n + 1] or (ends[0], ends[-1]) != (0, ids["shape"][0]):
            return False
        if list(ends) != sorted(ends):
            return False
    if experts is None:
        return True
    shape = experts["shape"]
    return experts["dtype"] in INTEGERS and len(shape) == 3 and shape[0] == max(n - 1, 0)


def read_segment(data: bytes) -> tuple[list[tuple[int, bytes, bytes]], str]:
    """Records (number, head, payload), and what ended the reading: "" is the end of the file."""
    if len(data) < 32 or data[:8] != b"TBSEGMNT" or struct.unpack_from("<H", data, 8)[0] != 1:
        raise RefusedError("not a segment of version 1")
    (number,) = struct.unpack_from("<Q", data, 16)
    records: list[tuple[int, bytes, bytes]] = []
    at = 32
    while at < len(data):
        if at + 32 > len(data):
            return records, "torn"
        magic, h, p, n, digest = struct.unpack_from("<4sIQQQ", data, at)
        if magic != b"TBRC" or h > LIMIT or n != number or at + 32 + h + p > len(data):
            return records, "torn"
        head, payload = data[at + 32 : at + 32 + h], data[at + 32 + h : at + 32 + h + p]
        if xxh3_64(data[at : at + 24] + head + payload) == digest:
            records.append((number, head, payload))
        number += 1
        at += 32 + h + p
    return records, ""
