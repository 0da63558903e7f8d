"""`DeadLetters`: a catalogue of what nobody could use, with the reason, in sqlite."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from trainer_bridge.errors import ProtocolError, SpoolError, reason_of
from trainer_bridge.folder_kind import LETTERS
from trainer_bridge.member import Member
from trainer_bridge.messages import DataHead
from trainer_bridge.payload import Buffer
from trainer_bridge.store_damage import UNREADABLE, Loss

FILE = LETTERS
MAX_LETTERS = 100_000
"""Entries kept; a hostile peer must not fill the disk. Further ones are counted in `not_kept`."""
MAX_BYTES = 64 << 20
"""Of the whole catalogue."""
HEAD_BYTES = 4096
"""Of a head that cannot be read, so much is kept to look at."""
DETAIL_CHARS = 2000
"""Of a reason in words: a trainer may give an exception's text with a step's tensors in it."""
_PAGE = 4096

_SCHEMA = """
create table if not exists letters (
  id integer primary key,
  at_ns integer not null,
  reason text not null,
  detail text not null,
  producer text not null,
  epoch integer not null,
  sequence text not null,
  rollout_id text not null,
  group_id text not null,
  attempt integer not null,
  position integer not null,
  times integer not null,
  head blob not null,
  unique (reason, producer, epoch, sequence, head)
) strict;
"""
_ADD = """
insert into letters
  (at_ns, reason, detail, producer, epoch, sequence, rollout_id, group_id, attempt, position, times, head)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?)
on conflict do update set times = times + 1, at_ns = excluded.at_ns, detail = excluded.detail
"""
_ALL = """
select reason, detail, at_ns, producer, epoch, sequence, rollout_id, group_id, attempt, position, times, head
from letters order by id
"""


_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = logging.getLogger(__name__)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One message that nobody could use."""

    reason: str
    """`nacked`: given back too often. `unreadable`: damaged in the store. Else the name of the wire error."""
    detail: str
    """For people; of `nacked`, the last reason that was given."""
    at_ns: int
    """When it was last met, Unix nanoseconds."""
    producer: str = ""
    """Producer id in hex. Empty: the message could not be read."""
    epoch: int = 0
    sequence: int = 0
    """0: the message could not be read."""
    rollout_id: str = ""
    group_id: str = ""
    attempt: int = 0
    position: int = 0
    """Record of the store that holds the message, byte for byte. 0: it was not stored."""
    times: int = 1
    """How often it was met; a sender repeats what is refused."""
    head: bytes = b""
    """Beginning of the head frame of a message that was not stored."""


def letter_of(member: Member, reason: str, detail: str, now_ns: int) -> DeadLetter:
    """For a rollout that was accepted."""
    return DeadLetter(
        reason=reason,
        detail=detail,
        at_ns=now_ns,
        producer=member.identity.producer.hex(),
        epoch=member.identity.epoch,
        sequence=member.identity.sequence,
        rollout_id=member.rollout_id.hex(),
        group_id=member.group_id.hex(),
        attempt=member.attempt,
        position=member.position,
    )


def letter_of_loss(loss: Loss, now_ns: int) -> DeadLetter:
    """For records of the store that are damaged or missing; the letter's position is that of the first."""
    count = loss.damage.last - loss.damage.first + 1
    detail = loss.damage.text if count == 1 else f"{count} records: {loss.damage.text}"
    position = loss.damage.first
    if loss.head is None:
        return DeadLetter(reason=UNREADABLE, detail=detail, at_ns=now_ns, position=position)
    return _letter_of_head(loss.head, UNREADABLE, detail, now_ns, position=position)


def letter_of_refusal(
    head: DataHead | None, frames: Sequence[Buffer], error: ProtocolError, now_ns: int
) -> DeadLetter:
    """For a message that is not valid.

    Args:
        head: None: not even that could be read.
        frames: as they came.
        error: the rule that it breaks.
        now_ns: Unix nanoseconds.
    """
    reason = reason_of(error.code)
    raw = bytes(frames[0][:HEAD_BYTES]) if frames else b""
    if head is None:
        return DeadLetter(reason=reason, detail=error.detail, at_ns=now_ns, head=raw)
    return _letter_of_head(head, reason, error.detail, now_ns, raw=raw)


def _letter_of_head(
    head: DataHead, reason: str, detail: str, now_ns: int, *, position: int = 0, raw: bytes = b""
) -> DeadLetter:
    return DeadLetter(
        reason=reason,
        detail=detail,
        at_ns=now_ns,
        producer=head.producer.hex(),
        epoch=head.epoch,
        sequence=head.sequence,
        rollout_id=head.rollout_id.hex(),
        group_id=head.group_id.hex(),
        attempt=head.attempt,
        position=position,
        head=raw,
    )


