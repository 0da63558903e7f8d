"""`TokenBlock`: the memory of a ledger's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from token_tracking.kept import KeptSets
from token_tracking.sample import NOT_SAMPLED

CHANNELS: tuple[tuple[str, type[np.generic]], ...] = (
    ("ids", np.int32),
    ("mask", np.uint8),
    ("logprobs", np.float32),
    ("versions", np.int32),
    ("sources", np.uint8),
)
_PROMPT: dict[str, float] = {"mask": 0, "logprobs": np.nan, "versions": NOT_SAMPLED, "sources": 0}
"""What a prompt token has in the channels beside its id; memory is prepared with it."""


class TokenBlock:
    """Equally long growing arrays, written by one ledger, read by its forks."""

    def __init__(self) -> None:
        self.length = 0
        self.arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in CHANNELS}
        self.joined: npt.NDArray[np.int32] | None = None
        """Ids of the shared part and, behind them in the same memory, `arrays["ids"]`. None: not joined."""
        self.kept: list[tuple[int, KeptSets]] = []

    def join(self, shared: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Put the ids of the shared part in front, so that all ids are one view from now on."""
        own = self.arrays["ids"]
        self.joined = joined = np.concatenate([shared, own])
        self.arrays["ids"] = joined[len(shared) :]
        return joined

    def append(self, columns: Mapping[str, npt.NDArray[Any] | float], count: int) -> None:
        """Append `count` tokens; channels that are not given are a prompt token's."""
        end = self.length + count
        if end > len(self.arrays["ids"]):
            self._grow(end)
        for name, column in columns.items():
            self.arrays[name][self.length : end] = column
        self.length = end

    def append_prompt(self, ids: npt.NDArray[np.int32]) -> None:
        """As `append`, of ids alone: memory beyond `length` holds prompt tokens' values already."""
        end = self.length + len(ids)
        if end > len(self.arrays["ids"]):
            self._grow(end)
        self.arrays["ids"][self.length : end] = ids
        self.length = end

    def cut(self, length: int) -> None:
        """Give back all but the first `length` tokens; views of what was there keep it."""
        held = [(at, sets) for at, sets in self.kept if at < length]
        self.kept = [(at, sets.part(0, min(len(sets.offsets) - 1, length - at))) for at, sets in held]
        self.length = length
        self._move(len(self.arrays["ids"]))

    def release(self) -> None:
        """Give back the joined copy of the shared part's ids."""
        if self.joined is not None:
            self.joined, self.arrays["ids"] = None, self.arrays["ids"].copy()

    def _grow(self, end: int) -> None:
        capacity = len(self.arrays["ids"])
        # An eighth of slack: appends stay amortised O(1) and 14 bytes a token stay under 16.
        self._move(max(end, capacity + (capacity >> 3), 256))

    def _move(self, size: int) -> None:
        """Copy what is held to new memory for `size` tokens."""
        moved = {name: np.empty(size, dtype) for name, dtype in CHANNELS}
        for name, array in self.arrays.items():
            moved[name][: self.length] = array[: self.length]
            moved[name][self.length :] = _PROMPT.get(name, 0)
        capacity = len(self.arrays["ids"])
        shared = None if self.joined is None else self.joined[: len(self.joined) - capacity]
        self.arrays = moved
        if shared is not None:
            self.join(shared)
