"""`StoreDamage`: records of a store that are damaged or missing, set aside so that the others go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import decode_head
from trainer_bridge.messages import DataHead
from trainer_bridge.segment import Damage, Segment
from trainer_bridge.seqset import SeqSet, all_ranges
from trainer_bridge.store_cursor import StoreCursor

log = logging.getLogger(__name__)

UNREADABLE = "unreadable"
"""Why such records are dropped."""


class Loss(NamedTuple):
    """Records that were not committed, and that are damaged or missing."""

    damage: Damage
    head: DataHead | None
    """Of one record, if that much can be read. Its message is not taken for received: a sender that still has
    it sends it again."""


class StoreDamage:
    """What cannot be read. Whoever goes through the records holds the store's `steady`; `note` needs no lock.

    Args:
        cursor: told that lost records are dropped, as `UNREADABLE`; names those of earlier starts.
        found: by opening the store.
    """

    def __init__(self, cursor: StoreCursor, found: Sequence[Damage]) -> None:
        self._cursor = cursor
        self._lock = threading.Lock()
        self._damaged = SeqSet()
        self._readable = SeqSet()
        """Of these: committed, and their heads say what they were."""
        self._losses: dict[int, Loss] = {}
        """By the first position."""
        for first, last in cursor.dropped_as(UNREADABLE):
            self._damaged.add_range(first, last)
        for damage in found:
            self._set_aside(damage)
        if found:
            log.warning(
                "%d records of the store cannot be read (the others are delivered): %s%s",
                self.count(1),
                found[0].text,
                f" (and {len(found) - 1} more places)" if len(found) > 1 else "",
            )

    def count(self, first: int) -> int:
        """How many there are from this position on, as far as that was noticed."""
        with self._lock:
            return self._damaged.count(first, self._damaged.highest)

    def note(self, position: int) -> None:
        """This one turned out to be damaged when it was read; whoever read it drops it."""
        with self._lock:
            self._damaged.add(position)

    def take_losses(self) -> list[Loss]:
        """What was lost since the last call."""
        losses, self._losses = list(self._losses.values()), {}
        return losses

    def keep_aside(self, committed: SeqSet) -> None:
        """Put in what counts as committed because it cannot come again."""
        with self._lock:
            for first, last in all_ranges(self._damaged):
                for low, high in self._readable.missing(first, last):
                    committed.add_range(low, high)

    def heads(self, segment: Segment) -> Iterator[tuple[int, int, DataHead]]:
        """(position, bytes, head) of the records of which that is known and that count as received."""
        for position, nbytes, raw in segment.heads():
            try:
                head = decode_head(raw)
                if not isinstance(head, DataHead):
                    raise ProtocolError(ErrorCode.UNKNOWN_KIND, f"a {type(head).__name__}, not a sample")
            except ProtocolError as error:
                if position not in self._damaged:
                    text = f"{segment.path}: record {position}: {error}"
                    log.warning("%s; it is set aside", text)
                    self._set_aside(Damage(position, position, text))
                continue
            if position in self._damaged:
                if self._cursor.why_dropped(position) == UNREADABLE:
                    loss = self._losses.get(position)
                    if loss is not None:
                        self._losses[position] = loss._replace(head=head)
                    continue
                self._readable.add(position)
            yield position, nbytes, head

    def _set_aside(self, damage: Damage) -> None:
        with self._lock:
            self._damaged.add_range(damage.first, damage.last)
        for first, last in self._cursor.missing(damage.first, damage.last):
            self._losses[first] = Loss(Damage(first, last, damage.text), None)
            self._cursor.set_aside(first, last, UNREADABLE)
