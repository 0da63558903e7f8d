"""The payload frame: arrays, little endian, each at a 64-byte offset, described by a table in the head.

Packing copies once. The copy is never written again, so that the very bytes can be sent, re-sent and
spooled while the caller reuses its arrays (vllm-project/vllm#50053, #53217: a shared buffer was overwritten
in flight); where it comes from a pool, its memory is used anew only when nothing refers to it any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.errors import ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.messages import ArrayEntry

ALIGNMENT = 64
RUN_BYTES = 1 << 22
"""Payloads written next to each other, at most; the memory of a run comes back when all of it is settled."""
MAX_DIMENSIONS = 8

BFLOAT16 = "bf2"
"""Code of bfloat16: the upper half of an IEEE 754 single."""

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
"""Every dtype code that numpy has a dtype for. numpy has none for `bf2` (`Bfloat16`)."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in DTYPES.items()} | {BFLOAT16: 2}

_UINT16 = np.dtype("<u2")
_GAPS = tuple(bytes(n) for n in range(ALIGNMENT))

Array = npt.NDArray[np.generic]
Buffer = bytes | memoryview


class Bfloat16:
    """Marks an array as bfloat16 where numpy has no dtype for it.

    Args:
        bits: uint16, any shape: each element's 16 bits. An array of `ml_dtypes.bfloat16` needs no mark.

    Raises:
        UnsendableError: `bits` is not uint16.
    """

    __slots__ = ("bits",)

    def __init__(self, bits: Array) -> None:
        if bits.dtype != np.uint16:
            raise UnsendableError(f"bfloat16 is given as its 16 bits in uint16, got {bits.dtype}")
        self.bits = bits


def to_float32(bits: Array) -> npt.NDArray[np.float32]:
    """The values of bfloat16 bits, exactly."""
    return (bits.astype("<u4") << 16).view("<f4")


class Layout(NamedTuple):
    """A payload that is not written yet.

    Attributes:
        table: its arrays, in the order in which they were given.
        pieces: what its bytes are, end to end; gaps are zero.
        nbytes: their sum.
    """

    table: tuple[ArrayEntry, ...]
    pieces: list[Buffer]
    nbytes: int


def aligned(at: int) -> int:
    """The next place where an array, or a payload, may begin."""
    return (at + ALIGNMENT - 1) & -ALIGNMENT


def lay_out(arrays: Iterable[tuple[str, Array | Bfloat16]]) -> Layout:
    """Where arrays will stand in a payload; nothing is copied but what is not as the wire wants it.

    Args:
        arrays: name and array, any layout in memory, of a dtype in `DTYPES` in any byte order, or bfloat16.

    Raises:
        UnsendableError: a dtype the wire does not know.
    """
    table: list[ArrayEntry] = []
    pieces: list[Buffer] = []
    at = 0
    for name, array in arrays:
        code, little = _little(name, array)
        offset = (at + ALIGNMENT - 1) & -ALIGNMENT
        if offset != at:
            pieces.append(_GAPS[offset - at])
        nbytes = little.nbytes
        if nbytes:
            pieces.append(little.data.cast("B"))
        table.append(ArrayEntry(name, code, little.shape, offset, nbytes))
        at = offset + nbytes
    return Layout(tuple(table), pieces, at)


def write(layouts: Sequence[Layout], pool: BlockPool | None = None) -> list[Buffer]:
    """Write payloads, one after the other in memory: a bundle of neighbours needs no copy.

    Args:
        layouts: one for each payload.
        pool: where the memory comes from. None: allocated.
    """
    payloads: list[Buffer] = []
    begin = at = 0
    for n, layout in enumerate(layouts):
        if n > begin and aligned(at) + layout.nbytes > RUN_BYTES:
            payloads += _write_run(layouts[begin:n], pool)
            begin, at = n, 0
        at = aligned(at) + layout.nbytes
    return payloads + _write_run(layouts[begin:], pool)


def _write_run(layouts: Sequence[Layout], pool: BlockPool | None) -> list[Buffer]:
    """Payloads in one piece of memory."""
    whole, spans = lay_together([(layout.pieces, layout.nbytes) for layout in layouts], pool)
    if len(layouts) == 1:
        return [whole]
    view = memoryview(whole)
    return [view[start:end] for start, end in spans]


