"""`BlockPool`: memory for large payloads, used again instead of given back to the system.

Fresh memory costs a page fault for each 4 KiB that is written, which is more than the copy itself; and memory
that is allocated in one thread and freed in another, as a message is, tends to be fresh each time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SMALLEST = 1 << 14
"""Smaller payloads are left to the allocator, which reuses its memory by itself."""
SLAB_BYTES = 1 << 24
"""Blocks are cut from pieces of this size, for which numpy asks the system for huge pages."""
IDLE_BYTES = 64 << 20
"""So much memory that nobody uses is kept for the next payload."""


class _Slab:
    """A piece of memory, cut into blocks of one size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks = max(SLAB_BYTES // size, 1)
        self.memory = np.empty(self.blocks * size, np.uint8)
        self.idle = list(range(self.blocks - 1, -1, -1))


class BlockPool:
    """Hands out buffers, and takes their memory back when the last reference to a buffer is gone.

    The caller shares a buffer freely: with an outbox, with libzmq's own thread, with views of it. Memory
    comes back by the life of the buffer object alone, so it cannot be overwritten while anyone can still read
    it. Safe from any thread.

    Args:
        idle_bytes: unused memory that is kept.
    """

    def __init__(self, *, idle_bytes: int = IDLE_BYTES) -> None:
        self.smallest = SMALLEST
        """Payloads of fewer bytes are not worth a block."""
        self._idle_bytes = idle_bytes
        self._unused_bytes = 0
        self._open: dict[int, list[_Slab]] = {}
        """Slabs with an idle block, by the size of their blocks."""
        self._lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
        # Reentrant: the garbage collector may give a block back in a thread that is just taking one.
        self._lock = threading.RLock()

    def join(self, pieces: Sequence[memoryview | bytes], nbytes: int) -> memoryview:
        """The pieces one after the other, read-only.

        Args:
            pieces: bytes, or views of bytes.
            nbytes: their sum.
        """
        # A memoryview refers to `lent`, and so does whatever is made of it; arrays made of `lent` itself
        # would refer to the slab.
        lent = self._take(nbytes)
        target = lent.data
        at = 0
        for piece in pieces:
            end = at + len(piece)
            target[at:end] = piece
            at = end
        return target.toreadonly()

    def _take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        size = _size_class(nbytes)
        with self._lock:
            slabs = self._open.setdefault(size, [])
            if not slabs:
                slabs.append(_Slab(size))
                self._unused_bytes += slabs[-1].blocks * size
            slab = slabs[-1]
            block = slab.idle.pop()
            self._unused_bytes -= size
            if not slab.idle:
                slabs.pop()
        lent = slab.memory[block * size : block * size + nbytes]
        key = id(lent)

        def give_back(_: object) -> None:
            with self._lock:
                del self._lent[key]
                self._put(slab, block)

        self._lent[key] = weakref.ref(lent, give_back)
        return lent

    def _put(self, slab: _Slab, block: int) -> None:
        slabs = self._open.setdefault(slab.size, [])
        if not slab.idle:
            slabs.append(slab)
        slab.idle.append(block)
        self._unused_bytes += slab.size
        if len(slab.idle) == slab.blocks and self._unused_bytes > self._idle_bytes:
            slabs.remove(slab)
            self._unused_bytes -= slab.blocks * slab.size


def _size_class(nbytes: int) -> int:
    """The next of four steps between powers of two: at most a quarter is unused."""
    step = 1 << max(nbytes.bit_length() - 3, 12)
    return (nbytes + step - 1) & -step
