"""`SeqSet`: a set of sequence numbers as a watermark and the few ranges above it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from trainer_bridge.messages import WireSet

WIRE_RANGES = 256
"""Ranges that one acknowledgement carries; with more of them, the next ones are in the one after it."""


class SeqSet:
    """Positive integers: everything up to `upto`, and disjoint ranges above it that do not touch."""

    __slots__ = ("_first", "_last", "upto")

    def __init__(self, upto: int = 0) -> None:
        self.upto = upto
        """All of 1..upto are in the set."""
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, seq: int) -> bool:
        if seq <= self.upto:
            return seq >= 1
        at = bisect_right(self._first, seq) - 1
        return at >= 0 and seq <= self._last[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeqSet):
            return NotImplemented
        return self.upto == other.upto and self._first == other._first and self._last == other._last

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # mutable

    def __repr__(self) -> str:
        return f"SeqSet(upto={self.upto}, ranges={list(self.ranges())})"

    @property
    def highest(self) -> int:
        """The largest member; 0 if there is none."""
        return self._last[-1] if self._last else self.upto

    @property
    def gaps(self) -> int:
        """Number of holes below `highest`."""
        return len(self._first)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(first, last) above the watermark, rising."""
        return iter(zip(self._first, self._last, strict=True))

    def add(self, seq: int) -> bool:
        """Put one number in. False: it was there already."""
        if seq in self:
            return False
        self.add_range(seq, seq)
        return True

    def add_range(self, first: int, last: int) -> None:
        """Put first..last in (nothing if last < first)."""
        first = max(first, self.upto + 1)
        if last < first:
            return
        # Ranges low..high-1 overlap or touch first..last and are replaced by one.
        low = bisect_right(self._last, first - 2)
        high = bisect_right(self._first, last + 1)
        if low < high:
            first = min(first, self._first[low])
            last = max(last, self._last[high - 1])
        self._first[low:high] = [first]
        self._last[low:high] = [last]
        if self._first[0] == self.upto + 1:
            self.upto = self._last[0]
            del self._first[0], self._last[0]

    def raise_to(self, upto: int) -> None:
        """Put 1..upto in."""
        self.add_range(1, upto)

    def update(self, other: SeqSet) -> None:
        """Put in what another set holds."""
        self.raise_to(other.upto)
        for first, last in other.ranges():
            self.add_range(first, last)

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The ranges of first..last that are not in the set, rising."""
        at = max(first, self.upto + 1)
        for place in range(bisect_left(self._last, at), len(self._first)):
            low, high = self._first[place], self._last[place]
            if low > last:
                break
            if at < low:
                yield at, low - 1
            at = max(at, high + 1)
        if at <= last:
            yield at, last

    def without(self, other: SeqSet, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The ranges of first..last that are in this set and not in the other, rising."""
        yield from other.missing(first, min(self.upto, last))
        for place in range(bisect_left(self._last, first), len(self._first)):
            low, high = self._first[place], self._last[place]
            if low > last:
                break
            yield from other.missing(max(low, first), min(high, last))

    def count(self, first: int, last: int) -> int:
        """How many of first..last are in the set."""
        found = max(min(self.upto, last) - max(first, 1) + 1, 0)
        for low, high in zip(self._first, self._last, strict=True):
            found += max(min(high, last) - max(low, first) + 1, 0)
        return found

    def to_wire(self, turn: int = 0) -> WireSet:
        """As it stands in an acknowledgement.

        Args:
            turn: counts acknowledgements, so that ranges which do not fit into one are said in turn.
        """
        pieces = max(-(-len(self._first) // WIRE_RANGES), 1)
        start = turn % pieces * WIRE_RANGES
        end = start + WIRE_RANGES
        return WireSet(self.upto, tuple(zip(self._first[start:end], self._last[start:end], strict=True)))

    def merge(self, wire: WireSet, first: int, last: int) -> None:
        """Put in what an acknowledgement names, as far as it lies in first..last."""
        self.add_range(first, min(wire.upto, last))
        for low, high in wire.ranges:
            self.add_range(max(low, first), min(high, last))


def all_ranges(seqs: SeqSet) -> tuple[tuple[int, int], ...]:
    """A set as (first, last), rising."""
    return (*(((1, seqs.upto),) if seqs.upto else ()), *seqs.ranges())
