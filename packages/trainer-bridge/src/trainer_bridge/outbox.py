"""Where messages wait until they are settled: in memory, or in a spool on disk."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Protocol

from trainer_bridge.clock import Clock
from trainer_bridge.codec import Frames
from trainer_bridge.config import Durability, SenderConfig
from trainer_bridge.errors import NotDurableError, SpoolError
from trainer_bridge.folder_kind import refuse_store
from trainer_bridge.group_commit import GroupCommit
from trainer_bridge.segment_log import SegmentLog
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Stream
from trainer_bridge.spool_identity import CURSOR, open_identity
from trainer_bridge.state_file import cursor_of, save

log = logging.getLogger(__name__)

CACHED_BYTES = 64 << 20
"""Messages this recent are sent from memory; older ones are read back from the spool."""


class Outbox(Protocol):
    """Numbered messages of one producer. Not thread-safe, but for `wait_durable`."""

    producer: bytes
    streams: list[Stream]
    """Epochs that may hold unsettled messages; the last is this process's own."""
    settled: SeqSet
    """What was settled when the outbox was opened."""
    disk_faults: int
    """Times that the disk did not take the note of what is settled or did not give it back, did not delete
    what is settled, or did not give back a message just then; no message is lost by that."""
    lost: int
    """Messages whose records are damaged or missing: nobody can send them. They count as settled."""

    @property
    def last(self) -> int:
        """Highest sequence number; `streams[0].first - 1` if there is none."""
        ...

    def append(self, frames: Frames) -> None:
        """Take a message in, as number `last + 1`. Raises SpoolError if the disk does not take it."""
        ...

    def wait_durable(self, seq: int) -> None:
        """Return when the message is as durable as was asked for."""
        ...

    def frames(self, seq: int) -> Frames:
        """A message that is not settled.

        Raises:
            DamagedError: it is lost.
            SpoolError: it cannot be read just now.
        """
        ...

    def mark_lost(self, seq: int, text: str) -> None:
        """`frames` raised DamagedError for this message: count it."""
        ...

    def take_losses(self) -> list[str]:
        """What was lost since the last call, and where, for people."""
        ...

    def settle(self, settled: SeqSet) -> None:
        """Forget what is in the set."""
        ...

    def checkpoint(self, settled: SeqSet) -> None:
        """Remember durably what is settled. Called now and then; missing it costs repeated sending only."""
        ...

    def is_full(self, unsettled: int) -> bool:
        """True: no more is to be taken in until something settles."""
        ...

    def place(self) -> str:
        """Where unsettled messages lie, for people."""
        ...

    def close(self, settled: SeqSet) -> None:
        """Make everything durable and let go."""
        ...


class MemoryOutbox:
    """Messages in this process's memory: lost with it."""

    def __init__(self, config: SenderConfig, clock: Clock) -> None:
        self._config = config
        self.producer = bytes.fromhex(clock.new_id())
        self.streams = [Stream(1, 1)]
        self.settled = SeqSet()
        self.disk_faults = 0
        self.lost = 0
        self._frames: dict[int, Frames] = {}
        self._bytes = 0
        self._last = 0

    @property
    def last(self) -> int:
        """Highest sequence number."""
        return self._last

    def append(self, frames: Frames) -> None:
        """Take a message in."""
        self._last += 1
        self._frames[self._last] = frames
        self._bytes += frames.nbytes

    def wait_durable(self, seq: int) -> None:
        """Nothing to wait for."""

    def frames(self, seq: int) -> Frames:
        """A message that is not settled."""
        return self._frames[seq]

    def mark_lost(self, seq: int, text: str) -> None:
        """Memory loses nothing."""

    def take_losses(self) -> list[str]:
        """Nothing."""
        return []

    def settle(self, settled: SeqSet) -> None:
        """Forget what is in the set."""
        highest = settled.highest
        gone: list[int] = []
        for seq in self._frames:  # rising
            if seq > highest:
                break
            if seq in settled:
                gone.append(seq)
        for seq in gone:
            self._bytes -= self._frames.pop(seq).nbytes

    def checkpoint(self, settled: SeqSet) -> None:
        """Nothing to remember beyond this process."""

    def is_full(self, unsettled: int) -> bool:
        """True: no more is to be taken in until something settles."""
        return unsettled >= self._config.max_unsettled or self._bytes >= self._config.max_unsettled_bytes

    def place(self) -> str:
        """Where unsettled messages lie, for people."""
        return "the memory of this process (no spool was given): they are lost when it ends"

    def close(self, settled: SeqSet) -> None:
        """Forget everything."""
        self._frames.clear()


