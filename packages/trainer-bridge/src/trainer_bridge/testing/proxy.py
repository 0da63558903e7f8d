"""`FaultProxy`: stands between real senders and a real receiver, and harms what passes, by a seed."""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading
from types import TracebackType
from urllib.parse import urlsplit

import numpy as np

from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.errors import AddressError
from trainer_bridge.testing.faults import FaultCounts, FaultLine, Faults
from trainer_bridge.testing.zmtp import FrameReader, encode_message

log = logging.getLogger(__name__)

TICK_S = 0.1
READ_BYTES = 1 << 18
MAX_WAITING_BYTES = 16 << 20
"""A direction with more than this to write is not read from until it has less."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Direction:
    """Bytes from one socket to the other, as messages."""

    def __init__(self, source: socket.socket, target: socket.socket, line: FaultLine) -> None:
        self.source = source
        self.target = target
        self.line = line
        self.out = bytearray()
        self._reader = FrameReader()

    def feed(self, data: bytes, now_s: float) -> bool:
        """Take bytes in. False: this connection is to be cut."""
        for item in self._reader.feed(data):
            if isinstance(item, bytes):
                self.out += item  # greetings and commands: ZeroMQ's own, not ours to harm
            elif self.line.take(item, now_s) == "cut":
                torn = encode_message(item)
                self.out += torn[: len(torn) // 2]
                return False
        self.pump(now_s)
        return True

    def pump(self, now_s: float) -> None:
        """Move what is due to the bytes that wait to be written."""
        for frames in self.line.due(now_s):
            self.out += encode_message(frames)

    def flush(self) -> None:
        """Write what the socket takes. Raises OSError if it is gone."""
        while self.out:
            try:
                sent = self.target.send(self.out)
            except BlockingIOError:
                return
            del self.out[:sent]


class _Link:
    """One sender's connection, and ours to the receiver on its behalf."""

    def __init__(
        self, client: socket.socket, server: socket.socket, lines: tuple[FaultLine, FaultLine]
    ) -> None:
        self.sockets = (client, server)
        self.directions = (_Direction(client, server, lines[0]), _Direction(server, client, lines[1]))

    def close(self, *, reset: bool) -> None:
        for each in self.sockets:
            if reset:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            each.close()


class FaultProxy:
    """A TCP proxy that knows ZeroMQ's framing, so that it harms whole messages.

    Give senders `proxy.address` instead of the receiver's; they may live in any process. Both directions are
    harmed. It reads no encrypted traffic: test without keys.

    Args:
        upstream: the receiver, `tcp://HOST:PORT`; it may come and go.
        faults: see `Faults`; may be replaced at any time (`proxy.faults = Faults()` mends the network).
        seed: of the faults. Draws are by connection and message, so that it repeats them as far as the ends
            repeat their messages.
        clock: time.

    Raises:
        AddressError: `upstream` is no TCP address.
    """

    def __init__(
        self, upstream: str, faults: Faults | None = None, *, seed: int = 0, clock: Clock | None = None
    ) -> None:
        parts = urlsplit(upstream)
        if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
            raise AddressError(f"{upstream!r} is not an address for a proxy: write tcp://HOST:PORT")
        self._upstream = (parts.hostname, parts.port)
        self._clock = clock or SystemClock()
        self._rng = np.random.default_rng(seed)
        self._faults = faults or Faults()
        self.counts = FaultCounts()
        """What was done so far."""
        self.blocked = False
        """True: connections are refused, as if the receiver's machine were gone."""
        self._links: list[_Link] = []
        self._cut_all = False
        self._stop = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        """Where senders connect to."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name=f"trainer-bridge fault proxy {self.address}", daemon=True
        )
        self._thread.start()

    @property
    def faults(self) -> Faults:
        """What happens to messages."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        for link in list(self._links):
            for direction in link.directions:
                direction.line.faults = faults

    def cut(self) -> None:
        """End every connection, now."""
        self._cut_all = True

    def close(self) -> None:
        """End every connection, and listen no more."""
        self._stop = True
        self._thread.join()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stop:
                for key, ready in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._links:
                        self._on_ready(key.data, key.fileobj, ready)
                if self._cut_all:
                    self._cut_all = False
                    for link in list(self._links):
                        self.counts.cut += 1
                        self._end(link, reset=True)
                now_s = self._clock.monotonic_s()
                for link in list(self._links):
                    for direction in link.directions:
                        direction.pump(now_s)
                    self._write(link)
        except Exception:
            log.exception("the fault proxy at %s has failed", self.address)
        finally:
            for link in list(self._links):
                self._end(link, reset=True)
            self._selector.close()
            self._listener.close()

    def _patience(self) -> float:
        due = [d.line.next_due_s for link in self._links for d in link.directions]
        first_s = min((due_s for due_s in due if due_s is not None), default=None)
        if first_s is None:
            return TICK_S
        return min(max(first_s - self._clock.monotonic_s(), 0.0), TICK_S)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if self.blocked:
                raise ConnectionRefusedError
            server = socket.create_connection(self._upstream, timeout=1.0)
        except OSError:
            client.close()
            return
        lines = [FaultLine(self._faults, self._rng.spawn(1)[0], self.counts) for _ in range(2)]
        link = _Link(client, server, (lines[0], lines[1]))
        for each in link.sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ, link)
        self._links.append(link)

    def _on_ready(self, link: _Link, ready_socket: object, ready: int) -> None:
        if ready & selectors.EVENT_READ:
            direction = next(d for d in link.directions if d.source is ready_socket)
            try:
                data = direction.source.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end(link, reset=False)
            elif not direction.feed(data, self._clock.monotonic_s()):
                self._write(link)
                if link in self._links:
                    self._end(link, reset=False)

    def _write(self, link: _Link) -> None:
        try:
            for direction in link.directions:
                direction.flush()
        except OSError:
            self._end(link, reset=False)
            return
        forth, back = link.directions
        for each, waiting in ((forth, back), (back, forth)):
            # `each` is read from where `waiting` is written to.
            events = selectors.EVENT_WRITE if waiting.out else 0
            if len(each.out) < MAX_WAITING_BYTES:
                events |= selectors.EVENT_READ
            self._watch(each.source, events, link)

    def _watch(self, each: socket.socket, events: int, link: _Link) -> None:
        known = self._selector.get_map().get(each.fileno())
        if known is None:
            if events:
                self._selector.register(each, events, link)
        elif not events:
            self._selector.unregister(each)
        elif known.events != events:
            self._selector.modify(each, events, link)

    def _end(self, link: _Link, *, reset: bool) -> None:
        for each in link.sockets:
            self._watch(each, 0, link)
        self._links.remove(link)
        link.close(reset=reset)
