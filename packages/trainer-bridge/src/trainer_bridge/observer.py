"""`SampleObserver`: looks at what arrives at a receiver. Takes nothing and acknowledges nothing."""

from __future__ import annotations

import logging
import os
import socket
from types import TracebackType
from typing import NamedTuple

from token_tracking.sample import Sample

from trainer_bridge.address import absence_hint
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.codec import Data, decode_data
from trainer_bridge.config import MAX_PAYLOAD_BYTES, Timing
from trainer_bridge.errors import AuthError, ConnectError, ErrorCode, ProtocolError, RefusedError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.keys import CurveKeys
from trainer_bridge.messages import DataHead, Status
from trainer_bridge.session import ObserverSession
from trainer_bridge.transport import ClientTransport, Event
from trainer_bridge.zmq_transport import ZmqClient

log = logging.getLogger(__name__)

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
        self._stranger = ""
        """Why the peer and we do not know each other."""
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
        self._send_messages()
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
        for event in self._transport.events(64):
            if event.kind == "up":
                self._stranger = ""
                self._session.connected(now_s)
            elif event.kind == "unknown":
                self._stranger = event.text
            elif event.kind == "down":
                self._session.disconnected()
            else:
                self._on_frames(event, now_s)
        if not self._session.tick(now_s):
            self._session.disconnected()
            self._transport.reopen()
        if self._session.state == "open":
            self._absent_since_s = now_s
        self._send_messages()

    def _on_frames(self, event: Event, now_s: float) -> None:
        frames = event.frames
        try:
            message = decode_head(frames[0] if frames else b"")
            if not isinstance(message, DataHead):
                self._session.on_message(message, now_s)
                return
            self._session.on_copy(now_s)
            if len(frames) != 2:
                raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"DATA of {len(frames)} frames")
            self._ready.append(_seen(decode_data(message, frames[1])))
        except ProtocolError as error:
            if not self._session.unreadable:
                log.warning("%s sent what cannot be read (counted from now on): %s", self._address, error)
            self._session.on_garbage(error, now_s, is_data=len(frames) > 1)

    def _send_messages(self) -> None:
        for message in self._session.take_messages():
            if not self._transport.send((encode_head(message),)):
                return  # no connection: the session repeats what matters

    def _check(self) -> None:
        refusal = self._session.refusal
        if refusal is not None:
            raise RefusedError(f"{self._address} refused this observer: {refusal.text}", refusal.code)
        away_s = self._clock.monotonic_s() - self._absent_since_s
        if away_s > self._connect_timeout_s and self._session.state != "ended":
            if self._stranger:
                raise AuthError(f"no session with {self._address} for {away_s:.1f} s: {self._stranger}")
            raise ConnectError(
                f"no trainer-bridge receiver has answered at {self._address} for {away_s:.1f} s: "
                f"{self._session.quarantine or absence_hint(self._address)}; does the receiver run?"
            )


def _seen(data: Data) -> Seen:
    head = data.head
    return Seen(head.producer.hex(), head.sequence, head.created_ns, data.samples)
