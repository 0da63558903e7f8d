"""The payload frame: arrays, little endian, each at a 64-byte offset, described by a table in the head.

Packing copies once. The copy is never written again, so that the very bytes can be sent, re-sent and
spooled while the caller reuses its arrays (vllm-project/vllm#50053, #53217: a shared buffer was overwritten
in flight).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from trainer_bridge.errors import ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.messages import ArrayEntry

ALIGNMENT = 64
MAX_DIMENSIONS = 8

DTYPES: dict[str, np.dtype[np.generic]] = {
    "bool": np.dtype("|b1"),
    "u1": np.dtype("|u1"),
    "i1": np.dtype("|i1"),
    "u2": np.dtype("<u2"),
    "i2": np.dtype("<i2"),
    "u4": np.dtype("<u4"),
    "i4": np.dtype("<i4"),
    "u8": np.dtype("<u8"),
    "i8": np.dtype("<i8"),
    "f2": np.dtype("<f2"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
}
"""Every dtype code of the wire and what it means in numpy."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_GAP = bytes(ALIGNMENT)

Array = npt.NDArray[np.generic]
Buffer = bytes | memoryview


def pack(arrays: Iterable[tuple[str, Array]]) -> tuple[tuple[ArrayEntry, ...], bytes]:
    """Copy arrays into one new payload.

    Args:
        arrays: name and array, any layout in memory, of a dtype in `DTYPES` in any byte order.

    Returns:
        The table in the same order, and the payload. Gaps are zero.

    Raises:
        UnsendableError: a dtype the wire does not know.
    """
    table: list[ArrayEntry] = []
    pieces: list[Buffer] = []
    at = 0
    for name, array in arrays:
        dtype = array.dtype.newbyteorder("<")
        code = _CODES.get(dtype)
        if code is None:
            raise UnsendableError(f"array {name} has dtype {array.dtype}; the wire knows {', '.join(DTYPES)}")
        offset = _aligned(at)
        table.append(ArrayEntry(name, code, array.shape, offset, array.nbytes))
        pieces += [_GAP[: offset - at], _bytes_of(array, dtype)]
        at = offset + array.nbytes
    return tuple(table), b"".join(pieces)


def unpack(table: Sequence[ArrayEntry], payload: Buffer) -> dict[str, Array]:
    """Read-only views of the arrays in a payload; copied only if the payload lies at an odd address.

    A view keeps the whole message in memory; copy what is kept for long.

    Raises:
        ProtocolError: the table contradicts itself or the payload. Every bound is checked before anything
            is made.
    """
    size = len(payload)
    names: set[str] = set()
    at = 0
    for entry in table:
        _check_entry(entry, at, size)
        if entry.name in names:
            raise ProtocolError(ErrorCode.DUPLICATE_ARRAY, f"array {entry.name!r} stands twice in the table")
        names.add(entry.name)
        at = entry.offset + entry.nbytes
    if at != size:
        raise ProtocolError(ErrorCode.BAD_PAYLOAD_LENGTH, f"arrays end at {at}, the payload at {size}")
    base = np.frombuffer(payload, np.uint8) if size else np.empty(0, np.uint8)
    if base.__array_interface__["data"][0] % 8:
        # Small messages lie anywhere in the socket's read buffer; kernels that use the views want alignment.
        base = base.copy()
    base.flags.writeable = False
    return {
        e.name: base[e.offset : e.offset + e.nbytes].view(DTYPES[e.dtype]).reshape(e.shape) for e in table
    }


def _check_entry(entry: ArrayEntry, at: int, size: int) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ProtocolError(ErrorCode.UNKNOWN_DTYPE, f"array {entry.name!r} has dtype {entry.dtype!r}")
    if len(entry.shape) > MAX_DIMENSIONS or any(n < 0 for n in entry.shape):
        raise ProtocolError(ErrorCode.BAD_SHAPE, f"array {entry.name!r} has shape {entry.shape}")
    if math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
        raise ProtocolError(
            ErrorCode.BAD_SHAPE,
            f"array {entry.name!r}: shape {entry.shape} of {entry.dtype} is not {entry.nbytes} bytes",
        )
    if entry.offset % ALIGNMENT or entry.offset < at or entry.offset + entry.nbytes > size:
        raise ProtocolError(
            ErrorCode.BAD_OFFSET,
            f"array {entry.name!r} at {entry.offset}, {entry.nbytes} bytes: must start at a multiple "
            f"of {ALIGNMENT}, not before {at}, and end by {size}",
        )


def _bytes_of(array: Array, dtype: np.dtype[np.generic]) -> Buffer:
    little = np.ascontiguousarray(array, dtype)
    return little.reshape(-1).view(np.uint8).data if little.size else b""


def _aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & -ALIGNMENT
