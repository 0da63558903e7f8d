"""Ends its own process with kill -9 at a chosen step of the protocol.

A step is a message given to or taken from the network (each of a bundle's is one), or a file opened, renamed,
cut or deleted in a folder of ours; the process dies just before or just after it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trainer_bridge.head import decode_head
from trainer_bridge.messages import Bundle
from trainer_bridge.payload import Buffer
from trainer_bridge.transport import ClientTransport, Event, Incoming, ServerTransport

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.truncate")


class Fuse:
    """Counts down; 0 steps: it never ends."""

    def __init__(self, steps: int, folder: Path) -> None:
        self._left = steps
        self._folder = str(folder)
        if steps:
            sys.addaudithook(self._on_audit)

    def burn(self, steps: int = 1) -> None:
        before, self._left = self._left, self._left - steps
        if self._left <= 0 < before:
            os.kill(os.getpid(), signal.SIGKILL)

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and str(args[0]).startswith(self._folder):
            self.burn()


def messages_in(frames: Sequence[Buffer]) -> int:
    message = decode_head(frames[0])
    return len(message.items) if isinstance(message, Bundle) else 1


class MortalClient:
    def __init__(self, inner: ClientTransport, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def wait(self, timeout_s: float) -> None:
        self._inner.wait(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def events(self, limit: int) -> list[Event]:
        found = self._inner.events(limit)
        self._fuse.burn(len(found))
        return found

    def send(self, frames: Sequence[Buffer]) -> bool:
        self._fuse.burn(messages_in(frames))
        sent = self._inner.send(frames)
        self._fuse.burn(messages_in(frames))
        return sent

    def reopen(self) -> None:
        self._inner.reopen()

    def close(self) -> None:
        self._inner.close()


class MortalServer:
    def __init__(self, inner: ServerTransport, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def refused(self) -> int:
        return self._inner.refused

    def wait(self, timeout_s: float) -> None:
        self._inner.wait(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def receive(self, limit: int) -> list[Incoming]:
        found = self._inner.receive(limit)
        self._fuse.burn(sum(messages_in(incoming.frames) for incoming in found))
        return found

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> Literal["sent", "full", "gone"]:
        self._fuse.burn()
        sent = self._inner.send(peer, frames)
        self._fuse.burn()
        return sent

    def close(self) -> None:
        self._inner.close()