class DeadLetters:
    """Safe from any thread.

    Args:
        folder: the store's. None: in memory, until the receiver is closed. A damaged file there is moved
            aside, and another one begun.

    Raises:
        SpoolError: the file cannot be opened.
    """

    def __init__(self, folder: Path | None) -> None:
        self._where = ":memory:" if folder is None else str(folder / FILE)
        self._lock = threading.Lock()
        self.not_kept = 0
        """Letters that were not written: there are `MAX_LETTERS`, or `MAX_BYTES`, or the disk did not take
        them."""
        try:
            self._db, self._count = _open(self._where)
        except sqlite3.Error as error:
            if folder is None or error.sqlite_errorcode not in _DAMAGED:
                raise SpoolError(f"cannot open {self._where}: {error}") from error
            aside = _set_aside(folder)
            log.warning("%s is damaged (%s): it was moved to %s, and begins anew", self._where, error, aside)
            self.not_kept += 1
            self._db, self._count = _open(self._where)

    def add(self, letter: DeadLetter) -> None:
        """Write one down; a message that is met again counts up. What cannot be kept is counted.

        Nothing is raised: a receiver goes on without its catalogue.
        """
        with self._lock:
            if self._count >= MAX_LETTERS:
                self._lose(f"there are {MAX_LETTERS} letters")
                return
            try:
                cursor = self._db.execute(_ADD, _row(letter))
            except sqlite3.Error as error:
                self._lose(str(error))
            else:
                self._count = max(self._count, cursor.lastrowid or 0)

    def all(self) -> tuple[DeadLetter, ...]:
        """Everything written down, oldest first.

        Raises:
            SpoolError: the file cannot be read.
        """
        with self._lock:
            return _all(self._db, self._where)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def _lose(self, why: str) -> None:
        if not self.not_kept:
            log.warning("%s takes no more dead letters (counted from now on): %s", self._where, why)
        self.not_kept += 1


def read_letters(path: Path) -> tuple[DeadLetter, ...]:
    """Everything in a catalogue that may be in use; changes nothing.

    Raises:
        SpoolError: the file cannot be read, or is none of ours.
    """
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise SpoolError(f"cannot open {path}: {error}") from error
    with closing(db):
        return _all(db, str(path))


def _open(where: str) -> tuple[sqlite3.Connection, int]:
    db = sqlite3.connect(where, check_same_thread=False, isolation_level=None)
    try:
        db.execute(f"pragma page_size = {_PAGE}")
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = normal")
        db.execute(f"pragma max_page_count = {MAX_BYTES // _PAGE}")
        db.execute(_SCHEMA)
        (count,) = db.execute("select count(*) from letters").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db, count


def _set_aside(folder: Path) -> Path:
    path = folder / FILE
    aside = path.with_suffix(".damaged")
    path.replace(aside)
    for rest in ("-wal", "-shm"):
        path.with_name(FILE + rest).unlink(missing_ok=True)
    return aside


def _row(letter: DeadLetter) -> tuple[object, ...]:
    # sqlite has no unsigned 64-bit integers: the sequence is text, others are wrapped. Text from outside may
    # hold halves of surrogate pairs.
    detail = letter.detail.encode("utf-8", "replace").decode()
    if len(detail) > DETAIL_CHARS:
        detail = f"{detail[:DETAIL_CHARS]}... ({len(detail)} characters)"
    return (
        letter.at_ns,
        letter.reason,
        detail,
        letter.producer,
        _signed(letter.epoch),
        str(letter.sequence),
        letter.rollout_id,
        letter.group_id,
        _signed(letter.attempt),
        letter.position,
        letter.head[:HEAD_BYTES],
    )


def _signed(n: int) -> int:
    return n - (1 << 64) if n >> 63 else n


def _unsigned(n: int) -> int:
    return n + (1 << 64) if n < 0 else n


def _all(db: sqlite3.Connection, where: str) -> tuple[DeadLetter, ...]:
    try:
        rows = db.execute(_ALL).fetchall()
    except sqlite3.Error as error:
        raise SpoolError(f"cannot read {where}: {error}") from error
    letters: list[DeadLetter] = []
    for row in rows:
        named = dict(zip(DeadLetter.__struct_fields__, row, strict=True))
        exact = {name: _unsigned(int(named[name])) for name in ("epoch", "sequence", "attempt")}
        letters.append(msgspec.convert({**named, **exact}, DeadLetter))
    return tuple(letters)
