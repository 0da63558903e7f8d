"""`TokenLedger`: the per-token record of one token sequence; what is written does not change."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from token_tracking import kept as kept_sets
from token_tracking.arrays import Ids, Logprobs, token_ids, token_logprobs
from token_tracking.errors import LedgerError
from token_tracking.kept import KeptSets
from token_tracking.ledger_block import CHANNELS, TokenBlock
from token_tracking.sample import is_version


class TokenSource(IntEnum):
    """Where a token came from."""

    TEMPLATE = 0
    """Prompt text: template, system, user, tool output."""
    SAMPLED = 1
    """The model."""
    REPAIR = 2
    """Written by us to close a turn that was cut off."""


BYTES_PER_TOKEN = sum(np.dtype(dtype).itemsize for _, dtype in CHANNELS)


class TokenLedger:
    """Ids, loss mask, log-probabilities, weight versions and sources of one token sequence.

    Every append writes all channels or, when it is refused, none: they always have one length. Nothing that
    was written changes; `cut_back` takes it away from the end. `fork` shares what is there and costs O(1).
    Views are read-only; those of a ledger that was not forked off another are zero-copy; of a fork, `ids` are
    too, the others join its shared part and its own.
    """

    __slots__ = ("_base", "_base_length", "_block", "_forked")

    def __init__(self) -> None:
        self._base: TokenLedger | None = None
        self._base_length = 0
        self._block = TokenBlock()
        self._forked = 0  # tokens that the longest fork shares

    def __len__(self) -> int:
        """Number of tokens."""
        return self._base_length + self._block.length

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 `[n]`: zero-copy, also of a fork, which copies the ids it shares once."""
        if self._base is None:
            view: npt.NDArray[np.int32] = self._block.arrays["ids"][: self._block.length]
            view.setflags(write=False)
            return view
        if not self._block.length:
            return self._view("ids", 0, len(self))
        joined = self._block.joined
        if joined is None:
            joined = self._block.join(self._base._view("ids", 0, self._base_length))
        view = joined[: len(self)]
        view.setflags(write=False)
        return view

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """Loss mask, uint8 `[n]`: 1 where the model sampled the token."""
        return self._view("mask", 0, len(self))

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities, float32 `[n]`; NaN where none was recorded."""
        return self._view("logprobs", 0, len(self))

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        """Weight versions, int32 `[n]`; -1: not sampled, -2: sampled under an unknown version."""
        return self._view("versions", 0, len(self))

    @property
    def sources(self) -> npt.NDArray[np.uint8]:
        """`TokenSource` values, uint8 `[n]`."""
        return self._view("sources", 0, len(self))

    def slice_ids(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Ids of tokens `start` to `end`; zero-copy unless the range crosses the point of a fork."""
        return self._view("ids", start, end)

    def append_prompt(self, ids: Ids) -> tuple[int, int]:
        """Append tokens that the model reads: mask 0, no log-probability, version -1.

        Returns:
            Start and end of what was appended.

        Raises:
            LedgerError: an id is negative or not an integer. Nothing was appended.
        """
        tokens = token_ids(ids)
        start = self._base_length + self._block.length
        self._block.append_prompt(tokens)
        return start, start + len(tokens)

    def append_encoded(self, ids: npt.NDArray[np.int32]) -> None:
        """As `append_prompt`, of ids that a tokenizer just gave: they are not checked again."""
        self._block.append_prompt(ids)

    def append_repair(self, ids: Ids) -> tuple[int, int]:
        """Append tokens that close a cut-off turn: as `append_prompt`, marked `REPAIR`."""
        tokens = token_ids(ids)
        start = len(self)
        self._block.append({"ids": tokens, "sources": TokenSource.REPAIR.value}, len(tokens))
        return start, start + len(tokens)

    def append_sampled(
        self, ids: Ids, logprobs: Logprobs | None, weight_version: int, kept: KeptSets | None = None
    ) -> tuple[int, int]:
        """Append sampled tokens: mask 1.

        Args:
            ids: token ids as the engine gave them.
            logprobs: one finite value <= 0 per id. None: not recorded, NaN is stored.
            weight_version: `0 <= version < 2**31`, or -2 for unknown.
            kept: the sets that truncated sampling chose from, copied. None: not truncated, or not recorded.

        Returns:
            Start and end of what was appended.

        Raises:
            LedgerError: counts differ, a log-probability is not finite or above 0, the version is out of
                range, or an id is not in its kept set. Nothing was appended.
        """
        tokens = token_ids(ids)
        if not is_version(weight_version):
            raise LedgerError(
                f"weight version {weight_version!r}: need an int in 0..2**31-1, or -2 (unknown)"
            )
        values = token_logprobs(logprobs, tokens)
        if kept is not None and (fault := kept_sets.fault(kept, tokens)) is not None:
            raise LedgerError(fault.why)
        start, count = len(self), len(tokens)
        columns: dict[str, npt.NDArray[Any] | float] = {
            "ids": tokens,
            "mask": 1,
            "logprobs": values,
            "versions": weight_version,
            "sources": TokenSource.SAMPLED.value,
        }
        self._block.append(columns, count)
        if kept is not None:
            own = KeptSets(kept.ids.copy(), kept.offsets.copy())
            self._block.kept.append((start - self._base_length, own))
        return start, start + count

    def channels(self) -> dict[str, npt.NDArray[Any]]:
        """All channels by name (`ids`, `mask`, `logprobs`, `versions`, `sources`), each `[n]`."""
        return {name: self._view(name, 0, len(self)) for name, _ in CHANNELS}

    def kept_sets(self, end: int | None = None) -> KeptSets | None:
        """The kept sets of the first `end` tokens (None: all); None: none was recorded among them.

        A token that was not sampled, or came without a set, has an empty one. Joined on each call: nothing
        is held for tokens without a set.
        """
        high = len(self) if end is None else end
        count, pieces = high, list[tuple[int, KeptSets]]()
        ledger: TokenLedger | None = self
        while ledger is not None:
            low = ledger._base_length
            for at, kept in reversed(ledger._block.kept):
                if low + at < high:
                    pieces.append((low + at, kept.part(0, min(len(kept.offsets) - 1, high - low - at))))
            high, ledger = min(high, low), ledger._base
        return kept_sets.joined(pieces[::-1], count)

    def append_columns(self, columns: Mapping[str, npt.NDArray[Any]], kept: KeptSets | None = None) -> None:
        """Append all channels as another ledger's `channels()` and `kept_sets()` gave them; for restoring.

        Raises:
            LedgerError: a channel is missing, or lengths or dtypes differ. Nothing was appended.
        """
        count = len(columns["ids"]) if "ids" in columns else 0
        if set(columns) != {name for name, _ in CHANNELS} or any(len(c) != count for c in columns.values()):
            raise LedgerError("need all five channels, equally long")
        if any(columns[name].ndim != 1 or columns[name].dtype != dtype for name, dtype in CHANNELS):
            raise LedgerError("need flat channels of the dtypes that channels() gives")
        if kept is not None:
            sampled = np.diff(kept.offsets) > 0
            chosen = columns["ids"][sampled]
            held = KeptSets(kept.ids, np.concatenate([[0], kept.offsets[1:][sampled]]).astype(np.int64))
            if len(sampled) != count or kept_sets.fault(held, chosen) is not None:
                raise LedgerError(f"the kept sets do not fit the {count} tokens")
            self._block.kept.append((self._block.length, kept))
        self._block.append(dict(columns), count)

    def shared_length(self, other: TokenLedger) -> int:
        """How many tokens at the start both ledgers hold in the same memory."""
        mine = self._spans()
        return max(
            (min(end, mine[block]) for block, end in other._spans().items() if block in mine), default=0
        )

    def _spans(self) -> dict[TokenBlock, int]:
        """Each block that holds tokens of this ledger, and the end of what it holds."""
        spans: dict[TokenBlock, int] = {}
        ledger: TokenLedger | None = self
        end = len(self)
        while ledger is not None:
            spans[ledger._block] = end
            end, ledger = ledger._base_length, ledger._base
        return spans

    def to_bytes(self) -> bytes:
        """A snapshot, byte for byte the same after `from_bytes`; what a fork shares is written out."""
        from token_tracking import snapshot

        return snapshot.pack(snapshot.KIND_LEDGER, snapshot.ledger_image(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenLedger:
        """Restore a snapshot.

        Raises:
            SnapshotError: the bytes are damaged or of another kind or version.
        """
        from token_tracking import snapshot

        return snapshot.ledger_from_image(snapshot.unpack(snapshot.KIND_LEDGER, data, snapshot.LedgerImage))

    def fork(self, length: int | None = None) -> TokenLedger:
        """A ledger that begins with the first `length` tokens of this one (None: all), in O(1).

        Raises:
            LedgerError: `length` lies outside the ledger.
        """
        length = len(self) if length is None else length
        if not 0 <= length <= len(self):
            raise LedgerError(f"cannot fork at {length}: the ledger has {len(self)} tokens")
        base = self
        while base._base is not None and length <= base._base_length:
            base = base._base
        child = TokenLedger()
        child._base, child._base_length = base, length
        base._forked = max(base._forked, length)
        return child

    def cut_back(self, length: int) -> TokenLedger:
        """The ledger of the first `length` tokens alone, for others to follow them; O(n).

        It is this one, cut, unless a fork shares more of it: then it is a fork. Views that were handed out
        keep what they show.

        Raises:
            LedgerError: `length` lies outside the ledger.
        """
        if length == len(self):
            return self
        if not max(self._forked, self._base_length) <= length <= len(self):
            return self.fork(length)
        self._block.cut(length - self._base_length)
        return self

    def release(self) -> None:
        """Give back what `ids` of a fork has copied; it copies again when it is asked again."""
        self._block.release()

    def _view(self, channel: str, start: int, end: int) -> npt.NDArray[Any]:
        if not 0 <= start <= end <= len(self):
            raise LedgerError(f"range {start}..{end} lies outside the ledger's {len(self)} tokens")
        parts: list[npt.NDArray[Any]] = []
        ledger: TokenLedger | None = self
        while ledger is not None:
            low = ledger._base_length
            if end > low:
                parts.append(ledger._block.arrays[channel][max(start, low) - low : end - low])
                end = low
            ledger = ledger._base if start < end else None
        if not parts:
            parts.append(self._block.arrays[channel][:0])
        view = parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
        view.setflags(write=False)
        return view
