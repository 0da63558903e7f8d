"""Byte streams that prove they are whole: length-prefixed frames, then a JSON trailer with size and sha256.

A stream that just ends is indistinguishable from a broken connection (kubernetes/kubernetes#124571 cut output
and reported success); here the trailer must come and must agree.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

CHUNK = 1 << 20
LARGEST_FRAME = 8 << 20
_HEAD = struct.Struct(">I")


class Trailer(NamedTuple):
    """What the sender says it sent."""

    size: int
    sha256: str
    error: str


class FrameError(Exception):
    """The stream broke off, or does not hold what its trailer says."""


class Readable(Protocol):
    """Anything with ``read(n)`` that returns fewer bytes only at the end."""

    def read(self, size: int, /) -> bytes:
        """Read up to ``size`` bytes."""
        ...


def encode(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Frame ``chunks``. An `OSError` of the source is sent as the trailer's error, not raised."""
    digest = hashlib.sha256()
    size = 0
    error = ""
    try:
        for chunk in chunks:
            for start in range(0, len(chunk), LARGEST_FRAME):
                piece = chunk[start : start + LARGEST_FRAME]
                digest.update(piece)
                size += len(piece)
                yield _HEAD.pack(len(piece)) + piece
    except OSError as problem:
        error = str(problem)
    trailer = json.dumps({"size": size, "sha256": digest.hexdigest(), "error": error}).encode()
    yield _HEAD.pack(0) + _HEAD.pack(len(trailer)) + trailer


class Decoder:
    """Takes frames apart as bytes arrive; checks them against the trailer.

    Feed it any pieces; it returns the data in them. `trailer` is None until the whole stream has come.
    """

    def __init__(self) -> None:
        self.trailer: Trailer | None = None
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the complete frames in them.

        Raises:
            FrameError: A frame is too large, something follows the trailer, or the trailer does not agree.
        """
        if self.trailer is not None and data:
            raise FrameError("bytes follow the trailer")
        self._buffer += data
        frames: list[bytes] = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length == 0:
                self._read_trailer()
                break
            if length > LARGEST_FRAME:
                raise FrameError(f"a frame of {length} bytes is larger than {LARGEST_FRAME}")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            self._digest.update(frame)
            self._size += length
            frames.append(frame)
        return frames

    def _read_trailer(self) -> None:
        start = 2 * _HEAD.size
        if len(self._buffer) < start:
            return
        (length,) = _HEAD.unpack_from(self._buffer, _HEAD.size)
        if length > LARGEST_FRAME:
            raise FrameError(f"a trailer of {length} bytes")
        if len(self._buffer) < start + length:
            return
        if len(self._buffer) > start + length:
            raise FrameError("bytes follow the trailer")
        try:
            trailer = Trailer(**json.loads(self._buffer[start:]))
        except (ValueError, TypeError) as problem:
            raise FrameError(f"the trailer is not readable: {problem}") from problem
        if trailer.error:
            raise FrameError(f"the sender stopped: {trailer.error}")
        if (trailer.size, trailer.sha256) != (self._size, self._digest.hexdigest()):
            raise FrameError(f"{self._size} bytes came, {trailer.size} were sent, or their sha256 differ")
        self._buffer.clear()
        self.trailer = trailer


def decode(source: Readable) -> Iterator[bytes]:
    """Yield the data of a framed stream.

    Raises:
        FrameError: The stream ends before its trailer, or does not agree with it.
    """
    decoder = Decoder()
    while data := source.read(CHUNK):
        yield from decoder.feed(data)
    if decoder.trailer is None:
        raise FrameError("the stream ended before its trailer")
