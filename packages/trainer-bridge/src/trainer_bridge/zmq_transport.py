"""ZeroMQ under the bridge: DEALER connects, ROUTER binds. The only file that imports zmq.

No PUB and no PUSH: both drop or strand messages without an error. No linger: what must not be lost is kept
by the sender until it is acknowledged. A small wake-up socket pair lets other threads end a wait.
"""
# pyright: basic

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from trainer_bridge.config import MAX_HEAD_BYTES, Timing, check_address
from trainer_bridge.errors import AddressError
from trainer_bridge.payload import Buffer
from trainer_bridge.transport import Event, Incoming

BACKLOG = 4096
"""Connections that may wait to be accepted; the system's own bound (net.core.somaxconn) may be lower."""
QUEUED_MESSAGES = 1000
"""libzmq's bound per connection and direction. The protocol's window and credit lie far below it."""
_FRAME_SLACK = 64
FAREWELL_MS = 250
"""A closing server waits so long for its last acknowledgements and BYE to leave."""


class _Waker:
    """A socket pair that makes a poller return."""

    def __init__(self) -> None:
        self._pending = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def wake(self) -> None:
        if self._pending:
            return  # the wait ends anyhow, and whoever waited looks at everything
        self._pending = True
        try:
            self._write.send(b"\0")
        except BlockingIOError:
            return  # full of wake-ups already: the reader will wake
        except OSError:
            return  # closed meanwhile: nobody waits any more

    def drain(self) -> None:
        try:
            while self._read.recv(4096):
                pass
        except BlockingIOError:
            self._pending = False

    def close(self) -> None:
        self._read.close()
        self._write.close()


def _configure(sock: zmq.Socket, *, max_payload_bytes: int, timing: Timing, ipv6: bool) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    sock.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
    sock.setsockopt(zmq.MAXMSGSIZE, max(max_payload_bytes, MAX_HEAD_BYTES) + _FRAME_SLACK)
    heartbeat_ms = max(int(timing.heartbeat_s * 1000), 1)
    sock.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(int(timing.peer_timeout_s * 1000), heartbeat_ms))
    sock.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    # With IPv6 on, libzmq reports an IPv4 address as ::ffff:127.0.0.1.
    sock.setsockopt(zmq.IPV6, int(ipv6))


def _buffers(frames: Sequence[zmq.Frame]) -> list[Buffer]:
    """The first frame (head) as bytes, the rest as views of the message libzmq received."""
    return [frame.bytes if i == 0 else frame.buffer for i, frame in enumerate(frames)]


class ZmqClient:
    """`ClientTransport` over a DEALER.

    Args:
        address: `tcp://HOST:PORT` or `ipc://PATH`.
        max_payload_bytes: larger frames from the peer end the connection.
        insecure: allow a peer beyond this machine.

    Raises:
        AddressError: see `check_address`.
    """

    def __init__(self, address: str, *, max_payload_bytes: int, insecure: bool, timing: Timing) -> None:
        check_address(address, insecure=insecure, binding=False)
        self._address = address
        self._max_payload_bytes = max_payload_bytes
        self._timing = timing
        self._context = zmq.Context()
        self._waker = _Waker()
        self._up = False
        self._news = False
        """The last wait saw something happen to the connection."""
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        _configure(
            self._socket,
            max_payload_bytes=self._max_payload_bytes,
            timing=self._timing,
            ipv6="[" in self._address,
        )
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._disconnect()
            self._context.term()
            self._waker.close()
            raise AddressError(f"cannot connect to {self._address}: {error.strerror}") from error
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._waker.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def wait(self, timeout_s: float) -> None:
        """Return when there is an event, when woken, or after the time."""
        ready = dict(self._poller.poll(max(int(timeout_s * 1000), 0)))
        self._news = self._monitor in ready
        if self._waker.fileno() in ready:
            self._waker.drain()

    def wake(self) -> None:
        """End a `wait`, now or the next; safe from any thread."""
        self._waker.wake()

    def events(self, limit: int) -> list[Event]:
        """What happened, oldest first, at most `limit`; never waits."""
        lost = False
        found: list[Event] = []
        while self._news and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._up:
                self._up = True
                found.append(Event("up"))
            elif event == zmq.EVENT_DISCONNECTED and self._up:
                lost = True
                break
        # What the peer said before it went is heard first; it may be its last acknowledgements.
        while lost or len(found) < limit:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            found.append(Event("message", _buffers(frames)))
        if lost:
            # A fresh socket: this one would give what it has queued to the next connection, before HELLO.
            self.reopen()
            found.append(Event("down"))
        return found

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Give a message to the network. False: it has no room or no connection, nothing was sent."""
        if not self._up:
            return False
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        return True

    def reopen(self) -> None:
        """Give the connection up, forget what was queued on it, and begin another."""
        self._disconnect()
        self._up = False
        self._connect()

    def close(self) -> None:
        """Free everything at once; what is queued is thrown away."""
        self._disconnect()
        self._context.term()
        self._waker.close()


class ZmqServer:
    """`ServerTransport` over a ROUTER.

    Args:
        address: `tcp://HOST:PORT` (port 0: any free one) or `ipc://PATH`.
        max_payload_bytes: larger frames from a peer end its connection, before memory is taken for them.
        insecure: allow an address that other machines can reach.

    Raises:
        AddressError: the address is malformed, in use, not of this machine, or not allowed without keys.
    """

    def __init__(self, address: str, *, max_payload_bytes: int, insecure: bool, timing: Timing) -> None:
        check_address(address, insecure=insecure, binding=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, max_payload_bytes=max_payload_bytes, timing=timing, ipv6="[" in address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            raise AddressError(_bind_failure(address, error)) from error
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.fileno(), zmq.POLLIN)

    @property
    def address(self) -> str:
        """Where clients connect to; the real port if 0 was asked for."""
        return self._address

    def wait(self, timeout_s: float) -> None:
        """Return when a message is there, when woken, or after the time."""
        ready = dict(self._poller.poll(max(int(timeout_s * 1000), 0)))
        if self._waker.fileno() in ready:
            self._waker.drain()

    def wake(self) -> None:
        """End a `wait`, now or the next; safe from any thread."""
        self._waker.wake()

    def receive(self, limit: int) -> list[Incoming]:
        """Messages that are there, oldest first, at most `limit`; never waits."""
        found: list[Incoming] = []
        while len(found) < limit:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            found.append(Incoming(peer.bytes, _buffers(frames)))
        return found

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> Literal["sent", "full", "gone"]:
        """Give a message to the network. `full`: the peer does not read. `gone`: it is not there."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def close(self) -> None:
        """Stop listening and free everything; the last words have `FAREWELL_MS` to get out."""
        self._socket.close(FAREWELL_MS)
        self._context.term()
        self._waker.close()


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use: stop the program that listens there, or give another port (0: any free)"
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return f"{address} is not an address of this machine: bind to one of its own, or to tcp://127.0.0.1:0"
    return f"cannot bind {address}: {error.strerror}"
