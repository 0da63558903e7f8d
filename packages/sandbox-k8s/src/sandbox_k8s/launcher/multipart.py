"""``multipart/form-data`` in constant memory: one file field goes to a sink, the others are text."""

import re
from collections.abc import Iterator
from typing import IO

from .frames import Readable

_READ = 1 << 18
_LARGEST_FIELD = 1 << 20
_BOUNDARY = re.compile(r'boundary="?([^";]+)"?')
_NAME = re.compile(r'\bname="([^"]*)"')


class MultipartError(ValueError):
    """The body is not the form it says it is."""


def parse(source: Readable, content_type: str, *, file_field: str, sink: IO[bytes]) -> dict[str, str]:
    """Read a form; returns its text fields.

    Raises:
        MultipartError: It is malformed or breaks off.
    """
    found = _BOUNDARY.search(content_type)
    if not content_type.startswith("multipart/form-data") or not found:
        raise MultipartError(f"expected multipart/form-data with a boundary, got {content_type!r}")
    # The first boundary has no line break before it; giving it one makes all alike.
    scanner = _Scanner(source, b"\r\n")
    mark = b"\r\n--" + found[1].encode()
    for _ in scanner.until(mark):
        pass
    fields: dict[str, str] = {}
    while scanner.take(2) == b"\r\n":
        head = b"".join(scanner.until(b"\r\n\r\n")).decode("utf-8", "replace")
        name = _NAME.search(head)
        if name is None:
            raise MultipartError(f"a part has no name: {head!r}")
        if name[1] == file_field:
            for data in scanner.until(mark):
                sink.write(data)
        else:
            value = bytearray()
            for data in scanner.until(mark):
                value += data
                if len(value) > _LARGEST_FIELD:
                    raise MultipartError(f"field {name[1]!r} is larger than {_LARGEST_FIELD} bytes")
            fields[name[1]] = value.decode("utf-8", "surrogateescape")
    return fields


class _Scanner:
    """Reads up to marks without holding more than one read and one mark."""

    def __init__(self, source: Readable, start: bytes) -> None:
        self._source = source
        self._held = bytearray(start)

    def until(self, mark: bytes) -> Iterator[bytes]:
        """Yield what comes before ``mark``, and step over the mark."""
        while (at := self._held.find(mark)) < 0:
            safe = len(self._held) - len(mark) + 1
            if safe > 0:
                yield bytes(self._held[:safe])
                del self._held[:safe]
            self._more()
        yield bytes(self._held[:at])
        del self._held[: at + len(mark)]

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        while len(self._held) < size:
            self._more()
        data = bytes(self._held[:size])
        del self._held[:size]
        return data

    def _more(self) -> None:
        data = self._source.read(_READ)
        if not data:
            raise MultipartError("the form ended early")
        self._held += data
