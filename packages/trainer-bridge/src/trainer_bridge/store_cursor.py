"""`StoreCursor`: which records of a store came to their end, and why."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from trainer_bridge.seqset import SeqSet, all_ranges
from trainer_bridge.state_file import CursorFile, cursor_of, load, save


class StoreCursor:
    """The committed records, in memory and in `cursor.json`. Safe from any thread; `save` from one at a time.

    Args:
        folder: of the segments.

    Raises:
        SpoolError: the file is damaged: which records were committed is not known.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "cursor.json"
        self._lock = threading.Lock()
        self._committed = SeqSet()
        self._dropped: dict[str, SeqSet] = {}
        """Of the committed: why, where it was not training."""
        self._committing: list[int] = []
        self._saving: list[int] = []
        """Of the snapshot that is being written."""
        self._saved: list[int] = []
        self._on_disk = SeqSet()
        """The committed records that the file names."""
        self._changed = False
        file = load(self._path, CursorFile)
        if file is not None:
            self._committed, self._on_disk = file.to_set(), file.to_set()
            for reason, ranges in file.dropped.items():
                for first, last in ranges:
                    self._dropped.setdefault(reason, SeqSet()).add_range(first, last)

    def __contains__(self, position: int) -> bool:
        with self._lock:
            return position in self._committed

    @property
    def highest(self) -> int:
        """The highest committed position."""
        with self._lock:
            return self._committed.highest

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges of first..last that are not committed."""
        with self._lock:
            return list(self._committed.missing(first, last))

    def holds(self, first: int, last: int) -> bool:
        """True: all of these are committed, and the file says so."""
        with self._lock:
            sets = (self._committed, self._on_disk)
            return not any(missing for each in sets for missing in each.missing(first, last))

    def why_dropped(self, position: int) -> str:
        """Empty: it was trained on, or is not committed."""
        with self._lock:
            return next((reason for reason, each in self._dropped.items() if position in each), "")

    def dropped_as(self, reason: str) -> tuple[tuple[int, int], ...]:
        """The ranges that were dropped for this reason."""
        with self._lock:
            return all_ranges(self._dropped.get(reason, SeqSet()))

    def count_dropped(self, first: int, last: int) -> dict[str, int]:
        """How many of first..last were dropped, by reason."""
        with self._lock:
            return {reason: each.count(first, last) for reason, each in self._dropped.items()}

    def commit(self, ends: Iterable[tuple[int, str]]) -> None:
        """These came to their end together: (position, why dropped or ""). The file holds all or none."""
        with self._lock:
            for position, dropped in ends:
                self._committed.add(position)
                if dropped:
                    self._dropped.setdefault(dropped, SeqSet()).add(position)
                self._committing.append(position)

    def set_aside(self, first: int, last: int, reason: str) -> None:
        """These cannot be read by anybody: they are dropped, and nobody waits for that."""
        with self._lock:
            self._committed.add_range(first, last)
            self._dropped.setdefault(reason, SeqSet()).add_range(first, last)
            self._changed = True

    def rewind(self, committed: SeqSet) -> None:
        """Only these are committed; of the others, nobody hears any more that they were."""
        with self._lock:
            self._committed = committed
            for waiting in (self._committing, self._saving, self._saved):
                waiting[:] = [position for position in waiting if position in committed]
            for reason, old in self._dropped.items():
                kept = self._dropped[reason] = SeqSet()
                for first, last in all_ranges(old):
                    at = first
                    for low, high in (*committed.missing(first, last), (last + 1, last + 1)):
                        kept.add_range(at, low - 1)
                        at = high + 1
            self._changed = True

    def forget(self, upto: int) -> None:
        """These were deleted: all are committed; why they were dropped is kept elsewhere."""
        with self._lock:
            self._committed.raise_to(upto)
            for reason, old in list(self._dropped.items()):
                kept = SeqSet()
                for first, last in all_ranges(old):
                    kept.add_range(max(first, upto + 1), last)
                self._dropped[reason] = kept

    def snapshot(self) -> CursorFile | None:
        """What `save` is to write, as of now: the records in it may still be on their way to the disk.

        None: nothing has changed since the last call.
        """
        with self._lock:
            if not self._committing and not self._changed:
                return None
            self._saving, self._committing = self._committing, []
            self._changed = False
            return cursor_of(self._committed, self._dropped)

    def save(self, snapshot: CursorFile) -> None:
        """Write the last snapshot down.

        Raises:
            SpoolError: the disk does not take it.
        """
        save(self._path, snapshot)
        with self._lock:
            self._on_disk = snapshot.to_set()
            self._saved += self._saving
            self._saving = []

    def take_saved(self) -> list[int]:
        """Positions whose commit reached the disk since the last call."""
        with self._lock:
            saved, self._saved = self._saved, []
        return saved
