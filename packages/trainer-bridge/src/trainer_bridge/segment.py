"""Append-only segment files: the frames of the wire, one record each, readable years later.

    file    "TBSEGMNT", u16 major, u16 minor, u32 0, u64 first seq, u64 created_ns
    record  see `segment_record`

All little endian. Sequence numbers in a file rise by one. A file may end in a torn record: whoever writes
cuts it off, whoever reads stops there and says so. Damage before intact records is another thing: what is
damaged is set aside, with its numbers, and the rest is read.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer_bridge.codec import Frames
from trainer_bridge.errors import DamagedError, SpoolError
from trainer_bridge.segment_record import (
    HEADER_SIZE,
    Record,
    find_intact,
    header_of,
    is_intact,
    read_frames,
    read_head,
    read_span,
)

FILE_MAGIC = b"TBSEGMNT"
MAJOR = 1
MINOR = 0

_FILE = struct.Struct("<8sHHIQQ")
FILE_HEADER_SIZE = _FILE.size


class Damage(NamedTuple):
    """Records that cannot be read, or are missing."""

    first: int
    last: int
    text: str
    """For people: where, and what is wrong."""


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
        self.damage: list[Damage] = []
        """Of its records; rising. Found by `scan`."""
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
            verify: read everything and check the hashes; else follow the record headers only, as long as
                they are sound.

        Returns:
            The segment, with what is damaged in it; and what is wrong with its end, if it ends in something
            that is no whole record and has none behind it ("" if it does not).

        Raises:
            SpoolError: the file is not a segment, or of a later major version.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            segment = cls(path, _first_of(file, path, size))
            while segment.size < size:
                fault = segment._take_next(file, size, verify)
                if not verify and (fault or segment.damage):
                    # A wrong length leads astray: it stands before the place where that is noticed.
                    return cls.scan(path, verify=True)
                if fault:
                    return segment, fault
        return segment, ""

    def _take_next(self, file: BinaryIO, size: int, verify: bool) -> str:
        """Note the record at the end of those known, or pass over damage; returns why there is no more."""
        offset, seq = self.size, self.last + 1
        span, fault = read_span(file, offset, size)
        if span is not None and span.seq != seq:
            span, fault = None, f"sequence number {span.seq} where {seq} should be"
        if span is not None and (not verify or is_intact(file, span)):
            self.offsets.append(offset)
            self.size = span.end
            return ""
        if span is not None:
            fault = "hash"
        text = f"record {seq} at byte {offset}: {fault}"
        after = span.end if span is not None else offset
        if span is None or not _begins(file, after, seq + 1, size):
            # The lengths may be what is damaged.
            found = find_intact(file, offset + 1, seq, size)
            if found is None and span is None:
                return text
            if found is not None:
                after, seq = found.offset, found.seq - 1
        if seq > self.last:
            first = self.last + 1
            through = f" (and on to record {seq})" if seq > first else ""
            self.damage.append(Damage(first, seq, f"{self.path}: {text}{through}"))
            self.offsets.extend([offset] * (seq - self.last))
        self.size = after
        return ""

    def append(self, file: BinaryIO, frames: Frames) -> None:
        """Write one record at the end; a record that does not fit on the disk is taken back.

        Raises:
            OSError: the file is as it was before.
        """
        pieces = [*header_of(self.last + 1, frames), frames.head, frames.payload]
        try:
            _write_all(file.fileno(), pieces)
        except OSError:
            os.ftruncate(file.fileno(), self.size)
            os.lseek(file.fileno(), self.size, os.SEEK_SET)
            raise
        self.offsets.append(self.size)
        self.size += HEADER_SIZE + frames.nbytes

    def read(self, file: BinaryIO, seq: int) -> Record:
        """Read one record and check it.

        Raises:
            DamagedError: the bytes on the disk are no longer what was written.
        """
        offset = self.offsets[seq - self.first]
        where = f"{self.path}: record {seq} at byte {offset}"
        span, fault = read_span(file, offset, self.size)
        if span is None or span.seq != seq:
            raise DamagedError(f"{where}: {fault or f'sequence number {span.seq if span else 0}'}")
        if not is_intact(file, span):
            raise DamagedError(f"{where} does not match its hash")
        return Record(seq, read_frames(file, span))

    def records(self) -> Iterator[Record]:
        """All records but those in `damage`, each checked when it is read."""
        damaged = self._damaged()
        with self.path.open("rb") as file:
            for seq in range(self.first, self.last + 1):
                if seq not in damaged:
                    yield self.read(file, seq)

    def heads(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, bytes of both frames, head) of each record, without reading the payloads.

        Of records in `damage` the head is whatever stands there, or empty: heads have a hash of their own.
        """
        with self.path.open("rb") as file:
            for seq in range(self.first, self.last + 1):
                span, _ = read_span(file, self.offsets[seq - self.first], self.size)
                if span is None or span.seq != seq:
                    yield seq, 0, b""
                else:
                    yield seq, span.head_len + span.payload_len, read_head(file, span)

    def _damaged(self) -> set[int]:
        return {seq for each in self.damage for seq in range(each.first, each.last + 1)}


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


def _first_of(file: BinaryIO, path: Path, size: int) -> int:
    """Number of the first record: as that says, if it is sound, for the file's header has no hash."""
    first = read_file_header(file, path)
    span, _ = read_span(file, _FILE.size, size)
    if span is not None and span.seq != first and is_intact(file, span):
        return span.seq
    return first


def _begins(file: BinaryIO, offset: int, seq: int, size: int) -> bool:
    """Whether the file ends here, or a record of this number seems to begin."""
    span, _ = read_span(file, offset, size)
    return offset == size or (span is not None and span.seq == seq)


def _write_all(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    views = [memoryview(piece) for piece in pieces if len(piece)]
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if written:
            views[0] = views[0][written:]
