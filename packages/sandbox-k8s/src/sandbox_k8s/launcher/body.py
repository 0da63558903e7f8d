"""What a request brings: its body as a stream, as bytes, or as a JSON object."""

import json
import re
import sys
from typing import Any

LARGEST = 256 << 20
_NUMBER = re.compile("[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})\s*(;.*)?")


class BadRequestError(Exception):
    """The request cannot be understood."""


def number(text: str, name: str) -> int:
    """A whole number from 0, in ASCII digits.

    Raises:
        BadRequestError: It is none.
    """
    if not _NUMBER.fullmatch(text):
        raise BadRequestError(f"{name} must be a whole number from 0, got {text[:40]!r}")
    return int(text)


def as_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; an empty body is an empty object."""
    try:
        value = json.loads(data or b"{}")
    except ValueError as problem:
        raise BadRequestError(f"the body is not JSON: {problem}") from problem
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError("the body is not a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


class Body:
    """A request body as a stream, by length or in chunks; `read` gives fewer bytes only at the end.

    Attributes:
        broken: Whether it did not come whole.
    """

    def __init__(self, stream: Any, length: int | None, chunked: bool) -> None:
        self.broken = False
        self._stream = stream
        self._chunked = chunked
        self._left = 0 if chunked else (length or 0)
        self._ended = not chunked and self._left == 0

    def read(self, size: int = -1, /) -> bytes:
        """Read up to ``size`` bytes.

        Raises:
            BadRequestError: The connection broke off in the middle.
        """
        try:
            return self._read(size)
        except (BadRequestError, OSError):
            self.broken = True
            raise

    def _read(self, size: int) -> bytes:
        pieces: list[bytes] = []
        wanted = sys.maxsize if size < 0 else size
        while wanted and not self._ended:
            if not self._left and not self._next_chunk():
                break
            data = self._stream.read(min(self._left, wanted))
            if not data:
                raise BadRequestError("the body ended early")
            self._left -= len(data)
            wanted -= len(data)
            pieces.append(data)
            if not self._left and not self._chunked:
                self._ended = True
        return b"".join(pieces)

    def whole(self) -> bytes:
        """All of it: half of it must not become half of a command's input.

        Raises:
            BadRequestError: It has more than `LARGEST` bytes, or did not come whole.
        """
        data = self.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise BadRequestError(f"the request has more than {LARGEST} bytes: send large data as a file")
        return data

    def _next_chunk(self) -> bool:
        line = self._stream.readline(1024).strip() or self._stream.readline(1024).strip()
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise BadRequestError("the body ended early, or its chunks are malformed")
        self._left = int(found[1], 16)
        if self._left:
            return True
        while self._stream.readline(1024).strip():
            pass
        self._ended = True
        return False

    def finish(self, limit: int) -> bool:
        """Read away what was not used; False when that is more than ``limit`` bytes."""
        while not self._ended and limit > 0:
            limit -= len(self.read(min(limit, 1 << 16)))
        return self._ended
