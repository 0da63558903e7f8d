"""`SpoolIdentity`: under which names a spool's messages travel, and which of them are done with."""

from __future__ import annotations

import logging
from typing import NamedTuple

from trainer_bridge.clock import Clock
from trainer_bridge.errors import DamagedError
from trainer_bridge.folder_kind import PRODUCER
from trainer_bridge.messages import WireSet
from trainer_bridge.segment import Damage
from trainer_bridge.segment_log import SegmentLog
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Stream
from trainer_bridge.state_file import CursorFile, ProducerFile, cursor_of, load, save

log = logging.getLogger(__name__)

CURSOR = "cursor.json"


class SpoolIdentity(NamedTuple):
    """What opening a spool tells."""

    producer: bytes
    streams: list[Stream]
    """Epochs that may hold unsettled messages; the last begins now."""
    settled: SeqSet
    """Settled by earlier processes, or lost."""
    lost: list[Damage]
    """Not settled, and not readable."""
    faults: int
    """Notes that could not be read, and that the spool does without."""


def open_identity(spool: SegmentLog, clock: Clock) -> SpoolIdentity:
    """Read the notes beside the segments, and write down that a new epoch begins.

    Raises:
        SpoolError: `producer.json` is damaged, or a note cannot be read or written.
    """
    path = spool.folder / PRODUCER
    known = load(path, ProducerFile)
    cursor, faults = _cursor(spool)
    settled = SeqSet(spool.first - 1 if cursor is None else min(cursor.upto, spool.first - 1))
    if cursor is not None:
        # A crash of the machine may have taken back records that the cursor knows: their numbers are used
        # anew.
        settled.merge(WireSet(cursor.upto, cursor.ranges), 1, spool.last)
    lost = _lost(spool, settled)
    first = spool.last + 1
    old = [Stream(*pair) for pair in known.streams] if known is not None else []
    epoch = old[-1].epoch + 1 if old else 1
    if old and old[-1].first > first:
        log.warning(
            "%s ends with record %d, and %s says that there were records up to %d at least: the later ones "
            "are gone (a crash of the machine, or a file that was deleted), and their numbers are used anew",
            spool.folder,
            spool.last,
            PRODUCER,
            old[-1].first - 1,
        )
    ends = [stream.first for stream in old[1:]] + [first]
    kept = [s for s, end in zip(old, ends, strict=False) if s.first < end and end - 1 > settled.upto]
    streams = [*kept, Stream(epoch, first)]
    producer = known.producer if known is not None else clock.new_id()
    if cursor is not None and cursor.to_set().highest > spool.last:
        # Before a number is used anew: else it would count as settled at the next start.
        save(spool.folder / CURSOR, cursor_of(settled))
    # On the disk before anything is sent: an epoch is never used twice, even if a crash of the machine takes
    # back sequence numbers that were already on the wire.
    save(path, ProducerFile(producer=producer, streams=tuple((s.epoch, s.first) for s in streams)))
    return SpoolIdentity(bytes.fromhex(producer), streams, settled, lost, faults)


def _cursor(spool: SegmentLog) -> tuple[CursorFile | None, int]:
    path = spool.folder / CURSOR
    try:
        return load(path, CursorFile), 0
    except DamagedError as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        log.warning("%s. It was moved to %s: messages that were settled are sent once more", error, aside)
        return None, 1


def _lost(spool: SegmentLog, settled: SeqSet) -> list[Damage]:
    damage = list(spool.damage)
    if settled.upto < spool.first - 1:
        text = f"{spool.folder}: no file begins before record {spool.first}; {CURSOR} says {settled.upto}"
        damage.insert(0, Damage(1, spool.first - 1, text))
    lost = [
        Damage(first, last, each.text)
        for each in damage
        for first, last in settled.missing(each.first, each.last)
    ]
    for each in lost:
        settled.add_range(each.first, each.last)
    return lost
