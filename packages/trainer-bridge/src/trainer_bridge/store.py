"""`Store`: the receiver's own copy of what arrived, and of what the consumer is done with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainer_bridge.codec import Data, Frames, decode_frames
from trainer_bridge.errors import ProtocolError, SpoolError
from trainer_bridge.group_commit import GroupCommit
from trainer_bridge.head import decode_head
from trainer_bridge.messages import DataHead
from trainer_bridge.segment_log import SegmentLog
from trainer_bridge.seqset import SeqSet
from trainer_bridge.state_file import CursorFile, all_ranges, cursor_of, load, save


class Held(NamedTuple):
    """A record found at the start."""

    position: int
    head: DataHead
    nbytes: int
    committed: bool


class Store:
    """A `SegmentLog` of everything accepted, in order of arrival; and a cursor of what is committed.

    Args:
        root: the folder; segments go into `root/samples`.
        progressed: called in the store's own thread when the disk has taken more; then ask `synced` and
            `take_committed`.

    Raises:
        SpoolError: see `SegmentLog`.
    """

    def __init__(
        self, root: Path, *, segment_bytes: int, now_ns: int, progressed: Callable[[], None]
    ) -> None:
        self._log = SegmentLog(root, segment_bytes=segment_bytes, now_ns=now_ns)
        self._progressed = progressed
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._committed = SeqSet()
        self._dropped: dict[str, SeqSet] = {}
        """Of the committed: why, where it was not training."""
        self._committing: list[int] = []
        self._saved: list[int] = []
        self._rewound = False
        self.synced = self._log.last
        """Positions up to this are on the disk."""
        try:
            cursor = load(self._log.folder / "cursor.json", CursorFile)
        except SpoolError:
            self._log.close()
            raise
        if cursor is not None:
            self._committed = cursor.to_set()
            for reason, ranges in cursor.dropped.items():
                for first, last in ranges:
                    self._dropped.setdefault(reason, SeqSet()).add_range(first, last)
        self._commits = GroupCommit(flush=self._flush, done=self._done, name="trainer-bridge store")

    @property
    def last(self) -> int:
        """Position of the last record; positions count from 1."""
        return self._log.last

    @property
    def torn_bytes(self) -> int:
        """Bytes of a torn record that opening cut off."""
        return self._log.torn_bytes

    def held(self) -> Iterator[Held]:
        """Every record, in order; reads the heads only. Nothing may be appended meanwhile."""
        for segment in self._log.segments():
            for span, raw in segment.heads():
                try:
                    head = decode_head(raw)
                except ProtocolError as error:
                    raise SpoolError(f"{segment.path}: record {span.seq}: {error}") from error
                if not isinstance(head, DataHead):
                    raise SpoolError(
                        f"{segment.path}: record {span.seq} is a {type(head).__name__}, not a sample"
                    )
                nbytes = span.head_len + span.payload_len
                yield Held(span.seq, head, nbytes, span.seq in self._committed)

    def append(self, frames: Frames) -> int:
        """Write a message; returns its position. It is on the disk once `synced` has reached it."""
        position = self._log.append(frames)
        self._commits.written(position)
        return position

    def read(self, position: int) -> Data:
        """The message at a position; safe from any thread.

        Raises:
            SpoolError: it is damaged.
        """
        frames = self.frames(position)
        try:
            return decode_frames(frames)
        except ProtocolError as error:
            raise SpoolError(f"{self._log.folder}: record {position}: {error}") from error

    def frames(self, position: int) -> Frames:
        """The message at a position, as it came; safe from any thread.

        Raises:
            SpoolError: it is damaged.
        """
        with self._read_lock:
            return self._log.read(position).frames

    def commit(self, position: int, *, dropped: str = "") -> None:
        """A message came to its end, dropped for a reason or trained on; safe from any thread."""
        with self._lock:
            self._committed.add(position)
            if dropped:
                self._dropped.setdefault(dropped, SeqSet()).add(position)
            self._committing.append(position)
        self._commits.request()

    def rewind(self, committed: SeqSet) -> None:
        """The trainer went back to an earlier checkpoint: only these positions are committed."""
        with self._lock:
            self._committed = committed
            for reason, old in self._dropped.items():
                kept = self._dropped[reason] = SeqSet()
                for first, last in all_ranges(old):
                    for position in range(first, last + 1):
                        if position in committed:
                            kept.add(position)
            self._rewound = True
        self._commits.request()

    def take_committed(self) -> list[int]:
        """Positions whose commit reached the disk since the last call."""
        with self._lock:
            saved, self._saved = self._saved, []
        return saved

    def check(self) -> None:
        """Raise what the store's thread met, if anything (SpoolError)."""
        if self._commits.failure is not None:
            raise self._commits.failure

    def close(self) -> None:
        """Make everything durable and let go of the folder."""
        try:
            self._commits.close()
        finally:
            self._log.close()

    def _flush(self) -> None:
        self._log.sync()
        with self._lock:
            positions, self._committing = self._committing, []
            rewound, self._rewound = self._rewound, False
            cursor = cursor_of(self._committed, self._dropped)
        if positions or rewound:
            save(self._log.folder / "cursor.json", cursor)
            with self._lock:
                self._saved += positions

    def _done(self, position: int) -> None:
        self.synced = max(self.synced, position)
        self._progressed()
