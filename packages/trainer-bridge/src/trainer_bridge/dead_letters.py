"""`DeadLetters`: a catalogue of what nobody could use, with the reason, in sqlite."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from trainer_bridge.errors import ProtocolError, SpoolError, reason_of
from trainer_bridge.member import Member
from trainer_bridge.messages import DataHead
from trainer_bridge.payload import Buffer

FILE = "dead_letters.sqlite"
MAX_LETTERS = 100_000
"""Entries kept; a hostile peer must not fill the disk. Further ones are counted in `not_kept`."""
HEAD_BYTES = 4096
"""Of a head that cannot be read, so much is kept to look at."""

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
    return DeadLetter(
        reason=reason,
        detail=error.detail,
        at_ns=now_ns,
        producer=head.producer.hex(),
        epoch=head.epoch,
        sequence=head.sequence,
        rollout_id=head.rollout_id.hex(),
        group_id=head.group_id.hex(),
        attempt=head.attempt,
        head=raw,
    )


class DeadLetters:
    """Safe from any thread.

    Args:
        folder: the store's. None: in memory, until the receiver is closed.

    Raises:
        SpoolError: the file cannot be opened, or is none of ours.
    """

    def __init__(self, folder: Path | None) -> None:
        self._where = ":memory:" if folder is None else str(folder / FILE)
        self._lock = threading.Lock()
        self.not_kept = 0
        """Letters that were not written because there are `MAX_LETTERS`."""
        try:
            self._db = sqlite3.connect(self._where, check_same_thread=False, isolation_level=None)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.execute(_SCHEMA)
            (self._count,) = self._db.execute("select count(*) from letters").fetchone()
        except sqlite3.Error as error:
            raise SpoolError(f"cannot open {self._where}: {error}") from error

    def add(self, letter: DeadLetter) -> None:
        """Write one down; a message that is met again counts up.

        Raises:
            SpoolError: the disk does not take it.
        """
        with self._lock:
            if self._count >= MAX_LETTERS:
                self.not_kept += 1
                return
            try:
                # sqlite has no unsigned 64-bit integers, so the sequence is text.
                cursor = self._db.execute(
                    _ADD,
                    (
                        letter.at_ns,
                        letter.reason,
                        letter.detail,
                        letter.producer,
                        letter.epoch,
                        str(letter.sequence),
                        letter.rollout_id,
                        letter.group_id,
                        letter.attempt,
                        letter.position,
                        letter.head[:HEAD_BYTES],
                    ),
                )
            except sqlite3.Error as error:
                raise SpoolError(f"cannot write {self._where}: {error}") from error
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


def _all(db: sqlite3.Connection, where: str) -> tuple[DeadLetter, ...]:
    try:
        rows = db.execute(_ALL).fetchall()
    except sqlite3.Error as error:
        raise SpoolError(f"cannot read {where}: {error}") from error
    fields = DeadLetter.__struct_fields__
    return tuple(
        msgspec.convert({**dict(zip(fields, row, strict=True)), "sequence": int(row[5])}, DeadLetter)
        for row in rows
    )
