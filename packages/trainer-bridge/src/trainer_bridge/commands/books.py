"""What spools and stores hold, read from their files for an audit. Changes nothing, takes no lock."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from trainer_bridge.codec import decode_frames
from trainer_bridge.dead_letters import FILE as LETTERS
from trainer_bridge.dead_letters import DeadLetter, read_letters
from trainer_bridge.errors import ProtocolError, SpoolError
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session.watermark import Watermark
from trainer_bridge.state_file import CursorFile, ProducerFile, TrimmedFile, load
from trainer_bridge.stored import find_segments, scan_segments
from trainer_bridge.trimmed import FILE as TRIMMED
from trainer_bridge.trimmed import entries_of, messages_of, rollouts_in

TRIES = 8
"""A running receiver may delete a segment while it is read."""


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
    trimmed: int = 0
    """Store: records up to this one were deleted, all of them committed."""
    trimmed_messages: Watermark = msgspec.field(default_factory=Watermark)
    trimmed_rollouts: list[tuple[bytes, int]] = []
    """(rollout id, attempt) of the latest of them."""
    trimmed_drops: dict[str, int] = {}
    """How many of them were dropped, by reason."""
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
    for _ in range(TRIES):
        before = None if loose else load(path / TRIMMED, TrimmedFile)
        try:
            book = _read_once(path, loose=loose)
        except SpoolError:
            if loose or load(path / TRIMMED, TrimmedFile) == before:
                raise
            continue  # a running receiver has deleted a segment meanwhile
        if loose or load(path / TRIMMED, TrimmedFile) == before:
            if before is not None:
                _note_trimmed(book, before)
            return book
    raise SpoolError(f"{path}: a running receiver deletes segments faster than they are read; try again")


def _read_once(path: Path, *, loose: bool) -> Book:
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


def _note_trimmed(book: Book, file: TrimmedFile) -> None:
    book.trimmed = file.upto
    book.trimmed_messages = messages_of(book.path, file)
    ended = rollouts_in(entries_of(book.path, file))
    book.trimmed_rollouts = [(each.rollout_id, each.attempt) for each in ended]
    book.trimmed_drops = file.dropped
    # A crash may have come between the note that they are gone and their end; the next start deletes them.
    book.entries = [entry for entry in book.entries if entry.position > file.upto]
    if book.last < file.upto:
        book.faults.append(
            f"{book.path}: records up to {file.upto} were deleted, and the last record is {book.last}: "
            "segments are missing"
        )


def _read_segments(book: Book) -> None:
    for segment, faults, torn in scan_segments(book.path):
        book.faults += faults
        book.torn += [torn] if torn else []
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
