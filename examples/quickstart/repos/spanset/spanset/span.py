"""One half-open span of offsets."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """The offsets ``start, start + 1, ..., stop - 1``.

    Raises:
        ValueError: if the span would be negative or begin before zero.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.stop < self.start:
            raise ValueError(f"not a span: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def intersection(self, other: "Span") -> "Span | None":
        """Return the common part, or None if the two share no offset."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def chunks(self, size: int) -> "list[Span]":
        """Cut the span into pieces of ``size`` offsets; the last may be shorter."""
        if size < 1:
            raise ValueError(f"chunk size must be positive, not {size}")
        return [Span(at, min(at + size, self.stop)) for at in range(self.start, self.stop, size)]
