"""ZMTP 3.x framing (rfc.zeromq.org/spec/23), as much of it as tells messages from the rest."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from trainer_bridge.payload import Buffer

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


class FrameReader:
    """Cuts one direction of a connection into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting = GREETING_BYTES
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes | list[bytes]]:
        """Take bytes in; what they complete: raw bytes (greeting, commands) or the frames of a message."""
        if self._greeting:
            head, data = data[: self._greeting], data[self._greeting :]
            self._greeting -= len(head)
            yield head
        self._buffer += data
        while (frame := self._next_frame()) is not None:
            flags, raw, body = frame
            if flags & COMMAND:
                yield raw
                continue
            self._parts.append(body)
            if not flags & MORE:
                message, self._parts = self._parts, []
                yield message

    def _next_frame(self) -> tuple[int, bytes, bytes] | None:
        if len(self._buffer) < 2:
            return None
        flags = self._buffer[0]
        start = 9 if flags & LONG else 2
        if len(self._buffer) < start:
            return None
        size = struct.unpack_from(">Q", self._buffer, 1)[0] if flags & LONG else self._buffer[1]
        if len(self._buffer) < start + size:
            return None
        raw = bytes(self._buffer[: start + size])
        del self._buffer[: start + size]
        return flags, raw, raw[start:]


def encode_message(frames: Sequence[Buffer]) -> bytes:
    """A message as it stands on the connection."""
    out: list[bytes | memoryview] = []
    for n, frame in enumerate(frames):
        flags = MORE if n + 1 < len(frames) else 0
        size = len(frame)
        out.append(struct.pack(">BQ", flags | LONG, size) if size > 255 else bytes((flags, size)))
        out.append(frame)
    return b"".join(out)
