"""Keeping output within bounds: the head, the tail, and how much there was."""

import os
from collections import deque

READ_SIZE = 1 << 16


class Capture:
    """Collects a stream: all of it up to ``limit`` bytes, else its first and last halves."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def add(self, data: bytes) -> None:
        """Append what was read."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail; together they are the whole stream unless their sizes fall short of `total`."""
        tail = b"".join(self._tail)
        return bytes(self._head), tail[-self._tail_limit :] if self._tail_limit else b""


def read_available(fd: int, capture: Capture) -> bool:
    """Read a non-blocking descriptor until it would block; False at its end."""
    while True:
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return True
        if not data:
            return False
        capture.add(data)


def read_once(fd: int, capture: Capture) -> bool:
    """Read one chunk of a non-blocking descriptor; False at its end."""
    try:
        data = os.read(fd, READ_SIZE)
    except BlockingIOError:
        return True
    capture.add(data)
    return bool(data)
