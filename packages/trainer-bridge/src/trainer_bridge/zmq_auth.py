"""CURVE under the ZeroMQ transports: fresh keys, and the door of a server (ZAP, RFC 27).

libzmq by itself lets any key in; only a handler at `inproc://zeromq.zap.01` of the same context makes the
allow-list hold.
"""
# pyright: basic

from __future__ import annotations

import logging
from collections.abc import Mapping

import zmq
from zmq.utils import z85

from trainer_bridge.errors import ConfigError

log = logging.getLogger(__name__)

DOMAIN = b"trainer-bridge"
MAX_REQUESTS = 256
"""Handshakes judged in one go; the rest waits for the next."""


def new_keypair() -> tuple[str, str]:
    """A fresh public and secret key, Z85.

    Raises:
        ConfigError: libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError("this libzmq has no CURVE: install pyzmq from its wheels")
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Door:
    """Judges every connection of one context by its public key.

    Args:
        allowed: name -> public key (Z85). The name becomes the user id of the connection's messages.
    """

    def __init__(self, context: zmq.Context, allowed: Mapping[str, str]) -> None:
        self._names = {z85.decode(key): name for name, key in allowed.items()}
        self.refused = 0
        """Connections turned away because their key is not in the list."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def judge(self) -> None:
        """Answer the requests that wait; never waits itself."""
        for _ in range(MAX_REQUESTS):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            at = frames.index(b"") + 1
            self.socket.send_multipart([*frames[:at], *self._answer(frames[at:])])

    def close(self) -> None:
        """Stop answering."""
        self.socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism, *credentials = request
        name = None
        if domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1:
            name = self._names.get(credentials[0])
        if name is None:
            self.refused += 1
            log.warning(
                "a connection from %s was turned away: its key is not in the allow-list (%d so far)",
                address.decode(errors="replace"),
                self.refused,
            )
            return [version, request_id, b"400", b"this key is not in the allow-list", b"", b""]
        return [version, request_id, b"200", b"", name.encode(), b""]
