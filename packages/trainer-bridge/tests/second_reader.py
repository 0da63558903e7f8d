"""A reader written from docs/wire-protocol.md alone: standard library, and xxhash. No msgspec, no numpy.

It decodes heads, DATA messages and segment files into plain dicts, and names the first rule that is broken.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import xxhash

LIMIT = 1 << 20
FORMATS = {"bool": "?", "u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i"}
FORMATS |= {"u8": "Q", "i8": "q", "f2": "e", "f4": "f", "f8": "d"}
FORMATS["bf2"] = "H"  # bfloat16: its bits
SIZES = {code: struct.calcsize("<" + fmt) for code, fmt in FORMATS.items()}
TABLES = """
SET upto ranges
LEVELS epoch received stored committed
HELLO session role peer name minor_min minor_max schemas features epoch streams
WELCOME session receiver minor schema features window max_payload control_address acks
 sequence_limit byte_limit
DATA schema producer epoch sequence created_ns rollout_id group_id attempt task_id parts arrays payload_nbytes
 payload_hash group_size
ACK session levels
CONTROL session generation run_state weights_version min_version policy_run
CREDIT session sequence_limit byte_limit
BYE session reason
ERROR session code text epoch sequence
REPORT session generation last_sequence unsettled
ASK session rank world groups
SHARE session step groups
GROUP group_id size complete rollouts
ROLLOUT producer_name restored nacks staleness
READY session step
VERDICT session step verdict reason
DONE session step committed reason
STATUS session metrics producers
PART prompt_length turns reward in_loss in_baseline status source policy_run provenance extra
TURN start end finish_reason logprob_kind temperature top_p top_k min_p reward
"""
FIELDS = {line.split()[0]: line.split()[1:] for line in TABLES.replace("\n ", " ").strip().splitlines()}
KINDS = dict(enumerate(["HELLO", "WELCOME", "DATA", "ACK", "CONTROL", "CREDIT", "BYE", "ERROR", "REPORT"], 1))
KINDS |= dict(enumerate(["ASK", "SHARE", "READY", "VERDICT", "DONE", "STATUS"], 10))
REQUIRED = {"token_ids": "i4", "loss_mask": "u1", "logprobs": "f4", "versions": "i4"}
OPTIONAL = ["kept_ids", "kept_offsets", "routed_experts"]


class RefusedError(Exception):
    """The name of the rule that was broken."""


class Msgpack:
    """The part of msgpack that the protocol uses."""

    def __init__(self, data: bytes, depth: int = 32) -> None:
        self.data, self.at, self.depth = data, 0, depth

    def take(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            raise RefusedError("bad_body")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, fmt: str) -> Any:
        return struct.unpack(">" + fmt, self.take(struct.calcsize(fmt)))[0]

    def value(self, depth: int = 0) -> Any:
        if depth > self.depth:
            raise RefusedError("too_deep")
        b = self.take(1)[0]
        if b <= 0x7F:
            return b
        if b >= 0xE0:
            return b - 256
        if b <= 0x8F:
            return self.map(b & 0x0F, depth)
        if b <= 0x9F:
            return self.array(b & 0x0F, depth)
        if b <= 0xBF:
            return self.text(b & 0x1F)
        if b in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[b]
        if b in (0xC4, 0xC5, 0xC6):
            return self.take(self.number("BHI"[b - 0xC4]))
        if b in (0xCA, 0xCB):
            return self.number("fd"[b - 0xCA])
        if 0xCC <= b <= 0xD3:
            return self.number("BHIQbhiq"[b - 0xCC])
        if b in (0xD9, 0xDA, 0xDB):
            return self.text(self.number("BHI"[b - 0xD9]))
        if b in (0xDC, 0xDD):
            return self.array(self.number("HI"[b - 0xDC]), depth)
        if b in (0xDE, 0xDF):
            return self.map(self.number("HI"[b - 0xDE]), depth)
        raise RefusedError("bad_body")  # ext types and 0xc1

    def text(self, n: int) -> str:
        try:
            return self.take(n).decode()
        except UnicodeDecodeError as error:
            raise RefusedError("bad_body") from error

    def array(self, n: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(n)]

    def map(self, n: int, depth: int) -> dict[Any, Any]:
        return {self.value(depth + 1): self.value(depth + 1) for _ in range(n)}


def named(table: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, list):
        raise RefusedError("bad_body")
    return dict(zip(FIELDS[table], values, strict=False))  # what is appended later is skipped


def read_head(head: bytes) -> tuple[str, dict[str, Any]]:
    if len(head) < 16:
        raise RefusedError("short_head")
    if head[:2] != b"TB":
        raise RefusedError("bad_magic")
    if head[2] != 1:
        raise RefusedError("wrong_major")
    if len(head) > LIMIT:
        raise RefusedError("too_large")
    if xxhash.xxh3_64_digest(head[:-8])[::-1] != head[-8:]:
        raise RefusedError("bad_head_hash")
    if head[4] not in KINDS or head[5:8] != b"\0\0\0":
        raise RefusedError("unknown_kind")
    kind = KINDS[head[4]]
    reader = Msgpack(head[8:-8])
    values = reader.value()
    if reader.at != len(head) - 16:
        raise RefusedError("bad_body")
    body = named(kind, values)
    for key in ("levels", "acks"):
        if key in body:
            body[key] = [levels(each) for each in body[key]]
    if kind == "SHARE":
        body["groups"] = [named("GROUP", group) for group in body["groups"]]
        for group in body["groups"]:
            group["rollouts"] = [named("ROLLOUT", rollout) for rollout in group["rollouts"]]
    return kind, body


def levels(values: Any) -> dict[str, Any]:
    entry = named("LEVELS", values)
    return {k: v if k == "epoch" else named("SET", v) for k, v in entry.items()}


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
    if not all(
        isinstance(body[k], bytes) and len(body[k]) == 16 for k in ("producer", "rollout_id", "group_id")
    ):
        raise RefusedError("bad_body")
    if not 1 <= len(body["parts"]) <= 1024 or not 0 <= body.setdefault("group_size", 0) <= 65_536:
        raise RefusedError("bad_body")
    payload = frames[1]
    if len(payload) != body["payload_nbytes"]:
        raise RefusedError("bad_payload_length")
    if int.from_bytes(xxhash.xxh3_64_digest(payload), "big") != body["payload_hash"]:
        raise RefusedError("bad_payload_hash")
    names = [entry[0] for entry in body["arrays"]]
    wanted = [f"{part}/{field}" for part in range(len(body["parts"])) for field in REQUIRED]
    if not set(wanted) <= set(names):
        raise RefusedError("missing_array")
    known = {f"{part}/{field}" for part in range(len(body["parts"])) for field in [*REQUIRED, *OPTIONAL]}
    if not set(names) <= known:
        raise RefusedError("unknown_array")
    arrays = read_arrays(body["arrays"], payload)
    body["parts"] = [read_part(n, values, arrays) for n, values in enumerate(body["parts"])]
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


def read_part(number: int, values: Any, arrays: dict[str, dict[str, Any]]) -> dict[str, Any]:
    part = named("PART", values)
    part["turns"] = [named("TURN", turn) for turn in part["turns"]]
    for field in [*REQUIRED, *OPTIONAL]:
        part[field] = arrays.get(f"{number}/{field}")
    check_part(part)
    return part


def check_part(part: dict[str, Any]) -> None:
    n = part["token_ids"]["shape"][0] if part["token_ids"]["shape"] else -1
    for field, dtype in REQUIRED.items():
        if part[field]["dtype"] != dtype or part[field]["shape"] != [n]:
            raise RefusedError("bad_sample")
    mask, versions = part["loss_mask"]["values"], part["versions"]["values"]
    covered = set[int]()
    at = part["prompt_length"]
    for turn in part["turns"]:
        if not at <= turn["start"] < turn["end"] <= n:
            raise RefusedError("bad_sample")
        covered |= set(range(turn["start"], turn["end"]))
        at = turn["end"]
    good = (
        all(t >= 0 for t in part["token_ids"]["values"])
        and all(m in (0, 1) for m in mask)
        and all(v >= -2 for v in versions)
        and all(math.isnan(p) or -math.inf < p <= 0 for p in part["logprobs"]["values"])
        and all((versions[i] != -1) == (i in covered) for i in range(n))
        and not any(m and versions[i] == -1 for i, m in enumerate(mask))
        and (not part["turns"] or part["turns"][0]["start"] == part["prompt_length"])
    )
    if not good:
        raise RefusedError("bad_sample")


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
        if xxhash.xxh3_64_intdigest(data[at : at + 24] + head + payload) != digest:
            return records, "torn"
        records.append((number, head, payload))
        number += 1
        at += 32 + h + p
    return records, ""
