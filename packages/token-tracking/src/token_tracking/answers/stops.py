"""Where a sampled turn stopped: at a stop token, or in the token that ends a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

Decode = Callable[[Sequence[int]], str]


def stop_end(
    ids: npt.NDArray[np.int32], stop_ids: Collection[int], stop_string: str | None, decode: Decode | None
) -> int | None:
    """How many of `ids` there are up to the first stop, it included; None: there is none.

    A token that holds the end of the stop string and more text is one token, and counts whole.
    """
    ends: list[int] = []
    for stop in stop_ids if len(ids) else ():
        # One comparison a stop token: there are few, and np.isin sorts.
        hits = ids == stop
        first = int(hits.argmax())
        if hits[first]:
            ends.append(first + 1)
    if stop_string is not None and decode is not None:
        values: list[int] = ids.tolist()
        if stop_string in decode(values):
            ends.append(_fewest_holding(stop_string, values, decode))
    return min(ends, default=None)


def _fewest_holding(text: str, ids: list[int], decode: Decode) -> int:
    """The fewest first ids whose text holds `text`, which that of all ids does."""
    if text not in decode(ids[:-1]):
        return len(ids)
    low, high = 1, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if text in decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low
