"""ZeroMQ under the bridge: DEALER connects, ROUTER binds. Nothing but the `zmq_*.py` imports zmq.

No PUB and no PUSH: both drop or strand messages without an error. No linger: what must not be lost is kept
by the sender until it is acknowledged. A small wake-up socket pair lets other threads end a wait.
"""
# pyright: basic

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from trainer_bridge.address import check_address
from trainer_bridge.config import Timing
from trainer_bridge.errors import AddressError, ConfigError
from trainer_bridge.keys import CurveKeys
from trainer_bridge.payload import Buffer
from trainer_bridge.transport import Event, Incoming
from trainer_bridge.zmq_auth import DOMAIN, Door
from trainer_bridge.zmq_sockets import Waker, configure, receive_message, send_message, show_key

BACKLOG = 4096
"""Connections that may wait to be accepted; the system's own bound (net.core.somaxconn) may be lower."""
FAREWELL_MS = 250
"""A closing server waits so long for its last acknowledgements and BYE to leave."""


_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class ZmqClient:
    """`ClientTransport` over a DEALER.

    Args:
        address: `tcp://HOST:PORT` or `ipc://PATH`.
        max_payload_bytes: larger frames from the peer end the connection.
        insecure: allow a peer beyond this machine without keys.
        keys: ours, and in `peers` the server's. None: plain text.

    Raises:
        AddressError: see `check_address`.
    """

    def __init__(
        self,
        address: str,
        *,
        max_payload_bytes: int,
        insecure: bool,
        timing: Timing,
        keys: CurveKeys | None = None,
    ) -> None:
        check_address(address, insecure=insecure, keys=keys is not None, binding=False)
        if keys is not None and len(keys.peers) != 1:
            raise ConfigError(f"whoever connects needs one peer, the receiver; keys has {len(keys.peers)}")
        self._address = address
        self._keys = keys
        self._max_payload_bytes = max_payload_bytes
        self._timing = timing
        self._context = zmq.Context()
        self._waker = Waker()
        self._up = False
        self._news = False
        """The last wait saw something happen to the connection."""
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        configure(
            self._socket,
            max_payload_bytes=self._max_payload_bytes,
            timing=self._timing,
            ipv6="[" in self._address,
        )
        if self._keys is not None:
            (server,) = self._keys.peers.values()
            self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
            show_key(self._socket, self._keys)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
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
            if event & _HANDSHAKE_FAILED:
                found.append(Event("unknown", text=_handshake_failure(event, self._keys is not None)))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._up:
                self._up = True
                found.append(Event("up"))
            elif event == zmq.EVENT_DISCONNECTED and self._up:
                lost = True
                break
        # What the peer said before it went is heard first; it may be its last acknowledgements.
        while lost or len(found) < limit:
            try:
                found.append(Event("message", receive_message(self._socket, zmq.DONTWAIT)))
            except zmq.Again:
                break
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
            send_message(self._socket, frames)
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
        insecure: allow an address that other machines can reach without keys.
        keys: ours, and in `peers` those of everyone who may connect. None: plain text.

    Raises:
        AddressError: the address is malformed, in use, not of this machine, or not allowed without keys.
    """

    def __init__(
        self,
        address: str,
        *,
        max_payload_bytes: int,
        insecure: bool,
        timing: Timing,
        keys: CurveKeys | None = None,
    ) -> None:
        check_address(address, insecure=insecure, keys=keys is not None, binding=True)
        self._context = zmq.Context()
        self._door = Door(self._context, keys.peers) if keys is not None else None
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, max_payload_bytes=max_payload_bytes, timing=timing, ipv6="[" in address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            show_key(self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._close_context()
            raise AddressError(_bind_failure(address, error)) from error
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        if self._door is not None:
            self._poller.register(self._door.socket, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Where clients connect to; the real port if 0 was asked for."""
        return self._address

    @property
    def refused(self) -> int:
        """Connections that were turned away because their key is not in the allow-list."""
        return 0 if self._door is None else self._door.refused

    def wait(self, timeout_s: float) -> None:
        """Return when a message is there, when woken, or after the time."""
        ready = dict(self._poller.poll(max(int(timeout_s * 1000), 0)))
        if self._waker.fileno() in ready:
            self._waker.drain()
        if self._door is not None and self._door.socket in ready:
            self._door.judge()

    def wake(self) -> None:
        """End a `wait`, now or the next; safe from any thread."""
        self._waker.wake()

    def receive(self, limit: int) -> list[Incoming]:
        """Messages that are there, oldest first, at most `limit`; never waits."""
        found: list[Incoming] = []
        while len(found) < limit:
            try:
                peer = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            user = "" if self._door is None else str(peer.get("User-Id"))
            # The rest of a message is there when its first frame is.
            found.append(Incoming(peer.bytes, receive_message(self._socket, zmq.DONTWAIT), user))
        return found

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> Literal["sent", "full", "gone"]:
        """Give a message to the network. `full`: the peer does not read. `gone`: it is not there."""
        try:
            send_message(self._socket, (peer, *frames))
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
        self._close_context()
        self._waker.close()

    def _close_context(self) -> None:
        if self._door is not None:
            self._door.close()
        self._context.term()


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use: stop the program that listens there, or give another port (0: any free)"
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return f"{address} is not an address of this machine: bind to one of its own, or to tcp://127.0.0.1:0"
    return f"cannot bind {address}: {error.strerror}"


def _handshake_failure(event: int, keyed: bool) -> str:
    if not keyed and event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return (
            "the connection ended in its handshake: the receiver wants keys (keys=...), or is something else"
        )
    if not keyed:
        return "the receiver wants keys and this end has none (keys=...)"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the receiver does not know this end's public key: add it to the receiver's allow-list"
    return (
        "the encrypted handshake failed: the receiver has another key than the one given here as its public "
        "key, or has no keys at all"
    )
