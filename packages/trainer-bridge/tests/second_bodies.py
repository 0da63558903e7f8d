"""The bodies of heads, as docs/wire-protocol.md has them: msgpack, and a table for each kind.

A type is a function that takes a decoded value and returns what it means, or raises RefusedError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

Type = Callable[[Any], Any]


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
        pairs = [(self.value(depth + 1), self.value(depth + 1)) for _ in range(n)]
        require(all(type(key) is str for key, _ in pairs))
        return dict(pairs)


def require(holds: object) -> None:
    if not holds:
        raise RefusedError("bad_body")


def plain(*kinds: type) -> Type:
    def check(value: Any) -> Any:
        require(type(value) in kinds)
        return value

    return check


def integer(low: int, high: int) -> Type:
    def check(value: Any) -> int:
        require(type(value) is int and low <= value <= high)
        return value

    return check


def text(most: int) -> Type:
    def check(value: Any) -> str:
        require(type(value) is str and len(value) <= most)
        return value

    return check


def binary(size: int | None) -> Type:
    """None: of any length."""

    def check(value: Any) -> bytes:
        require(type(value) is bytes and size in (None, len(value)))
        return value

    return check


def one_of(*words: str) -> Type:
    def check(value: Any) -> str:
        require(type(value) is str and value in words)
        return value

    return check


def array(of: Type, most: int = 1 << 20, least: int = 0) -> Type:
    def check(value: Any) -> list[Any]:
        require(type(value) is list and least <= len(value) <= most)
        return [of(each) for each in value]

    return check


def row(*of: Type) -> Type:
    def check(value: Any) -> list[Any]:
        require(type(value) is list and len(value) == len(of))
        return [each(entry) for each, entry in zip(of, value, strict=True)]

    return check


def mapping(of: Type, most: int = 1 << 20) -> Type:
    def check(value: Any) -> dict[str, Any]:
        require(type(value) is dict and all(len(key) <= most for key in value))
        return {key: of(each) for key, each in value.items()}

    return check


def nullable(of: Type) -> Type:
    return lambda value: None if value is None else of(value)


def table(name: str) -> Type:
    """Fields by position: what is appended later is skipped, what is missing at the end has its default."""

    def check(value: Any) -> dict[str, Any]:
        require(type(value) is list)
        found: dict[str, Any] = {}
        for at, (field, of, *default) in enumerate(TABLES[name]):
            require(at < len(value) or default)
            found[field] = of(value[at]) if at < len(value) else default[0]
        return found

    return check


TRUTH, FLOAT, ANY_TEXT = plain(bool), plain(float, int), plain(str)
SCALAR = plain(str, int, float, bool, type(None))
U8, U16, U32, U63, U64 = (integer(0, 2**bits - 1) for bits in (8, 16, 32, 63, 64))
INT, VERSION = integer(-(2**63), 2**64 - 1), integer(-1, 2**31 - 1)
WORD, NAME, TEXT, ID = text(64), text(256), text(1000), binary(16)
FEATURES = array(WORD, 64)
SESSION = ("session", U63)

TABLES: dict[str, list[tuple[Any, ...]]] = {
    "SET": [("upto", U63, 0), ("ranges", array(row(U63, U63)), [])],
    "LEVELS": [("epoch", U32), *((level, table("SET")) for level in ("received", "stored", "committed"))],
    "HELLO": [
        SESSION, ("role", one_of("producer", "observer", "rank")), ("peer", ID), ("name", NAME),
        ("minor_min", U8), ("minor_max", U8), ("schemas", array(row(WORD, U64), 64)),
        ("features", FEATURES, []), ("epoch", U32, 0), ("streams", array(row(U32, U63), 4096), []),
        ("starts", array(U63, 4096), []),
    ],
    "WELCOME": [
        SESSION, ("receiver", ID), ("minor", U8), ("schema", WORD), ("features", FEATURES), ("window", U32),
        ("max_payload", U63), ("control_address", TEXT, ""), ("acks", array(table("LEVELS")), []),
        ("sequence_limit", U63, 0), ("byte_limit", U63, 0),
    ],
    "DATA": [
        ("schema", WORD), ("producer", ID), ("epoch", U32), ("sequence", U63), ("created_ns", U63),
        ("rollout_id", ID), ("group_id", ID), ("attempt", U32), ("task_id", ANY_TEXT),
        ("parts", array(table("PART"))), ("arrays", array(row(WORD, text(8), array(INT), INT, INT))),
        ("payload_nbytes", INT), ("payload_hash", U64), ("group_size", INT, 0),
    ],
    "ACK": [SESSION, ("levels", array(table("LEVELS")))],
    "CONTROL": [
        SESSION, ("generation", U63), ("run_state", one_of("run", "pause", "drain", "abort")),
        ("weights_version", VERSION), ("min_version", VERSION), ("policy_run", NAME, ""),
        ("weights_location", text(2048), ""),
    ],
    "CREDIT": [SESSION, ("sequence_limit", U63), ("byte_limit", U63)],
    "BYE": [SESSION, ("reason", TEXT, "")],
    "ERROR": [SESSION, ("code", U16), ("text", TEXT), ("epoch", U32, 0), ("sequence", U63, 0)],
    "REPORT": [
        SESSION, ("generation", U63), ("last_sequence", U63, 0), ("unsettled", U63, 0),
        ("holes", array(row(U32, U63, U63), 256), []),
    ],
    "ASK": [SESSION, ("rank", U32), ("world", U32), ("groups", U32), ("last", U63, 0)],
    "SHARE": [
        SESSION, ("step", U63), ("groups", array(table("GROUP"))), ("totals", table("TOTALS"), None),
        ("lengths", array(array(U63)), []),
    ],
    "GROUP": [
        ("group_id", ID), ("size", U32), ("complete", TRUTH), ("rollouts", array(table("ROLLOUT"))),
        ("elsewhere", array(table("REMOTE")), []),
    ],
    "ROLLOUT": [
        ("rollout_id", ID), ("attempt", U32), ("producer_name", NAME), ("restored", TRUTH), ("nacks", U32),
        ("staleness", nullable(INT)),
    ],
    "REMOTE": [
        ("rollout_id", ID), ("trained_tokens", U63), ("reward", nullable(FLOAT)), ("in_baseline", TRUTH),
        ("turn_rewards", array(nullable(FLOAT))),
    ],
    "TOTALS": [(name, U63, 0) for name in ("tokens", "samples", "rollouts", "groups")],
    "READY": [SESSION, ("step", U63)],
    "VERDICT": [
        SESSION, ("step", U63), ("verdict", one_of("go", "none", "again", "aborted")), ("reason", TEXT, ""),
    ],
    "DONE": [SESSION, ("step", U63), ("committed", TRUTH), ("reason", TEXT, "")],
    "STATUS": [
        SESSION, ("metrics", mapping(FLOAT, 256)), ("producers", array(row(NAME, ID, WORD, U63, U63, U63))),
    ],
    "BUNDLE": [("items", array(row(binary(None), U32), 64, 1))],
    "PART": [
        ("prompt_length", INT), ("turns", array(table("TURN"))), ("reward", nullable(FLOAT)),
        ("in_loss", TRUTH), ("in_baseline", TRUTH),
        ("status", one_of("completed", "truncated", "aborted", "failed")),
        ("source", one_of("sampled", "replayed")), ("policy_run", ANY_TEXT), ("provenance", mapping(SCALAR)),
        ("extra", mapping(SCALAR)),
    ],
    "TURN": [
        ("start", INT), ("end", INT), ("finish_reason", one_of("stop", "length", "abort")),
        ("logprob_kind", one_of("none", "raw", "processed")), ("temperature", nullable(FLOAT)),
        ("top_p", nullable(FLOAT)), ("top_k", nullable(integer(-(2**63), 2**63 - 1))),
        ("min_p", nullable(FLOAT)), ("reward", nullable(FLOAT)),
    ],
}  # fmt: skip


def read_body(name: str, raw: bytes) -> dict[str, Any]:
    """A whole body of a kind."""
    reader = Msgpack(raw)
    values = reader.value()
    require(reader.at == len(raw))
    return table(name)(values)
