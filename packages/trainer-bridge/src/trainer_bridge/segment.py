"""Append-only segment files: the frames of the wire, one record each, readable years later.

    file    "TBSEGMNT", u16 major, u16 minor, u32 0, u64 first seq, u64 created_ns
    record  u32 magic, u32 head len, u64 payload len, u64 seq, u64 xxh3_64, head, payload

All little endian. The hash covers the 24 bytes before it, the head and the payload. Sequence numbers in a
file rise by one. A file may end in a torn record: whoever writes cuts it off, whoever reads stops there and
says so.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from trainer_bridge.codec import Frames
from trainer_bridge.config import MAX_HEAD_BYTES
from trainer_bridge.errors import SpoolError

FILE_MAGIC = b"TBSEGMNT"
MAJOR = 1
MINOR = 0
RECORD_MAGIC = 0x43524254  # "TBRC" when read as bytes

_FILE = struct.Struct("<8sHHIQQ")
_RECORD = struct.Struct("<IIQQQ")
_HASHED = 24
"""Bytes of a record's header that the hash covers."""


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
        return self.offset + _RECORD.size + self.head_len + self.payload_len


class Segment:
    """One segment file: its extent, and where its records begin.

    Args:
        path: the file.
        first: sequence number of its first record.
    """

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self.first = first
        self.offsets = array("Q")
        self.size = _FILE.size

    @property
    def last(self) -> int:
        """Sequence number of its last record; `first - 1` if it has none."""
        return self.first + len(self.offsets) - 1

    @classmethod
    def create(cls, path: Path, first: int, created_ns: int) -> tuple[Segment, BinaryIO]:
        """A new file, open for appending. It is on the disk, with its name, when this returns.

        Raises:
            OSError: there is no such file.
        """
        file = path.open("xb", buffering=0)
        try:
            _write_all(file.fileno(), [_FILE.pack(FILE_MAGIC, MAJOR, MINOR, 0, first, created_ns)])
            os.fsync(file.fileno())
            sync_folder(path.parent)
        except OSError:
            file.close()
            path.unlink()
            raise
        return cls(path, first), file

    @classmethod
    def scan(cls, path: Path, *, verify: bool) -> tuple[Segment, str]:
        """Find the records of a file.

        Args:
            path: the file.
            verify: read everything and check the hashes; else follow the record headers only.

        Returns:
            The segment up to the first record that is not whole, and what is wrong there ("" if nothing is).

        Raises:
            SpoolError: the file is not a segment, or of a later major version.
        """
        with path.open("rb") as file:
            segment = cls(path, read_file_header(file, path))
            size = os.fstat(file.fileno()).st_size
            while segment.size < size:
                span, fault = _read_span(file, segment.size, segment.last + 1, size)
                if span is not None and verify:
                    fault = "" if _intact(file, span) else "hash"
                if span is None or fault:
                    return segment, f"record {segment.last + 1} at byte {segment.size}: {fault}"
                segment.offsets.append(span.offset)
                segment.size = span.end
        return segment, ""

    def append(self, file: BinaryIO, frames: Frames) -> None:
        """Write one record at the end; a record that does not fit on the disk is taken back.

        Raises:
            OSError: the file is as it was before.
        """
        start = _RECORD.pack(RECORD_MAGIC, len(frames.head), len(frames.payload), self.last + 1, 0)[:_HASHED]
        digest = xxhash.xxh3_64(start)
        digest.update(frames.head)
        digest.update(frames.payload)
        pieces = [start, struct.pack("<Q", digest.intdigest()), frames.head, frames.payload]
        try:
            _write_all(file.fileno(), pieces)
        except OSError:
            os.ftruncate(file.fileno(), self.size)
            os.lseek(file.fileno(), self.size, os.SEEK_SET)
            raise
        self.offsets.append(self.size)
        self.size += _RECORD.size + frames.nbytes

    def read(self, file: BinaryIO, seq: int) -> Record:
        """Read one record and check it.

        Raises:
            SpoolError: the bytes on the disk are no longer what was written.
        """
        offset = self.offsets[seq - self.first]
        span, fault = _read_span(file, offset, seq, self.size)
        if span is None:
            raise SpoolError(f"{self.path}: record {seq} at byte {offset}: {fault}")
        return Record(seq, self._frames(file, span))

    def records(self) -> Iterator[Record]:
        """All records, each checked when it is read."""
        with self.path.open("rb") as file:
            for seq in range(self.first, self.last + 1):
                yield self.read(file, seq)

    def heads(self) -> Iterator[tuple[Span, bytes]]:
        """The head of each record, without reading the payloads."""
        with self.path.open("rb") as file:
            for seq in range(self.first, self.last + 1):
                offset = self.offsets[seq - self.first]
                span, fault = _read_span(file, offset, seq, self.size)
                if span is None:
                    raise SpoolError(f"{self.path}: record {seq} at byte {offset}: {fault}")
                yield span, file.read(span.head_len)

    def _frames(self, file: BinaryIO, span: Span) -> Frames:
        if not _intact(file, span):
            raise SpoolError(f"{self.path}: record {span.seq} at byte {span.offset} does not match its hash")
        file.seek(span.offset + _RECORD.size)
        head = file.read(span.head_len)
        return Frames(head, file.read(span.payload_len))


def read_file_header(file: BinaryIO, path: Path) -> int:
    """Check the first bytes of a segment; returns the sequence number of its first record.

    Raises:
        SpoolError: the file is something else, or of a later major version.
    """
    raw = file.read(_FILE.size)
    if len(raw) < _FILE.size or not raw.startswith(FILE_MAGIC):
        raise SpoolError(
            f"{path} is not a trainer-bridge segment (it does not begin with {FILE_MAGIC.decode()})"
        )
    _, major, minor, _, first, _ = _FILE.unpack(raw)
    if major != MAJOR:
        raise SpoolError(f"{path} is a segment of version {major}.{minor}; this version reads {MAJOR}.x")
    return int(first)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_span(file: BinaryIO, offset: int, seq: int, size: int) -> tuple[Span | None, str]:
    file.seek(offset)
    raw = file.read(_RECORD.size)
    if len(raw) < _RECORD.size:
        return None, "header cut off"
    magic, head_len, payload_len, found, _ = _RECORD.unpack(raw)
    if magic != RECORD_MAGIC or head_len > MAX_HEAD_BYTES:
        return None, "no record begins here"
    if found != seq:
        return None, f"sequence number {found} where {seq} should be"
    span = Span(seq, offset, head_len, payload_len)
    return (span, "") if span.end <= size else (None, "cut off")


def _intact(file: BinaryIO, span: Span) -> bool:
    file.seek(span.offset)
    raw = file.read(span.end - span.offset)
    digest = xxhash.xxh3_64(raw[:_HASHED])
    digest.update(memoryview(raw)[_RECORD.size :])
    return digest.intdigest() == int.from_bytes(raw[_HASHED : _RECORD.size], "little")


def _write_all(fd: int, pieces: list[bytes | memoryview]) -> None:
    views = [memoryview(piece) for piece in pieces if len(piece)]
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if written:
            views[0] = views[0][written:]