def lay_together(
    payloads: Sequence[tuple[Sequence[Buffer], int]], pool: BlockPool | None
) -> tuple[Buffer, list[tuple[int, int]]]:
    """Copy payloads into one piece of memory, each to the next place where one may begin; gaps are zero.

    Args:
        payloads: each as its pieces, and their bytes together.
        pool: where the memory comes from. None: allocated.

    Returns:
        The memory, and where each payload begins and ends in it.
    """
    pieces: list[Buffer] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for parts, nbytes in payloads:
        start = aligned(at)
        if start != at:
            pieces.append(_GAPS[start - at])
        pieces += parts
        at = start + nbytes
        spans.append((start, at))
    return b"".join(pieces) if pool is None or at < pool.smallest else pool.join(pieces, at), spans


def pack(
    arrays: Iterable[tuple[str, Array | Bfloat16]], pool: BlockPool | None = None
) -> tuple[tuple[ArrayEntry, ...], Buffer]:
    """Copy arrays into one new payload: its table, and its bytes. Arguments and errors as `lay_out`."""
    layout = lay_out(arrays)
    return layout.table, write([layout], pool)[0]


def unpack(table: Sequence[ArrayEntry], payload: Buffer) -> dict[str, Array]:
    """Read-only views of the arrays in a payload; copied only if the payload lies at an odd address.

    bfloat16 comes as its bits, uint16 (`to_float32`). A view keeps the whole message in memory; copy what is
    kept for long.

    Raises:
        ProtocolError: the table contradicts itself or the payload. Every bound is checked before anything
            is made.
    """
    size = len(payload)
    names: set[str] = set()
    at = 0
    for entry in table:
        at = _check_entry(entry, at, size)
        if entry.name in names:
            raise ProtocolError(ErrorCode.DUPLICATE_ARRAY, f"array {entry.name!r} stands twice in the table")
        names.add(entry.name)
    if at != size:
        raise ProtocolError(ErrorCode.BAD_PAYLOAD_LENGTH, f"arrays end at {at}, the payload at {size}")
    base: Buffer = memoryview(payload).toreadonly()
    if size >= 8 and not np.frombuffer(base, np.int64, 1).flags.aligned:
        # Small messages lie anywhere in the socket's read buffer; kernels that use the views want alignment.
        base = bytes(payload)
    return {
        entry.name: np.ndarray(entry.shape, DTYPES.get(entry.dtype, _UINT16), base, entry.offset)
        for entry in table
    }


def _check_entry(entry: ArrayEntry, at: int, size: int) -> int:
    """Raise if the entry is wrong; returns where it ends."""
    width = _ITEM_BYTES.get(entry.dtype)
    if width is None:
        raise ProtocolError(ErrorCode.UNKNOWN_DTYPE, f"array {entry.name!r} has dtype {entry.dtype!r}")
    shape, offset, nbytes = entry.shape, entry.offset, entry.nbytes
    if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise ProtocolError(ErrorCode.BAD_SHAPE, f"array {entry.name!r} has shape {shape}")
    if math.prod(shape) * width != nbytes:
        raise ProtocolError(
            ErrorCode.BAD_SHAPE,
            f"array {entry.name!r}: shape {shape} of {entry.dtype} is not {nbytes} bytes",
        )
    if offset % ALIGNMENT or offset < at or offset + nbytes > size:
        raise ProtocolError(
            ErrorCode.BAD_OFFSET,
            f"array {entry.name!r} at {offset}, {nbytes} bytes: must start at a multiple "
            f"of {ALIGNMENT}, not before {at}, and end by {size}",
        )
    return offset + nbytes


def _little(name: str, array: Array | Bfloat16) -> tuple[str, Array]:
    """The code of an array, and its elements contiguous and little endian."""
    if isinstance(array, Bfloat16):
        return BFLOAT16, np.ascontiguousarray(array.bits, _UINT16).reshape(array.bits.shape)
    code = _CODES.get(array.dtype)
    if code is not None and array.flags.c_contiguous:
        return code, array
    if array.dtype.name == "bfloat16":
        return _little(name, Bfloat16(array.view(np.uint16)))
    dtype = array.dtype.newbyteorder("<")
    code = _CODES.get(dtype)
    if code is None:
        known = ", ".join([*DTYPES, BFLOAT16])
        raise UnsendableError(f"array {name} has dtype {array.dtype}; the wire knows {known}")
    # ascontiguousarray makes a scalar one-dimensional.
    return code, np.ascontiguousarray(array, dtype).reshape(array.shape)
