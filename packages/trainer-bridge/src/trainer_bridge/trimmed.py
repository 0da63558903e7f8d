"""`Trimmed`: what a store still knows of records whose segments it has deleted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from trainer_bridge.checkpoint import decode_ids, encode_ids
from trainer_bridge.closed_groups import latest_groups
from trainer_bridge.errors import BridgeError, SpoolError
from trainer_bridge.messages import DataHead
from trainer_bridge.segment import sync_folder
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session.peers import Identity
from trainer_bridge.session.watermark import Watermark
from trainer_bridge.state_file import TrimmedFile, load, save

FILE = "trimmed.json"
IDS_MAGIC = b"TBROLIDS\x01\x00\x00\x00\x00\x00\x00\x00"
"""First 16 bytes of the file of rollouts: a name, u16 major = 1, zeros."""
_ID = 16
_ATTEMPT = 4
_ENTRY = 21
"""Rollout id, attempt (u32, little endian), and how it ended: 0 trained on, 1 dropped."""
NAMED = 4
"""Producers named in one text; the rest is counted."""


class Ended(NamedTuple):
    """A rollout whose record is gone."""

    rollout_id: bytes
    attempt: int
    dropped: bool
    """False: it was trained on."""


class Page:
    """What is to be known of the records of one segment."""

    def __init__(self) -> None:
        self.done = Watermark()
        self.rollouts = bytearray()
        self.groups: dict[bytes, None] = {}

    def note(self, head: DataHead, *, dropped: bool) -> None:
        """One more record, in order; not dropped: it was trained on."""
        self.done.add(Identity(head.producer, head.epoch, head.sequence))
        self.groups.pop(head.group_id, None)
        self.groups[head.group_id] = None
        self.rollouts += head.rollout_id + head.attempt.to_bytes(_ATTEMPT, "little") + bytes((dropped,))


class Trimmed:
    """Identities, rollouts and drops of deleted records; opening removes what a crash left behind.

    Two files: `trimmed.json` is replaced whole, and says how much of the append-only file of rollouts counts.
    So a crash at any point leaves the state of before or after.

    Args:
        folder: of the segments.
        remember: rollouts kept at least, the latest ones; at most twice as many lie on the disk.

    Raises:
        SpoolError: the files are damaged.
    """

    def __init__(self, folder: Path, *, remember: int) -> None:
        self._folder = folder
        self._remember = remember
        self._file = load(folder / FILE, TrimmedFile) or TrimmedFile(upto=0, done={}, ids="", rollouts=0)
        self.done = messages_of(folder, self._file)
        """The messages of these records."""
        self._digest = xxhash.xxh3_64(entries_of(folder, self._file))
        for stray in folder.glob("trimmed-*.ids"):
            if stray.name != self._file.ids:
                stray.unlink()

    @property
    def upto(self) -> int:
        """Records up to this one are gone."""
        return self._file.upto

    @property
    def dropped(self) -> dict[str, int]:
        """How many of these records were dropped, by reason; the others were trained on."""
        return self._file.dropped

    def rollouts(self) -> Iterator[Ended]:
        """The rollouts of the latest of these records, oldest first."""
        return rollouts_in(entries_of(self._folder, self._file)[-self._remember * _ENTRY :])

    @property
    def groups(self) -> list[bytes]:
        """Groups of the latest of these records, latest last.

        Raises:
            SpoolError: the file is damaged.
        """
        try:
            return decode_ids(self._file.groups)
        except BridgeError as error:
            raise SpoolError(f"cannot read {self._folder / FILE}: {error}") from error

    def add(self, page: Page, *, upto: int, dropped: Mapping[str, int]) -> None:
        """Records up to `upto` may be deleted once this has returned: what is here is on the disk.

        Args:
            page: the records after the former `upto`.
            upto: the last of them.
            dropped: how many of them were dropped, by reason.

        Raises:
            SpoolError: the disk does not take it; nothing may be deleted.
        """
        old = self._file
        try:
            name, count, digest = self._write(bytes(page.rollouts))
        except OSError as error:
            raise SpoolError(f"cannot write {self._folder}: {error.strerror or error}") from error
        done = Watermark()
        done.update(self.done)
        done.update(page.done)
        reasons = sorted(old.dropped.keys() | {reason for reason, n in dropped.items() if n})
        new = TrimmedFile(
            upto=upto,
            done=done.to_plain(),
            dropped={reason: old.dropped.get(reason, 0) + dropped.get(reason, 0) for reason in reasons},
            ids=name,
            rollouts=count,
            digest=digest.hexdigest(),
            groups=encode_ids(latest_groups((*self.groups, *page.groups))),
        )
        save(self._folder / FILE, new)
        self._file, self.done, self._digest = new, done, digest
        if old.ids and old.ids != name:
            (self._folder / old.ids).unlink(missing_ok=True)

    def _write(self, entries: bytes) -> tuple[str, int, xxhash.xxh3_64]:
        """Append, or begin another file; what the manifest says that counts is not touched."""
        old = self._file
        count = old.rollouts + len(entries) // _ENTRY
        if old.ids and count <= 2 * self._remember:
            digest = self._digest.copy()
            digest.update(entries)
            with (self._folder / old.ids).open("r+b") as file:
                # An earlier attempt may have left entries that were never confirmed.
                file.truncate(len(IDS_MAGIC) + old.rollouts * _ENTRY)
                file.seek(0, os.SEEK_END)
                _write_out(file.fileno(), entries)
            return old.ids, count, digest
        latest = (entries_of(self._folder, old) + entries)[-self._remember * _ENTRY :]
        number = int(Path(old.ids).stem.removeprefix("trimmed-")) + 1 if old.ids else 1
        name = f"trimmed-{number:06d}.ids"
        with (self._folder / name).open("wb") as file:
            _write_out(file.fileno(), IDS_MAGIC + latest)
        sync_folder(self._folder)
        return name, len(latest) // _ENTRY, xxhash.xxh3_64(latest)


def messages_of(folder: Path, file: TrimmedFile) -> Watermark:
    """The messages of deleted records.

    Raises:
        SpoolError: the file is damaged.
    """
    try:
        return Watermark.from_plain(file.done)
    except ValueError as error:
        raise SpoolError(f"cannot read {folder / FILE}: {error}") from error


def entries_of(folder: Path, file: TrimmedFile) -> bytes:
    """The rollouts of deleted records as they lie on the disk, 21 bytes each; changes nothing.

    Raises:
        SpoolError: they cannot be read, or are damaged.
    """
    if not file.ids:
        return b""
    path = folder / file.ids
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SpoolError(f"cannot read {path}: {error.strerror or error}") from error
    entries = raw[len(IDS_MAGIC) : len(IDS_MAGIC) + file.rollouts * _ENTRY]
    if not raw.startswith(IDS_MAGIC) or xxhash.xxh3_64_hexdigest(entries) != file.digest:
        raise SpoolError(
            f"{path} is damaged: restore it, or delete it together with {FILE} (then messages of records up "
            f"to {file.upto} that come again are taken for new ones)"
        )
    return entries


def rollouts_in(entries: bytes) -> Iterator[Ended]:
    """Entries, one by one."""
    for at in range(0, len(entries), _ENTRY):
        entry = entries[at : at + _ENTRY]
        attempt = int.from_bytes(entry[_ID : _ID + _ATTEMPT], "little")
        yield Ended(entry[:_ID], attempt, bool(entry[-1]))


def describe_lost(lost: Iterable[tuple[bytes, int, SeqSet]]) -> str:
    """Messages that are gone, for people: how many, and whose."""
    whose: dict[bytes, int] = {}
    for producer, _, seqs in lost:
        whose[producer] = whose.get(producer, 0) + seqs.count(1, seqs.highest)
    named = [f"{n} of producer {producer.hex()}" for producer, n in list(whose.items())[:NAMED]]
    more = f", and of {len(whose) - NAMED} more" if len(whose) > NAMED else ""
    return f"{sum(whose.values())} rollouts ({', '.join(named)}{more})"


def _write_out(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.fsync(fd)
