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
from trainer_bridge.group_commit import GroupCommit
from trainer_bridge.messages import WireSet
from trainer_bridge.segment_log import SegmentLog
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Stream
from trainer_bridge.state_file import CursorFile, ProducerFile, cursor_of, load, save

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
    """Times that the disk did not take the note of what is settled; the samples are not concerned."""

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
        """A message that is not settled."""
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
        SpoolError: see `SegmentLog`.
    """

    def __init__(self, root: Path, *, durability: Durability, config: SenderConfig, clock: Clock) -> None:
        self._root = root
        self._config = config
        self._sync = durability == "sync"
        self._log = SegmentLog(root, segment_bytes=config.segment_bytes, now_ns=clock.now_ns())
        self._cache: dict[int, Frames] = {}
        self._cache_order: deque[int] = deque()
        self._cache_bytes = 0
        self.disk_faults = 0
        try:
            self._open_identity(clock)
        except Exception:
            self._log.close()
            raise
        self._saved = self.settled.upto
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
        seq = self._log.append(frames)
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

    def settle(self, settled: SeqSet) -> None:
        """Forget what is in the set; files go when everything in them is settled."""
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
            self._log.drop_below(settled.upto + 1)

    def checkpoint(self, settled: SeqSet) -> None:
        """Remember durably what is settled, if that has changed."""
        if settled.upto != self._saved:
            self._save_cursor(settled)

    def is_full(self, unsettled: int) -> bool:
        """True: no more is to be taken in until something settles."""
        return unsettled > 0 and self._log.nbytes >= self._config.spool_quota_bytes

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

    def _open_identity(self, clock: Clock) -> None:
        path = self._log.folder / "producer.json"
        known = load(path, ProducerFile)
        cursor = load(self._log.folder / "cursor.json", CursorFile)
        self.settled = SeqSet(self._log.first - 1)
        if cursor is not None:
            # A crash of the machine may have taken back records that the cursor knows: their numbers are
            # used anew.
            self.settled.merge(WireSet(cursor.upto, cursor.ranges), 1, self._log.last)
        first = self._log.last + 1
        old = [Stream(*pair) for pair in known.streams] if known is not None else []
        epoch = old[-1].epoch + 1 if old else 1
        ends = [stream.first for stream in old[1:]] + [first]
        kept = [s for s, end in zip(old, ends, strict=False) if s.first < end and end - 1 > self.settled.upto]
        self.streams = [*kept, Stream(epoch, first)]
        producer = known.producer if known is not None else clock.new_id()
        self.producer = bytes.fromhex(producer)
        # On the disk before anything is sent: an epoch is never used twice, even if a crash of the
        # machine takes
        # back sequence numbers that were already on the wire.
        save(path, ProducerFile(producer=producer, streams=tuple((s.epoch, s.first) for s in self.streams)))
        waiting = self._log.last - first_unsettled(self.settled, self._log.last) + 1
        if waiting > 0:
            log.info("spool %s: %d messages of earlier runs wait to be sent", self._root, waiting)

    def _save_cursor(self, settled: SeqSet) -> None:
        try:
            save(self._log.folder / "cursor.json", cursor_of(settled))
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


def first_unsettled(settled: SeqSet, last: int) -> int:
    """Lowest number up to `last` that is not in the set; `last + 1` if there is none."""
    return next((low for low, _ in settled.missing(1, last)), last + 1)
