"""`ExpertRows`: which experts a mixture-of-experts model routed each token to, joined by position.

Row i is the routing of token i when it was read to predict token i + 1. An engine that has seen n tokens has
n - 1 rows: the last token is read only by the next call, whose prefill brings its row. Concatenating answers
therefore doubles rows or leaves placeholders between turns (verl#6029, NeMo-RL#3485, prime-rl#1807); here
each row has a position, and a later answer replaces what it covers.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.errors import RecordError

Rows = npt.NDArray[np.integer[Any]]
DTYPES = ("uint8", "int16", "uint16", "int32")


class ExpertPiece(msgspec.Struct, frozen=True, eq=False):
    """Rows of one answer."""

    start: int
    """Position of the first row."""
    rows: Rows
    """`[m, layers, top_k]`; shared by the branches that hold it."""
    length: int
    """How many of them are held; a branch that shares fewer tokens holds fewer."""


class ExpertRows:
    """The routed experts of one branch, kept as they came until `joined` asks for them."""

    def __init__(self, pieces: Sequence[ExpertPiece] = ()):
        self._pieces = list(pieces)

    @property
    def pieces(self) -> tuple[ExpertPiece, ...]:
        """What is held, by rising position."""
        return tuple(self._pieces)

    def check_shape(self, rows: Rows) -> None:
        """Compare an answer's layers and top_k with what is held.

        Raises:
            RecordError: they differ; another model answered.
        """
        if self._pieces and self._pieces[-1].rows.shape[1:] != rows.shape[1:]:
            held = self._pieces[-1].rows.shape[1:]
            raise RecordError(
                f"routed experts of {rows.shape[1]} layers with top_k {rows.shape[2]}, earlier answers had "
                f"{held[0]} and {held[1]}: another model answered, or a payload was read in the wrong shape",
                code="routed_shape",
            )

    def join(self, start: int, rows: Rows) -> None:
        """Take an answer's rows from position `start` on; they replace what is held from there on.

        A full-sequence answer (`start` 0) replaces everything, a delta appends and refreshes the rows that
        it repeats.

        Raises:
            RecordError: other layers or top_k than before. Nothing was taken.
        """
        self.check_shape(rows)
        while self._pieces and self._pieces[-1].start >= start:
            self._pieces.pop()
        self._pieces.append(ExpertPiece(start, rows, len(rows)))

    def cut(self, tokens: int) -> ExpertRows:
        """The rows of the first `tokens` tokens, shared with this one."""
        return ExpertRows(
            [
                ExpertPiece(piece.start, piece.rows, min(piece.length, tokens - piece.start))
                for piece in self._pieces
                if piece.start < tokens
            ]
        )

    @property
    def held(self) -> int:
        """Rows held without a gap: where a delta may begin (SGLang's `routed_experts_start_len`)."""
        if not self._pieces:
            return 0
        end = self._pieces[-1].start + self._pieces[-1].length
        gap = self.gap(end)
        return end if gap is None else gap[0]

    def gap(self, count: int) -> tuple[int, int] | None:
        """The first rows below `count` that no answer brought, start and end; None: all are held."""
        at = 0
        for start, rows in self._spans(count):
            if start > at:
                return at, start
            at = start + len(rows)
        return None if at >= count else (at, count)

    def joined(self, count: int) -> Rows:
        """The first `count` rows, `[count, layers, top_k]`, in the widest dtype that an answer came in.

        Raises:
            ValueError: a row is missing (see `gap`), or none was ever recorded.
        """
        missing = self.gap(count)
        if missing is not None or not self._pieces:
            raise ValueError(f"no routed experts for rows {missing}")
        parts = [rows for _, rows in self._spans(count)]
        return np.concatenate(parts) if parts else self._pieces[0].rows[:0]

    def _spans(self, count: int) -> Iterator[tuple[int, Rows]]:
        """What counts of each piece: up to the next one's first row."""
        for index, piece in enumerate(self._pieces):
            last = index + 1 == len(self._pieces)
            end = count if last else min(count, self._pieces[index + 1].start)
            end = min(end, piece.start + piece.length)
            if piece.start < end:
                yield piece.start, piece.rows[: end - piece.start]


def check_rows(rows: Rows, start: int, seen: int) -> None:
    """Check the rows of one answer, from position `start` on, of an engine that saw `seen` tokens.

    Raises:
        RecordError: no three dimensions or another dtype (`routed_shape`), a wrong number of rows
            (`routed_rows`), or negative ids (`routed_padding`).
    """
    if rows.ndim != 3 or rows.dtype.name not in DTYPES:
        raise RecordError(
            f"routed_experts must have shape [rows, layers, top_k] and dtype {', '.join(DTYPES)}, got "
            f"{rows.dtype} {rows.shape}",
            code="routed_shape",
        )
    if start < 0 or len(rows) != max(seen - 1 - start, 0):
        raise RecordError(
            f"{len(rows)} rows of routed experts from token {start} on, the engine saw {seen} tokens: need "
            f"{seen} - 1 - {start} rows (the last token was not read yet)",
            code="routed_rows",
        )
    if rows.size and int(rows.min()) < 0:
        at = int(np.flatnonzero(np.any(rows < 0, axis=(1, 2)))[0])
        raise RecordError(
            f"row {at} of the routed experts holds {int(rows.min())}: it was padded, not routed",
            code="routed_padding",
        )


def padding_rows(rows: Rows) -> npt.NDArray[np.intp]:
    """Positions of rows that no router wrote: in every layer the top_k experts are one and the same.

    A router picks `top_k` distinct experts, so such a row is a placeholder (zeros, SkyRL#1908). A layer
    without experts may be zero in every row; that alone is no padding. With `top_k` 1 none can be told.
    """
    if rows.shape[2] < 2:
        return np.empty(0, np.intp)
    return np.flatnonzero(np.all(rows.min(axis=2) == rows.max(axis=2), axis=1))


def repeated_rows(rows: Rows) -> npt.NDArray[np.intp]:
    """Positions of rows that equal the row before in every layer: padding by repetition, if there are many.

    Equal neighbours happen (a small model, a run of one token), so this is a finding, not an error.
    """
    return 1 + np.flatnonzero(np.all(rows[1:] == rows[:-1], axis=(1, 2)))


def decode_sglang_experts(payload: str, *, layers: int, top_k: int, experts: int | None = None) -> Rows:
    """Read `meta_info.routed_experts` of SGLang: base64 of raw little-endian int32 without a header.

    Args:
        payload: the text of the answer.
        layers: layers of the model, dense ones among them.
        top_k: experts per token.
        experts: experts per layer. Given, ids are checked and the smallest dtype that holds them is
            returned. None: int32.

    Returns:
        `[rows, layers, top_k]`.

    Raises:
        RecordError: no base64, a length that is no whole number of rows, or an id outside `0..experts - 1`.
    """
    raw = _from_base64(payload)
    row = 4 * layers * top_k
    if row <= 0 or len(raw) % row:
        raise RecordError(
            f"routed experts of {len(raw)} bytes are no whole number of rows of {layers} layers x top_k "
            f"{top_k} int32 ({row} bytes): check layers and top_k of the model",
            code="routed_rows",
        )
    values = np.frombuffer(raw, "<i4").astype(np.int32, copy=False).reshape(-1, layers, top_k)
    return _narrowed(values, experts)


def decode_vllm_experts(payload: str, *, experts: int | None = None) -> Rows:
    """Read `routed_experts` of a vLLM choice: base64 of a `.npy` file; a pickled array is refused.

    Args:
        payload: the text of the answer.
        experts: see `decode_sglang_experts`. None: the array's own dtype.

    Returns:
        `[rows, layers, top_k]`.

    Raises:
        RecordError: no base64, no `.npy` of integers in three dimensions, bytes after it, or an id outside
            `0..experts - 1`.
    """
    file = io.BytesIO(_from_base64(payload))
    try:
        loaded: object = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise RecordError(f"routed experts are no .npy array: {error}", code="routed_payload") from error
    if not isinstance(loaded, np.ndarray) or file.read(1):
        raise RecordError("routed experts are not one .npy array and nothing else", code="routed_payload")
    values = cast("npt.NDArray[Any]", loaded)
    if values.ndim != 3 or values.dtype.newbyteorder("=").name not in DTYPES:
        raise RecordError(
            f"routed experts of dtype {values.dtype} and shape {values.shape}: need {', '.join(DTYPES)} of "
            "shape [rows, layers, top_k]",
            code="routed_payload",
        )
    return _narrowed(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False)), experts)


def _from_base64(payload: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"routed experts are no base64: {error}", code="routed_payload") from error


def _narrowed(values: Rows, experts: int | None) -> Rows:
    if experts is None or not values.size:
        return values
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= experts:
        bad = low if low < 0 else high
        at = int(np.argwhere(values == bad)[0][0])
        code = "routed_padding" if low < 0 else "routed_payload"
        raise RecordError(f"routed expert {bad} in row {at}: need 0..{experts - 1}", code=code)
    narrow = np.uint8 if experts <= 256 else np.int16 if experts <= 2**15 else np.int32
    return values.astype(narrow, copy=False)
