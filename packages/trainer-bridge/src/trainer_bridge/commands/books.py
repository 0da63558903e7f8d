"""What spools and stores hold, read from their files for an audit. Changes nothing, takes no lock."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from trainer_bridge.codec import decode_frames
from trainer_bridge.dead_letters import FILE as LETTERS
from trainer_bridge.dead_letters import DeadLetter, read_letters
from trainer_bridge.errors import ProtocolError
from trainer_bridge.segment_log import segment_paths
from trainer_bridge.seqset import SeqSet
from trainer_bridge.state_file import CursorFile, ProducerFile, load
from trainer_bridge.stored import find_segments, scan_segments


class Entry(NamedTuple):
    """One intact record."""

    position: int
    """Its number in the folder; in a spool, the sequence number of its message."""
    producer: bytes
    sequence: int
    rollout_id: bytes
    attempt: int


class Book(msgspec.Struct, kw_only=True):
    """One folder of segments, or one file."""

    path: Path
    producer: bytes | None
    """Of a spool. None: a store, or a single file."""
    loose: bool
    """True: a single file, with no word of what became of it."""
    entries: list[Entry] = []
    done: SeqSet = msgspec.field(default_factory=SeqSet)
    """Positions that are settled (spool) or committed (store)."""
    dropped: dict[int, str] = {}
    """Store: of the committed positions, those that were dropped -> reason."""
    letters: tuple[DeadLetter, ...] = ()
    last: int = 0
    """Highest position that ever was, as far as the files tell."""
    samples: int = 0
    tokens: int = 0
    torn: list[str] = []
    """Torn ends, as a writer leaves them that is killed or still writing: what was in them was confirmed to
    nobody."""
    faults: list[str] = []
    """Damage."""

    @property
    def kind(self) -> str:
        """For people."""
        if self.loose:
            return "file"
        return "store" if self.producer is None else "spool"


def read_books(path: Path) -> list[Book]:
    """The books at a path: one segment, the folder of a spool or store, or any folder above such.

    Spools are read first: whatever they call settled while both are in use is in the store already.

    Raises:
        SpoolError: there are none, or a file cannot be read.
    """
    if path.is_file():
        return [_read(path, loose=True)]
    folders = sorted({found.parent for found in path.rglob("segment-*.tbs")}) if path.is_dir() else []
    if not folders:
        find_segments(path)  # says what is wrong
    spools = [folder for folder in folders if (folder / "producer.json").exists()]
    stores = [folder for folder in folders if folder not in spools]
    return [_read(folder, loose=False) for folder in (*spools, *stores)]


def _read(path: Path, *, loose: bool) -> Book:
    book = Book(path=path, producer=None, loose=loose)
    if not loose:
        identity = load(path / "producer.json", ProducerFile)
        cursor = load(path / "cursor.json", CursorFile)
        book.producer = bytes.fromhex(identity.producer) if identity is not None else None
        if cursor is not None:
            book.done = cursor.to_set()
            for reason, ranges in cursor.dropped.items():
                for first, last in ranges:
                    book.dropped.update(dict.fromkeys(range(first, last + 1), reason))
    _read_segments(book)
    if book.done.highest > book.last:
        book.faults.append(
            f"{path}: the cursor knows of record {book.done.highest}, and the last record is {book.last}"
        )
    if not loose and book.producer is None and (path.parent / LETTERS).exists():
        book.letters = read_letters(path.parent / LETTERS)
        book.dropped.update({each.position: each.reason for each in book.letters if each.position})
    return book


def _read_segments(book: Book) -> None:
    expected: int | None = None
    last_path = book.path if book.loose else segment_paths(book.path)[-1]
    for segment, fault, rest in scan_segments(book.path):
        if expected is not None and segment.first != expected:
            book.faults.append(f"{segment.path}: begins with record {segment.first}, not {expected}")
        if fault.endswith("cut off") and segment.path == last_path:
            book.torn.append(f"{segment.path}: {fault} ({rest} bytes)")
        elif fault:
            book.faults.append(f"{segment.path}: {fault} ({rest} bytes from there on are not readable)")
        for record in segment.records():
            try:
                data = decode_frames(record.frames)
            except ProtocolError as error:
                book.faults.append(f"{segment.path}: record {record.seq}: {error}")
                continue
            head = data.head
            book.entries.append(
                Entry(record.seq, head.producer, head.sequence, head.rollout_id, head.attempt)
            )
            book.samples += len(data.samples)
            book.tokens += sum(len(sample) for sample in data.samples)
        book.last = max(book.last, segment.last)
        expected = segment.last + 1
