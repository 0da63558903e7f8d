"""What both ends of the ZeroMQ transport need of a socket: its settings, whole messages, a wake-up."""
# pyright: basic

from __future__ import annotations

import socket
from collections.abc import Sequence

import zmq

from trainer_bridge.config import MAX_HEAD_BYTES, Timing
from trainer_bridge.keys import CurveKeys
from trainer_bridge.payload import Buffer

QUEUED_MESSAGES = 1000
"""libzmq's bound per connection and direction. The protocol's window and credit lie far below it."""
_FRAME_SLACK = 64
FRAMES_KEPT = 3
ZERO_COPY_BYTES = 1 << 14
"""Frames of so many bytes are lent to libzmq, smaller ones are copied: below, the hand-over to pyzmq's own
thread that releases them costs more than the copy (zeromq/pyzmq#1032)."""


class Waker:
    """A socket pair that makes a poller return."""

    def __init__(self) -> None:
        self._pending = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """What a poller watches."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the wait, now or the next; safe from any thread."""
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
        """The waiter is awake, and is about to look at everything."""
        self._pending = False
        try:
            self._read.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Free both ends."""
        self._read.close()
        self._write.close()


def configure(sock: zmq.Socket, *, max_payload_bytes: int, timing: Timing, ipv6: bool) -> None:
    """Set what the protocol asks of a socket (docs/wire-protocol.md, section 1)."""
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
    sock.copy_threshold = ZERO_COPY_BYTES


def receive_message(sock: zmq.Socket, flags: int) -> list[Buffer]:
    """One message: its first frame (head) as bytes, the rest as views of the memory libzmq received into.

    No message of the protocol has more than two frames; of a longer one, three are kept.

    Raises:
        zmq.Again: there is none.
    """
    frame = sock.recv(flags, copy=False)
    found: list[Buffer] = [frame.bytes]
    while frame.more:
        frame = sock.recv(flags, copy=False)
        if len(found) < FRAMES_KEPT:
            found.append(frame.buffer)
    return found


def send_message(sock: zmq.Socket, frames: Sequence[Buffer]) -> None:
    """Give a whole message to libzmq, or nothing.

    Raises:
        zmq.Again: there is no room.
        zmq.ZMQError: a ROUTER has no such peer.
    """
    for frame in frames[:-1]:
        sock.send(frame, zmq.DONTWAIT | zmq.SNDMORE)
    sock.send(frames[-1], zmq.DONTWAIT, copy=False)


def show_key(sock: zmq.Socket, keys: CurveKeys) -> None:
    """Give a socket its own key pair."""
    sock.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret.reveal())
