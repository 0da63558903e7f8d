"""`Watermark`: which messages the trainer is done with, over all producers and their epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trainer_bridge.seqset import SeqSet, all_ranges
from trainer_bridge.session.peers import Identity
from trainer_bridge.wire_types import U32, Number

Ranges = tuple[U32, Number, tuple[tuple[Number, Number], ...]]
"""Epoch, everything up to, and the ranges above it."""


class Watermark:
    """For each producer and epoch a contiguous part and the ranges above it.

    A message is in it once the trainer committed it, or once it was dropped for a counted reason: both are
    ends, and one that counted commits alone would never pass a dropped message (trl#7294). Epochs stay for
    ever: a store hands old ones out again after a return to an earlier checkpoint.
    """

    def __init__(self) -> None:
        self._sets: dict[tuple[bytes, int], SeqSet] = {}

    def __contains__(self, identity: Identity) -> bool:
        seqs = self._sets.get((identity.producer, identity.epoch))
        return seqs is not None and identity.sequence in seqs

    def add(self, identity: Identity) -> None:
        """This message has come to its end."""
        key = (identity.producer, identity.epoch)
        seqs = self._sets.get(key)
        if seqs is None:
            seqs = self._sets[key] = SeqSet()
        seqs.add(identity.sequence)

    def put(self, producer: bytes, epoch: int, seqs: SeqSet) -> None:
        """Hold a copy of one epoch's numbers."""
        mine = self._sets[producer, epoch] = SeqSet()
        mine.update(seqs)

    def items(self) -> Iterator[tuple[bytes, int, SeqSet]]:
        """(producer, epoch, numbers)."""
        for (producer, epoch), seqs in self._sets.items():
            yield producer, epoch, seqs

    def of(self, producer: bytes, epoch: int) -> SeqSet | None:
        """The numbers of one epoch. None: nothing of it."""
        return self._sets.get((producer, epoch))

    def update(self, other: Watermark) -> None:
        """Put in what another one holds."""
        for producer, epoch, seqs in other.items():
            self._sets.setdefault((producer, epoch), SeqSet()).update(seqs)

    def lacks(self, other: Watermark) -> list[tuple[bytes, int, SeqSet]]:
        """What another one holds and this one does not: (producer, epoch, numbers)."""
        found: list[tuple[bytes, int, SeqSet]] = []
        for producer, epoch, seqs in other.items():
            mine = self.of(producer, epoch) or SeqSet()
            missing = SeqSet()
            for first, last in all_ranges(seqs):
                for low, high in mine.missing(first, last):
                    missing.add_range(low, high)
            if missing.highest:
                found.append((producer, epoch, missing))
        return found

    def to_plain(self) -> dict[str, tuple[Ranges, ...]]:
        """As it stands in a checkpoint: producer in hex -> its epochs."""
        plain: dict[str, tuple[Ranges, ...]] = {}
        for (producer, epoch), seqs in self._sets.items():
            entry = (epoch, seqs.upto, tuple(seqs.ranges()))
            plain[producer.hex()] = (*plain.get(producer.hex(), ()), entry)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Iterable[Ranges]]) -> Watermark:
        """Back from a checkpoint.

        Raises:
            ValueError: a producer is not 16 bytes of hex, or a range ends before it begins.
        """
        mark = cls()
        for name, epochs in plain.items():
            producer = bytes.fromhex(name)
            if len(producer) != 16:
                raise ValueError(f"producer {name!r} is not 32 hex characters")
            for epoch, upto, ranges in epochs:
                seqs = SeqSet(upto)
                for first, last in ranges:
                    if not 1 <= first <= last:
                        raise ValueError(f"producer {name}, epoch {epoch}: range {first} to {last}")
                    seqs.add_range(first, last)
                mark._sets[producer, epoch] = seqs
        return mark
