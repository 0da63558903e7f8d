"""`Store`: the receiver's own copy of what arrived, and of what the consumer is done with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.codec import Data, Frames, decode_frames
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.errors import DamagedError, ProtocolError, SpoolError
from trainer_bridge.folder_kind import refuse_spool
from trainer_bridge.group_commit import GroupCommit
from trainer_bridge.messages import DataHead
from trainer_bridge.owners import Owners
from trainer_bridge.retention import Retention
from trainer_bridge.room import Room
from trainer_bridge.segment import Damage, Segment
from trainer_bridge.segment_log import SegmentLog
from trainer_bridge.seqset import SeqSet
from trainer_bridge.state_file import OwnersFile, load, save
from trainer_bridge.store_cursor import StoreCursor
from trainer_bridge.store_damage import Loss, StoreDamage
from trainer_bridge.trimmed import Page, Trimmed

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""What the disk refused while something was to be deleted is tried again after this time."""


class Held(NamedTuple):
    """A record found at the start."""

    position: int
    head: DataHead
    nbytes: int
    committed: bool
    dropped: str
    """Why, if it was. Empty: it was trained on, or is not committed."""


class Store:
    """A `SegmentLog` of all that was accepted, a cursor of what is committed, and whose producers are whose.

    Args:
        root: the folder; segments go into `root/samples`.
        progressed: called in the store's own thread when the disk has taken more; then ask `synced` and
            `take_committed`.

    Raises:
        SpoolError: see `SegmentLog`; the folder is a sender's spool; one of the files beside the segments is
            damaged, or says that segments are missing which nobody can do without.
    """

    def __init__(
        self, root: Path, *, config: ReceiverConfig, now_ns: int, progressed: Callable[[], None]
    ) -> None:
        refuse_spool(root)
        self._log = SegmentLog(root, segment_bytes=config.segment_bytes, now_ns=now_ns)
        self._progressed = progressed
        self._read_lock = threading.Lock()
        self.steady = threading.RLock()
        """Held by whoever goes through the records: nothing is deleted meanwhile."""
        self.room = Room(
            self._log.folder, quota_bytes=config.store_quota_bytes, segment_bytes=config.segment_bytes
        )
        self._tried = (-1, -1)
        """How things stood when the oldest segment could not be deleted."""
        self._refused = False
        self._again_s: float | None = None
        """When to try again what the disk refused."""
        self.faults = 0
        """Times that a segment could not be deleted, though nothing in it is to be kept."""
        try:
            self.trimmed = Trimmed(self._log.folder, remember=config.remember_rollouts)
            """What is known of records that were deleted."""
            self._finish_trim()
            self.retention = Retention(self._log.folder, config.keep_committed, config.keep_checkpoints)
            self._cursor = StoreCursor(self._log.folder)
            self._cursor.forget(self.trimmed.upto)
            owners = load(self._log.folder / "owners.json", OwnersFile)
            self.damage = StoreDamage(self._cursor, self._find_damage())
        except OSError:
            self._log.close()
            raise
        self.synced = self._log.last
        """Positions up to this are on the disk."""
        self._measure()
        self.owners = Owners(owners, changed=self._request)
        """Written down when they change."""
        self._commits = GroupCommit(flush=self._flush, done=self._done, name="trainer-bridge store")

    @property
    def last(self) -> int:
        """Position of the last record; positions count from 1."""
        return self._log.last

    @property
    def count(self) -> int:
        """Records in it that can be read, as far as is known."""
        here = self.last - self.trimmed.upto
        return here - self.damage.count(self.trimmed.upto + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the segments."""
        return self._log.nbytes

    @property
    def torn_bytes(self) -> int:
        """Bytes of a torn record that opening cut off."""
        return self._log.torn_bytes

    def held(self) -> Iterator[Held]:
        """Every record, in order; reads the heads only. Nothing may be appended meanwhile; hold `steady`.

        What cannot be read is left out: see `StoreDamage`.
        """
        for segment in self._log.segments():
            for position, nbytes, head in self.damage.heads(segment):
                committed = position in self._cursor
                dropped = self._cursor.why_dropped(position) if committed else ""
                yield Held(position, head, nbytes, committed, dropped)

    def take_losses(self) -> list[Loss]:
        """What was lost since the last call; ask after `held`. Dropped as `UNREADABLE` already."""
        losses = self.damage.take_losses()
        if losses:
            self._commits.request()
        return losses

    def append(self, frames: Frames) -> int:
        """Write a message; returns its position. It is on the disk once `synced` has reached it."""
        closed = self._log.closed_bytes
        position = self._log.append(frames)
        if self._log.closed_bytes != closed:
            self._measure()  # at once: by the next flush far more may have come
        self._commits.written(position)
        return position

    def read(self, position: int) -> Data:
        """The message at a position; safe from any thread.

        Raises:
            DamagedError: it is damaged or missing.
            SpoolError: it cannot be read just now.
        """
        with self._read_lock:
            try:
                frames = self._log.read(position).frames
            except DamagedError:
                self.damage.note(position)
                raise
        try:
            return decode_frames(frames)
        except ProtocolError as error:
            self.damage.note(position)
            raise DamagedError(f"{self._log.folder}: record {position}: {error}") from error

    def commit_many(self, ends: Iterable[tuple[int, str]]) -> None:
        """Messages came to their end together, a step: (position, why dropped; "" if trained on).

        After a crash all of them are committed or none. Safe from any thread.
        """
        self._cursor.commit(ends)
        self._commits.request()

    def checkpoint_saved(self, state: ReceiverState) -> None:
        """The trainer can go back to this checkpoint, and needs nothing before it."""
        self.retention.saved(state)
        self._commits.request()

    def rewind(self, committed: SeqSet, state: ReceiverState) -> None:
        """The trainer went back to an earlier checkpoint: only these positions are committed."""
        self.retention.loaded(state)
        committed.raise_to(self.trimmed.upto)
        self.damage.keep_aside(committed)
        self._cursor.rewind(committed)
        self._commits.request()

    def begin_trimming(self) -> None:
        """What was found at the start is taken in: from now on, what nobody needs is deleted."""
        self._commits.request()

    def tick(self, now_s: float) -> None:
        """Called now and then: what could not be deleted is tried again after `RETRY_S`."""
        if not self._refused:
            return
        if self._again_s is None:
            self._again_s = now_s + RETRY_S
        elif now_s >= self._again_s:
            self._again_s, self._refused = None, False
            self._commits.request()

    def take_committed(self) -> list[int]:
        """Positions whose commit reached the disk since the last call."""
        return self._cursor.take_saved()

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

    def _request(self) -> None:
        self._commits.request()

    def _flush(self) -> None:
        # First whose a sample is, then the sample: what is called stored has an owner after a crash too.
        owners = self.owners.take_file()
        if owners is not None:
            save(self._log.folder / "owners.json", owners)
        # The snapshot first: what it calls committed is on the disk before the cursor says so.
        snapshot = self._cursor.snapshot()
        self._log.sync()
        if snapshot is not None:
            self._cursor.save(snapshot)
        if not self._refused:
            try:
                self.retention.save()
                self._trim()
            except OSError as error:
                self._note_fault(error)
        self._measure()

    def _measure(self) -> None:
        closed = self._log.closed_bytes
        self.room.measure(closed_bytes=closed, open_bytes=self._log.nbytes - closed)

    def _trim(self) -> None:
        """Delete the oldest segment if nothing in it is to be kept.

        One at a time, the next one at the next flush: acknowledgements do not wait for a long backlog.
        """
        if self.retention.keep == "all":
            return
        with self.steady:
            segment = self._log.oldest
            now = (self.retention.news, 0 if segment is None else segment.first)
            if now == self._tried:
                return
            # By what is on the disk: of a step that is committed meanwhile, one half would go as committed,
            # and a crash would leave the other half waiting for it.
            if segment is None or not self._cursor.holds(segment.first, segment.last):
                return
            # Its heads are read now: once, until something has changed.
            self._tried = now
            if not self._delete(segment):
                return
        self._commits.request()

    def _note_fault(self, error: OSError) -> None:
        if not self.faults:
            log.warning("nothing can be deleted from %s: %s; it is tried again", self._log.folder, error)
        self.faults += 1
        self._tried = (-1, -1)
        self._refused = True

    def _delete(self, segment: Segment) -> bool:
        page = Page()
        for position, _, head in self.damage.heads(segment):
            page.note(head, dropped=bool(self._cursor.why_dropped(position)))
        if not self.retention.allows(page.done):
            return False
        dropped = self._cursor.count_dropped(segment.first, segment.last)
        self.trimmed.add(page, upto=segment.last, dropped=dropped)
        self._cursor.forget(segment.last)
        with self._read_lock:
            self._log.drop_below(segment.last + 1)
        log.info("%s was deleted: records up to %d are done with", segment.path, segment.last)
        return True

    def _finish_trim(self) -> None:
        """A crash came between the note that records are gone and their end."""
        if self._log.last < self.trimmed.upto:
            raise SpoolError(
                f"{self._log.folder}: records up to {self.trimmed.upto} were deleted as done with, and the "
                f"last segment ends with record {self._log.last}: segments are missing. Restore them, or "
                "begin with an empty folder"
            )
        self._log.drop_below(self.trimmed.upto + 1)

    def _done(self, position: int) -> None:
        self.synced = max(self.synced, position)
        self._progressed()

    def _find_damage(self) -> list[Damage]:
        """What opening the segments found, and what the files beside them know to be missing."""
        folder, first, last = self._log.folder, self._log.first, self._log.last
        found = list(self._log.damage)
        if first > self.trimmed.upto + 1:
            text = f"{folder}: no file begins before record {first}"
            found.insert(0, Damage(self.trimmed.upto + 1, first - 1, text))
        if self._cursor.highest > last:
            text = f"{folder}: cursor.json knows of record {self._cursor.highest}, and the last one is {last}"
            found.append(Damage(last + 1, self._cursor.highest, text))
            # Numbers are used once: else new records would count as committed.
            self._log.skip_to(self._cursor.highest + 1)
        return found
