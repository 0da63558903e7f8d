"""`SegmentLog`: a folder of segments that one process appends to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer_bridge.codec import Frames
from trainer_bridge.errors import DamagedError, SpoolError
from trainer_bridge.segment import FILE_HEADER_SIZE, Damage, Segment, sync_folder
from trainer_bridge.segment_record import Record

log = logging.getLogger(__name__)

FOLDER = "samples"
"""Segments lie in this folder of a spool, a store or a run folder."""


def segment_paths(folder: Path) -> list[Path]:
    """The segment files of a folder, in order."""
    return sorted(folder.glob("segment-*.tbs"))


def _datasync(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync there stops at the drive's cache
    else:
        os.fdatasync(fd)


class SegmentLog:
    """Numbered records on disk: append at the end, read anywhere, forget at the front.

    Opening takes a lock on the folder, cuts a torn record off the last segment (a crash while writing), and
    goes on after the last one. Damaged and missing records before that are in `damage`; their numbers are not
    used again, and what is left of them stays. Methods are not thread-safe, but for `sync`, which may run
    beside them.

    Args:
        root: the segments go into `root/samples`, which is made if needed.
        segment_bytes: a segment that is this large is followed by another.
        now_ns: written into new segments.

    Raises:
        SpoolError: the folder cannot be made, read or written, another process has it open, or a file in it
            is no segment of this log.
    """

    def __init__(self, root: Path, *, segment_bytes: int, now_ns: int) -> None:
        self.folder = root / FOLDER
        self._segment_bytes = segment_bytes
        self._now_ns = now_ns
        self._file_lock = threading.Lock()
        self.torn_bytes = 0
        """Bytes of a torn record that opening cut off."""
        self.damage: list[Damage] = []
        """What opening found, rising. Hashes are checked in the last segment only; of others when they are
        read."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise SpoolError(
                f"cannot use {root} for samples: {error.strerror or error}; choose a folder that can be "
                "written to"
            ) from error
        try:
            self._segments = self._scan()
            self._file = self._open_last()
        except OSError as error:
            os.close(self._lock)
            if isinstance(error, SpoolError):
                raise
            raise SpoolError(f"cannot open {self.folder}: {error.strerror or error}") from error
        self._reader: tuple[Segment, BinaryIO] | None = None
        self.closed_bytes = sum(segment.size for segment in self._segments[:-1])
        """Bytes on disk but for the last segment, the one that is written."""

    @property
    def first(self) -> int:
        """Lowest sequence number on disk; `last + 1` if there is none."""
        return self._segments[0].first

    @property
    def last(self) -> int:
        """Highest sequence number written."""
        return self._segments[-1].last

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.closed_bytes + self._segments[-1].size

    @property
    def oldest(self) -> Segment | None:
        """The first segment, if another follows it; None: there is one only."""
        return self._segments[0] if len(self._segments) > 1 else None

    def append(self, frames: Frames) -> int:
        """Write one record; returns its sequence number. It survives a crash of the process from here on.

        Raises:
            SpoolError: the disk does not take it. The log is as it was.
        """
        segment = self._segments[-1]
        try:
            if segment.offsets and segment.size >= self._segment_bytes:
                segment = self._roll(segment.last + 1)
            segment.append(self._file, frames)
        except OSError as error:
            raise SpoolError(
                f"cannot write {frames.nbytes} bytes to {segment.path}: {error.strerror or error}; "
                "free some space, or settle what is there (is the receiver running?)"
            ) from error
        return segment.last

    def sync(self) -> None:
        """Ask the disk for everything appended so far.

        Raises:
            SpoolError: the disk reports a failure; what was not synced before may be lost.
        """
        with self._file_lock:
            try:
                _datasync(self._file.fileno())
            except OSError as error:
                raise SpoolError(f"the disk did not take {self.folder}: {error.strerror or error}") from error

    def read(self, seq: int) -> Record:
        """Read one record and check it.

        Raises:
            DamagedError: it is damaged or missing.
            SpoolError: it cannot be read just now (too many open files, no permission).
        """
        segment = self._find(seq)
        try:
            if self._reader is None or self._reader[0] is not segment:
                self._close_reader()
                self._reader = (segment, segment.path.open("rb", buffering=0))
            return segment.read(self._reader[1], seq)
        except SpoolError:
            raise
        except OSError as error:
            kind = DamagedError if error.errno in (errno.ENOENT, errno.EIO) else SpoolError
            text = f"cannot read record {seq} in {segment.path}: {error.strerror or error}"
            raise kind(text) from error

    def skip_to(self, seq: int) -> None:
        """Go on with this number, in a segment of its own: those before it were used.

        Raises:
            OSError: there can be no such segment.
        """
        self._roll(seq)

    def segments(self) -> Iterator[Segment]:
        """All segments, oldest first."""
        return iter(list(self._segments))

    def drop_below(self, seq: int) -> int:
        """Delete segments that hold nothing from `seq` on (never the last one); returns how many."""
        dropped = 0
        while len(self._segments) > 1 and self._segments[0].last < seq:
            segment = self._segments.pop(0)
            if self._reader is not None and self._reader[0] is segment:
                self._close_reader()
            with self._file_lock:
                self.closed_bytes -= segment.size
            segment.path.unlink(missing_ok=True)
            dropped += 1
        if dropped:
            sync_folder(self.folder)
        return dropped

    def close(self) -> None:
        """Sync, close, and let go of the folder."""
        try:
            self.sync()
        finally:
            self._close_reader()
            self._file.close()
            os.close(self._lock)

    # -- inside

    def _take_lock(self) -> int:
        path = self.folder / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise SpoolError(
                f"{self.folder} is in use by process {holder}: give every sender and receiver a folder of "
                "its own"
            ) from error
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return fd

    def _scan(self) -> list[Segment]:
        segments: list[Segment] = []
        paths = segment_paths(self.folder)
        if paths and paths[-1].stat().st_size < FILE_HEADER_SIZE:
            # Killed while it was being made: it holds nothing.
            self.torn_bytes += paths[-1].stat().st_size
            paths.pop().unlink()
        fault = ""
        for path in paths:
            segment, end = Segment.scan(path, verify=path is paths[-1])
            if segments:
                self._note_gap(segments[-1], segment, fault)
            self.damage += segment.damage
            segments.append(segment)
            fault = end
        return segments

    def _note_gap(self, former: Segment, segment: Segment, fault: str) -> None:
        """What is missing between two files.

        Args:
            former: the file before.
            segment: the file after.
            fault: why the file before ends where it does.
        """
        first, last = former.last + 1, segment.first - 1
        if last < first - 1:
            raise SpoolError(
                f"{segment.path} begins with record {segment.first}, and {former.path} ends with record "
                f"{former.last}: one of them is not of this folder; move it away"
            )
        if last >= first:
            where = f"{former.path}: {fault or f'no file between it and {segment.path.name}'}"
            self.damage.append(Damage(first, last, f"{where}; records {first} to {last} are missing"))

    def _open_last(self) -> BinaryIO:
        if not self._segments:
            segment, file = Segment.create(self.folder / "segment-000000.tbs", 1, self._now_ns)
            self._segments.append(segment)
            return file
        segment = self._segments[-1]
        file = segment.path.open("r+b", buffering=0)
        torn = os.fstat(file.fileno()).st_size - segment.size
        if torn:
            self.torn_bytes += torn
            log.warning("%s: cut a torn record of %d bytes after record %d", segment.path, torn, segment.last)
            os.ftruncate(file.fileno(), segment.size)
            os.fsync(file.fileno())
        file.seek(segment.size)
        return file

    def _roll(self, first: int) -> Segment:
        self.sync()
        number = int(self._segments[-1].path.stem.removeprefix("segment-")) + 1
        segment, file = Segment.create(self.folder / f"segment-{number:06d}.tbs", first, self._now_ns)
        with self._file_lock:
            old, self._file = self._file, file
            old.close()
            self.closed_bytes += self._segments[-1].size
        self._segments.append(segment)
        return segment

    def _find(self, seq: int) -> Segment:
        for segment in reversed(self._segments):
            if segment.first <= seq <= segment.last:
                return segment
        raise DamagedError(f"{self.folder} holds records {self.first} to {self.last}, not {seq}")

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None
