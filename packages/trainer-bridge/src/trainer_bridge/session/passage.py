"""`Passage`: which numbers of a producer may still come, over all its epochs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import Hello
from trainer_bridge.seqset import SeqSet
from trainer_bridge.wire_types import MAX_NUMBER


class Span(NamedTuple):
    """The numbers of one epoch; `received` holds those that came, or never will."""

    first: int
    last: int
    received: SeqSet


class Passage:
    """The spans of a producer's epochs, one after the other.

    Credit counts the numbers that are missing, and not from the highest that came: a hole takes a place for
    as long as it may be filled, and none once its producer has said that it never will be.

    Args:
        spans: by epoch, rising.
    """

    def __init__(self, spans: dict[int, Span]) -> None:
        self._spans = spans
        self._order = tuple(spans.values())
        self._open = 0
        """Everything before this span is complete; that never changes."""

    @classmethod
    def of(cls, hello: Hello, received: Callable[[int], SeqSet]) -> Passage:
        """The epochs that a HELLO names.

        Args:
            hello: a producer's.
            received: the set of an epoch.

        Raises:
            ProtocolError: they overlap, or are not in order.
        """
        epochs = [epoch for epoch, _ in hello.streams]
        firsts = [first for _, first in hello.streams]
        starts = list(hello.starts) or firsts
        fits = len(starts) == len(firsts) and all(s <= f for s, f in zip(starts, firsts, strict=False))
        rising = all(a < b for a, b in pairwise(epochs)) and all(a <= b for a, b in pairwise(starts))
        if not (fits and rising):
            raise ProtocolError(
                ErrorCode.BAD_BODY,
                f"the epochs of HELLO overlap or do not rise: streams {hello.streams[:4]}, "
                f"starts {hello.starts[:4]}",
            )
        ends = [start - 1 for start in starts[1:]] + [MAX_NUMBER]
        return cls(
            {
                epoch: Span(max(start, 1), end, received(epoch))
                for epoch, start, end in zip(epochs, starts, ends, strict=True)
            }
        )

    def span(self, epoch: int) -> Span | None:
        """The numbers of an epoch. None: HELLO did not name it."""
        return self._spans.get(epoch)

    def limit(self, places: int) -> int:
        """The number up to which exactly `places` are missing."""
        while self._open + 1 < len(self._order) and self._is_complete(self._order[self._open]):
            self._open += 1
        for span in self._order[self._open :]:
            for first, last in span.received.missing(span.first, span.last):
                if last - first + 1 > places:
                    return first + places - 1
                places -= last - first + 1
        return MAX_NUMBER

    @staticmethod
    def _is_complete(span: Span) -> bool:
        return next(span.received.missing(span.first, span.last), None) is None
