"""The header of a `.npy` file of routed experts, read before anything is made of what it says.

NumPy's own reader parses the header as Python and reserves memory for its shape. A payload comes over a
network: what it says is compared with the bytes that are there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from token_tracking.errors import RecordError

_MAGIC = b"\x93NUMPY"
_LONGEST = 4096
"""Bytes that a header of three dimensions never needs; NumPy aligns it to 64."""
_FORM = re.compile(
    rb"\{\s*'descr':\s*'(?P<dtype>[<>|=][iuf]\d)'\s*,\s*'fortran_order':\s*(?P<fortran>True|False)\s*,"
    rb"\s*'shape':\s*\(\s*(?P<rows>\d{1,15})\s*,\s*(?P<layers>\d{1,6})\s*,\s*(?P<top_k>\d{1,6})\s*,?\s*\)"
    rb"\s*,?\s*\}\s*"
)


class NpyHeader(NamedTuple):
    """What a `.npy` file of three dimensions says of itself."""

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    fortran: bool
    offset: int
    """Where the values begin."""

    @classmethod
    def of(cls, start: bytes, what: str) -> NpyHeader:
        """The header that these bytes begin with.

        Args:
            start: the file, or as much of its start as holds the header.
            what: names the file in error messages.

        Raises:
            RecordError: they do not begin with the header of an array of numbers in three dimensions.
        """
        if start[:6] != _MAGIC or len(start) < 12:
            raise RecordError(f"{what} is no .npy file: it begins with {start[:8]!r}", code="routed_payload")
        wide = start[6] > 1
        at = 12 if wide else 10
        offset = at + int.from_bytes(start[8:at], "little")
        form = _FORM.fullmatch(start[at:offset]) if len(start) >= offset and offset <= _LONGEST else None
        if form is None:
            raise RecordError(
                f"{what} holds no array of numbers in three dimensions: {start[at : at + 80]!r}",
                code="routed_payload",
            )
        shape = (int(form["rows"]), int(form["layers"]), int(form["top_k"]))
        try:
            dtype = np.dtype(form["dtype"].decode())
        except TypeError as error:  # an integer of three bytes
            raise RecordError(f"{what} has an unknown dtype: {error}", code="routed_payload") from error
        return cls(shape, dtype, form["fortran"] == b"True", offset)

    @classmethod
    def of_file(cls, path: Path) -> NpyHeader:
        """The header of a file that is as long as it says.

        Raises:
            RecordError: see `of`, or the file is shorter or longer.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            header = cls.of(file.read(_LONGEST), str(path))
        header.check_length(path.stat().st_size, str(path))
        return header

    def check_length(self, length: int, what: str) -> None:
        """Compare the bytes that the header asks for with those that are there.

        Raises:
            RecordError: they differ.
        """
        rows, layers, top_k = self.shape
        needed = self.offset + rows * layers * top_k * self.dtype.itemsize
        if needed != length:
            raise RecordError(
                f"{what} has {length} bytes, its header asks for {needed} ({self.dtype} {self.shape}): cut "
                "short, or something follows",
                code="routed_payload",
            )

    def values(self, data: bytes) -> npt.NDArray[Any]:
        """The array in the bytes of the whole file, without a copy."""
        order = "F" if self.fortran else "C"
        return np.frombuffer(data, self.dtype, offset=self.offset).reshape(self.shape, order=order)

    def mapped(self, path: Path) -> npt.NDArray[Any]:
        """The array in the file, mapped and not read."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)  # nothing cannot be mapped
        order = "F" if self.fortran else "C"
        return np.memmap(path, self.dtype, "r", self.offset, self.shape, order)
