"""`ExpertRows`: which experts a mixture-of-experts model routed each token to, joined by position.

Row i is the routing of token i when it was read to predict token i + 1. An engine that has seen n tokens has
n - 1 rows: the last token is read only by the next call, whose prefill brings its row. Concatenating answers
therefore doubles rows or leaves placeholders between turns (verl#6029, NeMo-RL#3485, prime-rl#1807); here
each row has a position, and a later answer replaces what it covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.answers.npy import NpyHeader
from token_tracking.errors import RecordError
from token_tracking.scalars import plain_int

Rows = npt.NDArray[np.integer[Any]]
DTYPES = ("uint8", "int16", "uint16", "int32")


class DeferredRows(msgspec.Struct, frozen=True, eq=False):
    """Rows that stay out of memory (in a file, in the engine's payload) until a sample is made of them.

    Shape and dtype are checked when an answer is recorded, the values when they are read; a conversation
    reads them for `samples`, `findings` and a snapshot, and keeps none. The routing of 128k tokens over 60
    layers with 8 experts is 61 MB.

    Example: `DeferredRows((n, layers, top_k), "uint8", lambda: decode_vllm_experts(payload, experts=128))`.
    """

    shape: tuple[int, int, int]
    """Rows, layers, top_k."""
    dtype: str
    """`uint8`, `int16`, `uint16` or `int32`."""
    load: Callable[[], Rows]
    """Gives the rows, the same ones each time. Where it raises, the samples come without routed experts and
    with the reason in `provenance`; a snapshot keeps the reason."""

    def __post_init__(self) -> None:
        _check_form(self.shape, self.dtype)
        msgspec.structs.force_setattr(self, "shape", tuple(int(size) for size in self.shape))
        if not callable(self.load):
            why = f"load of deferred rows must be a function, got a {type(self.load).__name__}"
            raise RecordError(why, code="routed_payload")

    @classmethod
    def from_npy(cls, path: Path) -> DeferredRows:
        """Rows of a `.npy` file, mapped and not read; the file must stay as long as the conversation.

        Raises:
            RecordError: the file holds no routed experts.
            OSError: it cannot be read.
        """
        header = NpyHeader.of_file(path)
        _check_form(header.shape, header.dtype.name)
        return cls(header.shape, header.dtype.name, lambda: NpyHeader.of_file(path).mapped(path))

    def head(self, count: int) -> DeferredRows:
        """The first `count` rows."""
        return DeferredRows(
            (min(count, self.shape[0]), *self.shape[1:]), self.dtype, lambda: self.read()[:count]
        )

    def read(self) -> Rows:
        """The rows.

        Raises:
            RecordError: they cannot be read (`routed_payload`), are of another shape or dtype than was said
                (`routed_shape`), or hold negative ids (`routed_padding`).
        """
        try:
            loaded = self.load()
        except RecordError:
            raise
        except Exception as error:  # whatever a file, an engine's payload or the caller's own code raises
            why = f"routed experts cannot be read: {type(error).__name__}: {error!s:.300}"
            raise RecordError(why, code="routed_payload") from error
        rows = _array(loaded)
        if rows.shape != self.shape or rows.dtype.name != self.dtype:
            raise RecordError(
                f"routed experts of {self.dtype} {self.shape} were recorded, {rows.dtype} {rows.shape} were "
                "read",
                code="routed_shape",
            )
        _check_values(rows)
        return rows


class ExpertPiece(msgspec.Struct, frozen=True, eq=False):
    """Rows of one answer."""

    start: int
    """Position of the first row."""
    rows: Rows | DeferredRows
    """`[m, layers, top_k]`; shared by the branches that hold it."""
    length: int
    """How many of them are held; a branch that shares fewer tokens holds fewer."""

    def read(self) -> Rows:
        """All rows of the answer.

        Raises:
            RecordError: see `DeferredRows.read`.
        """
        return self.rows.read() if isinstance(self.rows, DeferredRows) else self.rows


class ExpertRows:
    """The routed experts of one branch, kept as they came until `joined` asks for them."""

    def __init__(self, pieces: Sequence[ExpertPiece] = ()):
        self._pieces = list(pieces)

    @property
    def pieces(self) -> tuple[ExpertPiece, ...]:
        """What is held, by rising position."""
        return tuple(self._pieces)

    def check_shape(self, rows: Rows | DeferredRows) -> None:
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

    def join(self, start: int, rows: Rows | DeferredRows) -> None:
        """Take an answer's rows from position `start` on; they replace what is held from there on.

        A full-sequence answer (`start` 0) replaces everything, a delta appends and refreshes the rows that
        it repeats.

        Raises:
            RecordError: other layers or top_k than before. Nothing was taken.
        """
        self.check_shape(rows)
        while self._pieces and self._pieces[-1].start >= start:
            self._pieces.pop()
        self._pieces.append(ExpertPiece(start, rows, rows.shape[0]))

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
        for piece, rows in self._spans(count):
            if piece.start > at:
                return at, piece.start
            at = piece.start + rows
        return None if at >= count else (at, count)

    def chunks(self, count: int) -> Iterator[Rows]:
        """The first `count` rows without a copy, answer by answer; deferred ones are read one at a time.

        Raises:
            RecordError: see `DeferredRows.read`.
        """
        for piece, rows in self._spans(count):
            yield piece.read()[:rows]

    def joined(self, count: int) -> Rows:
        """The first `count` rows, `[count, layers, top_k]`, in the widest dtype that an answer came in.

        Raises:
            ValueError: a row is missing (see `gap`), or none was ever recorded.
            RecordError: see `DeferredRows.read`.
        """
        missing = self.gap(count)
        if missing is not None or not self._pieces:
            raise ValueError(f"no routed experts for rows {missing}")
        held = [np.dtype(piece.rows.dtype) for piece, _ in self._spans(count)]
        dtype = np.result_type(*held) if held else np.dtype(self._pieces[0].rows.dtype)
        joined: Rows = np.empty((count, *self._pieces[0].rows.shape[1:]), dtype)
        at = 0
        for rows in self.chunks(count):
            joined[at : at + len(rows)] = rows
            at += len(rows)
        return joined

    def _spans(self, count: int) -> Iterator[tuple[ExpertPiece, int]]:
        """Each piece, and how many of its rows count: up to the next one's first row."""
        for index, piece in enumerate(self._pieces):
            last = index + 1 == len(self._pieces)
            end = count if last else min(count, self._pieces[index + 1].start)
            end = min(end, piece.start + piece.length)
            if piece.start < end:
                yield piece, end - piece.start


def check_rows(rows: Rows | DeferredRows, start: int, seen: int) -> None:
    """Check the rows of one answer, from position `start` on, of an engine that saw `seen` tokens.

    Raises:
        RecordError: no three dimensions or another dtype (`routed_shape`), a wrong number of rows
            (`routed_rows`), or negative ids (`routed_padding`; of deferred rows when they are read).
    """
    rows = rows if isinstance(rows, DeferredRows) else _array(rows)
    if start < 0 or rows.shape[0] != max(seen - 1 - start, 0):
        raise RecordError(
            f"{rows.shape[0]} rows of routed experts from token {start} on, the engine saw {seen} tokens: "
            f"need {seen} - 1 - {start} rows (the last token was not read yet)",
            code="routed_rows",
        )
    if not isinstance(rows, DeferredRows):
        _check_values(rows)


def _check_form(shape: object, dtype: object) -> None:
    sizes = cast("Sequence[object]", shape if isinstance(shape, (tuple, list)) else ())
    known = isinstance(dtype, str) and dtype in DTYPES
    if not known or len(sizes) != 3 or not all(_is_size(size) for size in sizes):
        raise RecordError(
            f"routed_experts must have shape [rows, layers, top_k] and dtype {', '.join(DTYPES)}, got "
            f"{dtype} {shape}",
            code="routed_shape",
        )


def _is_size(value: object) -> bool:
    size = plain_int(value)
    return size is not None and size >= 0


def _array(rows: object) -> Rows:
    if not isinstance(rows, np.ndarray):
        what = f"routed experts must be a numpy array or DeferredRows, got a {type(rows).__name__}"
        raise RecordError(what, code="routed_shape")
    array = cast("Rows", rows)
    _check_form(array.shape, array.dtype.name)
    return array


def _check_values(rows: Rows) -> None:
    if rows.size and rows.dtype.kind == "i" and int(rows.min()) < 0:
        at = int(np.flatnonzero(np.any(rows < 0, axis=(1, 2)))[0])
        raise RecordError(
            f"row {at} of the routed experts holds {int(rows.min())}: it was padded, not routed",
            code="routed_padding",
        )


def head(rows: Rows | DeferredRows, count: int) -> Rows | DeferredRows:
    """The first `count` rows."""
    return rows.head(count) if isinstance(rows, DeferredRows) else rows[:count]


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
