"""`SampleObserver`: looks at what arrives at a receiver. Takes nothing and acknowledges nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from token_tracking.sample import Sample

from trainer_bridge.address import absence_hint
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.codec import Data
from trainer_bridge.config import MAX_PAYLOAD_BYTES, Timing
from trainer_bridge.errors import AuthError, ConnectError, RefusedError
from trainer_bridge.guest_link import GuestLink, decode_whole
from trainer_bridge.keys import CurveKeys
from trainer_bridge.messages import DataHead, Status
from trainer_bridge.payload import Buffer
from trainer_bridge.session import ObserverSession
from trainer_bridge.transport import ClientTransport
from trainer_bridge.zmq_transport import ZmqClient

TICK_S = 0.1


class Seen(NamedTuple):
    """A copy of one rollout that arrived."""

    producer: str
    """The producer id, 32 hex characters."""
    sequence: int
    created_ns: int
    samples: tuple[Sample, ...]


class SampleObserver:
    """A connection that gets copies of what a receiver accepts from now on; skipped if it is too slow.

    Everything runs in the thread that calls `next`; between calls nothing is answered.

    Args:
        address: the receiver's.
        connect_timeout_s: how long the constructor, and `next` after a lost connection, wait for the
            receiver.
        insecure: allow a receiver beyond this machine, without encryption or authentication.
        keys: encrypt, and talk to a receiver with the key in `keys.peers` alone. None: plain text.
        clock: time and ids.
        transport: another network than ZeroMQ.

    Raises:
        AddressError: the address is malformed or not allowed without keys.
        ConnectError: the receiver did not answer in time (AuthError: the keys do not fit).
        RefusedError: the receiver said no.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 5.0,
        insecure: bool = False,
        keys: CurveKeys | None = None,
        timing: Timing | None = None,
        clock: Clock | None = None,
        transport: ClientTransport | None = None,
    ) -> None:
        timing = timing or Timing()
        self._address = address
        self._clock = clock or SystemClock()
        self._connect_timeout_s = connect_timeout_s
        self._transport: ClientTransport = transport or ZmqClient(
            address, max_payload_bytes=MAX_PAYLOAD_BYTES, insecure=insecure, timing=timing, keys=keys
        )
        self._session = ObserverSession(
            observer=bytes.fromhex(self._clock.new_id()),
            name=f"observer {socket.gethostname()}:{os.getpid()}",
            timing=timing,
        )
        self._link = GuestLink(
            address=address, transport=self._transport, session=self._session, on_data=self._on_copy
        )
        self._ready: list[Seen] = []
        self._absent_since_s = self._clock.monotonic_s()
        try:
            # WELCOME and BYE may come together from a receiver that is just closing.
            while self._session.state not in ("open", "ended"):
                self._step(TICK_S)
                self._check()
        except BaseException:
            self._transport.close()
            raise

    @property
    def ended(self) -> str | None:
        """What the receiver said when it closed; None: it has not."""
        return self._session.farewell if self._session.state == "ended" else None

    @property
    def unreadable(self) -> int:
        """Messages and copies that could not be read."""
        return self._session.unreadable

    @property
    def status(self) -> Status | None:
        """How the receiver stood at its last heartbeat. None: it has not said yet."""
        return self._session.status

    def next(self, timeout_s: float) -> Seen | None:
        """The next copy; None if none came in time, or the receiver has closed (see `ended`).

        Raises:
            ConnectError: the connection was lost and did not come back in time.
            RefusedError: the receiver said no.
        """
        end_s = self._clock.monotonic_s() + timeout_s
        while not self._ready:
            remaining_s = end_s - self._clock.monotonic_s()
            if remaining_s <= 0 or self.ended is not None:
                return None
            self._step(min(remaining_s, TICK_S))
            self._check()
        return self._ready.pop(0)

    def close(self) -> None:
        """Leave. The receiver is not affected in any way."""
        self._session.say_bye("observer left")
        self._link.send_messages()
        self._transport.close()

    def __enter__(self) -> SampleObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, wait_s: float) -> None:
        self._transport.wait(wait_s)
        now_s = self._clock.monotonic_s()
        self._link.step(now_s)
        if self._session.state == "open":
            self._absent_since_s = now_s

    def _on_copy(self, head: DataHead, frames: Sequence[Buffer], now_s: float) -> None:
        self._session.on_copy(now_s)
        self._ready.append(_seen(decode_whole(head, frames)))

    def _check(self) -> None:
        refusal = self._session.refusal
        if refusal is not None:
            raise RefusedError(f"{self._address} refused this observer: {refusal.text}", refusal.code)
        away_s = self._clock.monotonic_s() - self._absent_since_s
        if away_s > self._connect_timeout_s and self._session.state != "ended":
            if self._link.stranger:
                raise AuthError(f"no session with {self._address} for {away_s:.1f} s: {self._link.stranger}")
            raise ConnectError(
                f"no trainer-bridge receiver has answered at {self._address} for {away_s:.1f} s: "
                f"{self._session.quarantine or absence_hint(self._address)}; does the receiver run?"
            )


def _seen(data: Data) -> Seen:
    head = data.head
    return Seen(head.producer.hex(), head.sequence, head.created_ns, data.samples)
