"""`GuestSession`: what an observer and a rank have in common: they greet a receiver, hear it, and leave."""

from __future__ import annotations

from collections import deque
from typing import Literal

from trainer_bridge.config import Timing
from trainer_bridge.control import ControlView
from trainer_bridge.errors import ErrorCode
from trainer_bridge.messages import (
    MINOR,
    Bye,
    Control,
    DataHead,
    Error,
    Hello,
    Message,
    Report,
    Role,
    Welcome,
)
from trainer_bridge.session.handshake import FEATURES, SCHEMAS

State = Literal["down", "greeting", "open", "refused", "ended"]


class GuestSession:
    """One peer of a receiver that sends no samples, over any number of connections.

    Args:
        role: said in HELLO.
        peer: 16 bytes, fresh for each process.
        name: for people.
    """

    def __init__(self, *, role: Role, peer: bytes, name: str, timing: Timing) -> None:
        self._role: Role = role
        self._peer = peer
        self._name = name
        self._timing = timing
        self.state: State = "down"
        self.refusal: Error | None = None
        self.farewell = ""
        """The receiver's words at its end, if the state is `ended`."""
        self.control = ControlView()
        self.session = 0
        self._out: deque[Message] = deque()
        self._heard_s = 0.0
        self._spoke_s = 0.0

    # -- the transport says

    def connected(self, now_s: float) -> None:
        """A fresh connection stands: greet."""
        if self.state not in ("refused", "ended"):
            self.session += 1
            self._heard_s = now_s
            self._greet(now_s)

    def disconnected(self) -> None:
        """The connection is gone, and with it what was on its way."""
        if self.state not in ("refused", "ended"):
            self.state = "down"
            self._out.clear()

    def on_message(self, message: Message, now_s: float) -> None:
        """Take in anything but DATA."""
        if isinstance(message, Error):
            self._on_error(message, now_s)
            return
        if isinstance(message, DataHead) or message.session != self.session:
            return
        self._heard_s = now_s
        if isinstance(message, Welcome) and self.state == "greeting":
            self.state = "open"
            self._opened()
        elif isinstance(message, Control):
            self.control.apply(message)
        elif isinstance(message, Bye):
            self.state = "ended"
            self.farewell = message.reason
        else:
            self._take(message)

    def tick(self, now_s: float) -> bool:
        """Let time pass. False: the receiver was silent for too long."""
        if self.state == "greeting" and now_s - self._spoke_s >= self._timing.greet_again_s:
            self._greet(now_s)
        elif self.state == "open" and now_s - self._spoke_s >= self._timing.heartbeat_s:
            self._spoke_s = now_s
            self._out.append(Report(self.session, self.control.state.generation))
            self._beat()
        silent = self.state in ("greeting", "open") and now_s - self._heard_s > self._timing.peer_timeout_s
        return not silent

    # -- the owner says

    def say_bye(self, reason: str) -> None:
        """Leave in order."""
        if self.state == "open":
            self._out.append(Bye(self.session, reason))

    def take_messages(self) -> list[Message]:
        """Everything that is to be sent now."""
        out = list(self._out)
        self._out.clear()
        return out

    # -- each role's own

    def _opened(self) -> None:
        """WELCOME came."""

    def _take(self, message: Message) -> None:
        """A message of this role's own came."""

    def _beat(self) -> None:
        """A heartbeat goes out."""

    # -- inside

    def _on_error(self, message: Error, now_s: float) -> None:
        if message.code == ErrorCode.NO_SESSION:
            if self.state == "open":
                self.connected(now_s)
        elif message.session in (0, self.session):
            self.state = "refused"
            self.refusal = message

    def _greet(self, now_s: float) -> None:
        self.state = "greeting"
        self._spoke_s = now_s
        self._out.append(
            Hello(
                session=self.session,
                role=self._role,
                peer=self._peer,
                name=self._name,
                minor_min=MINOR,
                minor_max=MINOR,
                schemas=SCHEMAS,
                features=FEATURES,
            )
        )