class SpoolOutbox:
    """Messages in a folder: they survive this process, and the next one to open the folder sends them.

    Args:
        root: folder of the spool; made if needed.
        durability: when a message counts as accepted.

    Raises:
        SpoolError: see `SegmentLog`; the folder is a receiver's store; `producer.json` is damaged.
    """

    def __init__(self, root: Path, *, durability: Durability, config: SenderConfig, clock: Clock) -> None:
        self._root = root
        self._config = config
        self._sync = durability == "sync"
        refuse_store(root)
        self._log = SegmentLog(root, segment_bytes=config.segment_bytes, now_ns=clock.now_ns())
        self._cache: dict[int, Frames] = {}
        self._cache_order: deque[int] = deque()
        self._cache_bytes = 0
        try:
            identity = open_identity(self._log, clock)
        except Exception:
            self._log.close()
            raise
        self.producer = identity.producer
        self.streams = identity.streams
        self.settled = identity.settled
        self.disk_faults = identity.faults
        self.lost = sum(each.last - each.first + 1 for each in identity.lost)
        self._losses = [each.text for each in identity.lost]
        waiting = self.last - self.settled.count(1, self.last)
        if waiting:
            log.info("spool %s: %d messages of earlier runs wait to be sent", root, waiting)
        self._saved = self.settled.upto
        self._settled = self.settled
        self._unsettled_bytes: int | None = None
        """None: to be counted."""
        self._commits: GroupCommit | None = None
        if durability != "none":
            self._commits = GroupCommit(
                flush=self._log.sync, done=lambda _: None, name="trainer-bridge spool"
            )

    @property
    def last(self) -> int:
        """Highest sequence number."""
        return self._log.last

    @property
    def torn_bytes(self) -> int:
        """Bytes of a torn record that opening cut off."""
        return self._log.torn_bytes

    def append(self, frames: Frames) -> None:
        """Take a message in."""
        if self._commits is not None and self._commits.failure is not None:
            raise SpoolError(
                f"{self._log.folder}: the disk failed to flush earlier samples ({self._commits.failure}); "
                "nothing more is taken"
            ) from self._commits.failure
        before = self._log.nbytes
        seq = self._log.append(frames)
        if self._unsettled_bytes is not None:
            self._unsettled_bytes += self._log.nbytes - before
        if self._commits is not None:
            self._commits.written(seq)
        self._cache[seq] = frames
        self._cache_order.append(seq)
        self._cache_bytes += frames.nbytes
        while self._cache_bytes > CACHED_BYTES:
            self._uncache(self._cache_order.popleft())

    def wait_durable(self, seq: int) -> None:
        """Return when the message is as durable as was asked for."""
        if self._commits is None or not self._sync:
            return
        try:
            self._commits.wait(seq)
        except Exception as error:
            raise NotDurableError(
                f"{self._log.folder}: the samples were taken over and will be sent, but the disk did not "
                f"confirm them: {error}"
            ) from error

    def frames(self, seq: int) -> Frames:
        """A message that is not settled."""
        cached = self._cache.get(seq)
        return cached if cached is not None else self._log.read(seq).frames

    def mark_lost(self, seq: int, text: str) -> None:
        """The record of this message is damaged or missing: count it."""
        self.lost += 1
        self._losses.append(text)

    def take_losses(self) -> list[str]:
        """What was lost since the last call, and where, for people."""
        losses, self._losses = self._losses, []
        return losses

    def settle(self, settled: SeqSet) -> None:
        """Forget what is in the set; files go when everything in them is settled."""
        self._settled = settled
        self._unsettled_bytes = None
        while self._cache_order and self._cache_order[0] <= settled.upto:
            self._uncache(self._cache_order.popleft())
        segments = iter(self._log.segments())
        oldest = next(segments)
        if (
            oldest.last <= settled.upto
            and next(segments, None) is not None
            and not self._config.keep_segments
        ):
            self._save_cursor(settled)
            try:
                self._log.drop_below(settled.upto + 1)
            except OSError as error:
                # The next opening deletes what is left.
                if not self.disk_faults:
                    log.warning("cannot delete what is settled in %s: %s", self._log.folder, error)
                self.disk_faults += 1

    def checkpoint(self, settled: SeqSet) -> None:
        """Remember durably what is settled, if that has changed."""
        if settled.upto != self._saved:
            self._save_cursor(settled)

    def is_full(self, unsettled: int) -> bool:
        """True: no more is to be taken in until something settles."""
        quota = self._config.spool_quota_bytes
        if not unsettled or self._log.nbytes < quota:
            return False
        if self._unsettled_bytes is None:
            self._unsettled_bytes = self._count_unsettled()
        return self._unsettled_bytes >= quota

    def place(self) -> str:
        """Where unsettled messages lie, for people."""
        return f"{self._log.folder}: the next sender that opens spool {self._root} sends them"

    def close(self, settled: SeqSet) -> None:
        """Make everything durable and let go."""
        try:
            if self._commits is not None:
                self._commits.close()
            self._save_cursor(settled)
        finally:
            self._log.close()

    # -- inside

    def _count_unsettled(self) -> int:
        """Bytes of the records that are not settled; what else is on the disk counts against no quota.

        Settled records lie there until all of their segment is settled, and with `keep_segments` for ever.
        """
        nbytes = 0
        for segment in self._log.segments():
            if segment.last <= self._settled.upto:
                continue
            for first, last in self._settled.missing(segment.first, segment.last):
                end = last + 1 - segment.first
                start = segment.offsets[first - segment.first]
                nbytes += (segment.offsets[end] if end < len(segment.offsets) else segment.size) - start
        return nbytes

    def _save_cursor(self, settled: SeqSet) -> None:
        try:
            save(self._log.folder / CURSOR, cursor_of(settled))
        except SpoolError as error:
            # Without it some samples are sent once more after a restart. Giving up here would keep a full
            # disk full: what follows may delete segments.
            if not self.disk_faults:
                log.warning("%s; trying again with each heartbeat", error)
            self.disk_faults += 1
            return
        self._saved = settled.upto

    def _uncache(self, seq: int) -> None:
        self._cache_bytes -= self._cache.pop(seq).nbytes
