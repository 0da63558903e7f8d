"""A normalised set of spans.

Two parallel lists of starts and stops are kept, both ascending, so that ``bisect`` finds the
neighbours of a span without building keys.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from spanset.span import Span


class SpanSet:
    """A set of offsets, stored as sorted spans that neither overlap nor touch."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for span in spans:
            self.add(span)

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self._starts, self._stops)

    def __len__(self) -> int:
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._stops[index]

    def __repr__(self) -> str:
        return f"SpanSet({{{', '.join(map(str, self))}}})"

    @property
    def total(self) -> int:
        """Number of offsets in the set."""
        return sum(self._stops) - sum(self._starts)

    def add(self, span: Span) -> None:
        """Add all offsets of ``span``, joining it with the spans that it meets."""
        if not span:
            return
        first = bisect_right(self._stops, span.start)
        last = bisect_right(self._starts, span.stop)
        start, stop = span.start, span.stop
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def discard(self, span: Span) -> None:
        """Remove all offsets of ``span``; a span of the set may be trimmed or cut in two."""
        if not span:
            return
        first = bisect_right(self._stops, span.start)
        last = bisect_left(self._starts, span.stop)
        kept: list[Span] = []
        if first < last:
            if self._starts[first] < span.start:
                kept.append(Span(self._starts[first], span.start))
            if span.stop < self._stops[last - 1]:
                kept.append(Span(span.stop, self._stops[last - 1]))
        self._starts[first:last] = [piece.start for piece in kept]
        self._stops[first:last] = [piece.stop for piece in kept]

    def covers(self, span: Span) -> bool:
        """Return whether every offset of ``span`` is in the set."""
        if not span:
            return True
        index = bisect_right(self._starts, span.start) - 1
        return index >= 0 and span.stop <= self._stops[index]

    def gaps(self, within: Span) -> list[Span]:
        """Return the parts of ``within`` that are not in the set, in order."""
        missing: list[Span] = []
        at = within.start
        index = bisect_right(self._stops, within.start)
        while index < len(self._starts) and self._starts[index] < within.stop:
            if at < self._starts[index]:
                missing.append(Span(at, self._starts[index]))
            at = self._stops[index]
            index += 1
        if at < within.stop:
            missing.append(Span(at, within.stop))
        return missing
