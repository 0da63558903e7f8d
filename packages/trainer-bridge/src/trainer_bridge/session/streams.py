"""`Streams`: the epochs of one producer, and which sequence numbers belong to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer_bridge.seqset import SeqSet


class Stream(NamedTuple):
    """One epoch of a producer's sequence: it begins at `first` and ends where the next epoch begins."""

    epoch: int
    first: int


class Streams:
    """Epochs that may still have unsettled messages.

    Args:
        streams: rising; the last is the one being written.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = tuple(streams)

    @property
    def first(self) -> int:
        """The lowest number of the first epoch; everything below it is settled."""
        return self._streams[0].first

    @property
    def epoch(self) -> int:
        """The one being written."""
        return self._streams[-1].epoch

    def span(self, epoch: int, last: int) -> tuple[int, int] | None:
        """First and last number of an epoch, if `last` is the highest there is; None: no such epoch."""
        for at, stream in enumerate(self._streams):
            if stream.epoch == epoch:
                following = self._streams[at + 1 :]
                return stream.first, following[0].first - 1 if following else last
        return None

    def spans(self, last: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, first, last) of each, if `last` is the highest number there is."""
        ends = [stream.first - 1 for stream in self._streams[1:]] + [last]
        for stream, end in zip(self._streams, ends, strict=True):
            yield stream.epoch, stream.first, end

    @property
    def starts(self) -> tuple[int, ...]:
        """The first number of each."""
        return tuple(stream.first for stream in self._streams)

    def unsettled(self, settled: SeqSet, last: int) -> tuple[tuple[int, int], ...]:
        """(epoch, lowest number that is not settled, or one past its end) of each, as HELLO says it."""
        return tuple(
            (epoch, next(settled.missing(first, end), (max(end + 1, first), 0))[0])
            for epoch, first, end in self.spans(last)
        )
