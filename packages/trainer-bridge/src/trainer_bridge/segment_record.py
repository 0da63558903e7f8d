"""One record of a segment file: its header, its hash, and how the next one is found behind damage.

    record  u32 magic, u32 head len, u64 payload len, u64 seq, u64 xxh3_64, head, payload

All little endian. The hash covers the 24 bytes before it, the head and the payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import xxhash

from trainer_bridge.codec import Frames
from trainer_bridge.config import MAX_HEAD_BYTES

MAGIC = 0x43524254  # "TBRC" when read as bytes
HEADER_SIZE = 32

_HEADER = struct.Struct("<IIQQQ")
_HASHED = 24
"""Bytes of a header that the hash covers."""
_HASH = struct.Struct("<Q")
_MAGIC = struct.pack("<I", MAGIC)
_CHUNK = 1 << 20


class Record(NamedTuple):
    """One record of a segment."""

    seq: int
    frames: Frames


class Span(NamedTuple):
    """Where a record lies, known from its header; the frames were not read."""

    seq: int
    offset: int
    head_len: int
    payload_len: int

    @property
    def end(self) -> int:
        """Offset one past the record."""
        return self.offset + HEADER_SIZE + self.head_len + self.payload_len


def header_of(seq: int, frames: Frames) -> list[bytes | memoryview]:
    """What stands before the frames of a record, in pieces."""
    start = _HEADER.pack(MAGIC, len(frames.head), len(frames.payload), seq, 0)[:_HASHED]
    digest = xxhash.xxh3_64(start)
    digest.update(frames.head)
    digest.update(frames.payload)
    return [start, _HASH.pack(digest.intdigest())]


def read_span(file: BinaryIO, offset: int, size: int) -> tuple[Span | None, str]:
    """What the header at an offset says, in a file of `size` bytes; or why there is no record."""
    file.seek(offset)
    raw = file.read(HEADER_SIZE)
    if len(raw) < HEADER_SIZE:
        return None, "header cut off"
    magic, head_len, payload_len, seq, _ = _HEADER.unpack(raw)
    if magic != MAGIC or head_len > MAX_HEAD_BYTES:
        return None, "no record begins here"
    span = Span(seq, offset, head_len, payload_len)
    return (span, "") if span.end <= size else (None, "cut off")


def is_intact(file: BinaryIO, span: Span) -> bool:
    """Whether the bytes are what was written."""
    file.seek(span.offset)
    raw = file.read(span.end - span.offset)
    digest = xxhash.xxh3_64(raw[:_HASHED])
    digest.update(memoryview(raw)[HEADER_SIZE:])
    return digest.intdigest() == int.from_bytes(raw[_HASHED:HEADER_SIZE], "little")


def read_head(file: BinaryIO, span: Span) -> bytes:
    """The head frame, without a look at the record's hash; it has one of its own."""
    file.seek(span.offset + HEADER_SIZE)
    return file.read(span.head_len)


def read_frames(file: BinaryIO, span: Span) -> Frames:
    """Both frames, without a look at the hash."""
    return Frames(read_head(file, span), file.read(span.payload_len))


def find_intact(file: BinaryIO, start: int, seq: int, size: int) -> Span | None:
    """The first intact record that begins at `start` or later, and is record `seq` or one soon after it.

    A number too high for the bytes in between belongs to a segment inside of a payload, not to this one.
    """
    for offset in _magics(file, start, size):
        span, _ = read_span(file, offset, size)
        fits = span is not None and seq <= span.seq <= seq + (offset - start) // HEADER_SIZE + 1
        if span is not None and fits and is_intact(file, span):
            return span
    return None


def _magics(file: BinaryIO, start: int, size: int) -> Iterator[int]:
    at = start
    while at < size:
        file.seek(at)
        chunk = file.read(_CHUNK + len(_MAGIC) - 1)
        found = chunk.find(_MAGIC)
        while found >= 0:
            yield at + found
            found = chunk.find(_MAGIC, found + 1)
        at += _CHUNK
