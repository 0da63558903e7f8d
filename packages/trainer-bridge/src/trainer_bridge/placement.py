"""`Placement`: where each sample's tokens go in a batch. Padded and packed batches differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_bridge.errors import BatchError

Side = Literal["left", "right"]


class Placement(NamedTuple):
    """The shape of a batch, and the place of each of its sequences in it."""

    layout: Literal["padded", "packed"]
    shape: tuple[int, int]
    """Rows, and tokens per row."""
    chosen: tuple[int, ...]
    """Which of the step's samples are in it, in the order of the batch's sequences."""
    starts: tuple[int, ...]
    """First token of each, counted over the rows laid end to end."""
    lengths: tuple[int, ...]

    def spread(
        self, dtype: npt.DTypeLike, fill: float, source: Callable[[int], npt.NDArray[Any] | float | None]
    ) -> npt.NDArray[Any]:
        """A channel `[rows, tokens, ...]`, written straight from the samples' arrays: one copy.

        Args:
            dtype: of the result.
            fill: where no token is, and where a sample gives nothing.
            source: of a sample of the step, its values (one per token, or one for all), or None.
        """
        return self.spread_wide(dtype, fill, (), source)

    def spread_wide(
        self,
        dtype: npt.DTypeLike,
        fill: float,
        wide: tuple[int, ...],
        source: Callable[[int], npt.NDArray[Any] | float | None],
    ) -> npt.NDArray[Any]:
        """As `spread`, for channels that hold an array of shape `wide` per token.

        A sample may give fewer rows than it has tokens; the rest stays `fill`.
        """
        rows, tokens = self.shape
        out = np.full((rows * tokens, *wide), fill, dtype)
        for index, start, length in zip(self.chosen, self.starts, self.lengths, strict=True):
            values = source(index)
            if isinstance(values, np.ndarray):
                out[start : start + len(values)] = values
            elif values is not None:
                out[start : start + length] = values
        return out.reshape((rows, tokens, *wide))


def place_padded(
    lengths: Sequence[int], *, side: Side, multiple_of: int, max_rows: int | None
) -> list[Placement]:
    """One sequence per row, in the order given, at most `max_rows` rows to a batch."""
    if max_rows is not None and max_rows < 1:
        raise BatchError(f"max_rows must be 1 or more, got {max_rows}")
    out: list[Placement] = []
    count = max_rows or len(lengths) or 1
    for first in range(0, len(lengths), count):
        chosen = tuple(range(first, min(first + count, len(lengths))))
        held = tuple(lengths[index] for index in chosen)
        width = -(-max(held) // multiple_of) * multiple_of
        starts = tuple(
            row * width + (width - length if side == "left" else 0) for row, length in enumerate(held)
        )
        out.append(Placement("padded", (len(chosen), width), chosen, starts, held))
    return out


def place_packed(lengths: Sequence[int], *, row_tokens: int | None) -> list[Placement]:
    """Sequences end to end in one row per batch, first fit by falling length, no padding at all."""
    bins: list[tuple[int, list[int]]] = []
    if row_tokens is None:
        bins = [(0, list(range(len(lengths))))] if lengths else []
    else:
        for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
            length = lengths[index]
            if length > row_tokens:
                raise BatchError(
                    f"sample {index} has {length} tokens, a packed row holds {row_tokens}: give longer rows, "
                    "or a Collator with max_length and truncate=True"
                )
            for number, (used, members) in enumerate(bins):
                if used + length <= row_tokens:
                    members.append(index)
                    bins[number] = (used + length, members)
                    break
            else:
                bins.append((length, [index]))
    out: list[Placement] = []
    for _, members in bins:
        chosen = tuple(sorted(members))
        held = tuple(lengths[index] for index in chosen)
        edges = np.cumsum([0, *held]).tolist()
        out.append(Placement("packed", (1, edges[-1]), chosen, tuple(edges[:-1]), held))
    return out
