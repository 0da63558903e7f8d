"""`GuestLink`: a session that connects and sends no samples (an observer's, a rank's) on its network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from trainer_bridge.codec import Data, decode_data
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import DataHead
from trainer_bridge.payload import Buffer
from trainer_bridge.session.guest import GuestSession
from trainer_bridge.transport import ClientTransport, Event

log = logging.getLogger(__name__)

BATCH = 64


class GuestLink:
    """Moves messages between a guest's session and its network. Not thread-safe.

    Args:
        address: for texts.
        on_data: takes the head and the frames of a DATA message, and the instant; it may raise ProtocolError,
            which is then counted as a message that cannot be read.
    """

    def __init__(
        self,
        *,
        address: str,
        transport: ClientTransport,
        session: GuestSession,
        on_data: Callable[[DataHead, Sequence[Buffer], float], None],
    ) -> None:
        self._address = address
        self._transport = transport
        self._session = session
        self._on_data = on_data
        self.stranger = ""
        """Why the peer and we do not know each other; empty: they do, or no peer was met."""

    def step(self, now_s: float) -> None:
        """Take in what came, let time pass, and send what is due; never waits."""
        for event in self._transport.events(BATCH):
            if event.kind == "up":
                self.stranger = ""
                self._session.connected(now_s)
            elif event.kind == "unknown":
                self.stranger = event.text
            elif event.kind == "down":
                self._session.disconnected()
            else:
                self._on_message(event, now_s)
        if not self._session.tick(now_s):
            self._session.disconnected()
            self._transport.reopen()
        self.send_messages()

    def send_messages(self) -> None:
        """Send what the session has to say."""
        for message in self._session.take_messages():
            if not self._transport.send((encode_head(message),)):
                return  # no connection: the session repeats what matters

    def _on_message(self, event: Event, now_s: float) -> None:
        frames = event.frames
        try:
            message = decode_head(frames[0] if frames else b"")
            if isinstance(message, DataHead):
                self._on_data(message, frames, now_s)
            else:
                self._session.on_message(message, now_s)
        except ProtocolError as error:
            if not self._session.unreadable:
                log.warning("%s sent what cannot be read (counted from now on): %s", self._address, error)
            self._session.on_garbage(error, now_s, is_data=len(frames) > 1)


def decode_whole(head: DataHead, frames: Sequence[Buffer]) -> Data:
    """The samples of a DATA message.

    Raises:
        ProtocolError: it has not two frames, or they do not fit.
    """
    if len(frames) != 2:
        raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"DATA of {len(frames)} frames")
    return decode_data(head, frames[1])
