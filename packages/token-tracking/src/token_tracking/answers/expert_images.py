"""`ExpertImage`: the routed experts of one answer as bytes of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from token_tracking.answers.experts import DTYPES, DeferredRows, ExpertPiece, ExpertRows, Rows
from token_tracking.errors import RecordCode, RecordError, SnapshotError


class ExpertImage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The routed experts of one answer, little-endian."""

    start: int
    shape: tuple[int, int, int]
    dtype: str
    data: bytes
    unreadable: tuple[RecordCode, str] | None = None
    """Why deferred rows could not be read when the snapshot was made; `data` is then empty."""

    @classmethod
    def of(cls, piece: ExpertPiece) -> ExpertImage:
        """Image of an answer's rows, or why they cannot be read."""
        layers, top_k = piece.rows.shape[1:]
        shape = (piece.rows.shape[0], layers, top_k)
        try:
            rows = piece.read()
        except RecordError as error:
            dtype = str(piece.rows.dtype)
            return cls(
                start=piece.start, shape=shape, dtype=dtype, data=b"", unreadable=(error.code, str(error))
            )
        data = rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()
        return cls(start=piece.start, shape=shape, dtype=rows.dtype.name, data=data)

    def rows(self) -> Rows | DeferredRows:
        """The rows; those that could not be read are deferred ones that still cannot.

        Raises:
            SnapshotError: dtype, shape and data do not fit.
        """
        if self.dtype not in DTYPES:
            raise SnapshotError(f"routed experts of dtype {self.dtype!r}; need {', '.join(DTYPES)}")
        if self.unreadable is not None:
            return _unreadable(self.shape, self.dtype, *self.unreadable)
        dtype = np.dtype(self.dtype)
        try:
            values = np.frombuffer(self.data, dtype.newbyteorder("<")).astype(dtype, copy=False)
            return values.reshape(self.shape)
        except ValueError as error:
            raise SnapshotError(f"routed experts do not fit their shape {self.shape}: {error}") from error


def _unreadable(shape: tuple[int, int, int], dtype: str, code: RecordCode, why: str) -> DeferredRows:
    def load() -> Rows:
        raise RecordError(why, code=code)

    try:
        return DeferredRows(shape, dtype, load)
    except RecordError as error:
        raise SnapshotError(f"routed experts do not fit their shape: {error}") from error


class ExpertTable:
    """Each answer's routed experts once, however many branches hold them."""

    def __init__(self) -> None:
        self.images: list[ExpertImage] = []
        self._known: dict[int, int] = {}

    def add(self, piece: ExpertPiece) -> tuple[int, int]:
        """Index of a piece's image and the rows that are held of it."""
        key = id(piece.rows)
        if key not in self._known:
            self._known[key] = len(self.images)
            self.images.append(ExpertImage.of(piece))
        return self._known[key], piece.length


def held_rows(
    images: Sequence[ExpertImage],
    rows: Sequence[Rows | DeferredRows],
    held: Sequence[tuple[int, int]],
    tokens: int,
) -> ExpertRows:
    """The rows of one branch, checked to lie among its tokens."""
    pieces: list[ExpertPiece] = []
    for index, length in held:
        known = 0 <= index < len(rows)
        start = images[index].start if known else -1
        after = pieces[-1].start if pieces else -1
        if not (start > after and 0 <= length <= rows[index].shape[0] and start + length <= tokens):
            raise SnapshotError(f"{length} rows of routed experts {index} do not fit {tokens} tokens")
        pieces.append(ExpertPiece(start, rows[index], length))
    return ExpertRows(pieces)
