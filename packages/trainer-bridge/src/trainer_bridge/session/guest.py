"""`GuestSession`: what an observer and a rank have in common: they greet a receiver, hear it, and leave."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from trainer_bridge.config import Timing
from trainer_bridge.control import ControlView
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import (
    MINOR,
    Bundle,
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
from trainer_bridge.session.handshake import FEATURES, GREETINGS_BEFORE_REFUSAL, SCHEMAS
from trainer_bridge.session.refusal_kinds import kind_of_refusal

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
        self.unreadable = 0
        """Messages of the receiver that could not be read."""
        self.quarantine = ""
        """Why the receiver leaves this peer unread for now, for people. Empty: it has not said so."""
        self._greetings_lost = 0
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
        if isinstance(message, DataHead | Bundle) or message.session != self.session:
            return
        self._heard_s = now_s
        if isinstance(message, Welcome) and self.state == "greeting":
            self.state = "open"
            self.quarantine = ""
            self._greetings_lost = 0
            self.control.meet(message.receiver)
            self._opened(message)
        elif isinstance(message, Control):
            self.control.apply(message)
        elif isinstance(message, Bye):
            self.state = "ended"
            self.farewell = message.reason
        else:
            self._take(message)

    def on_garbage(self, error: ProtocolError, now_s: float, *, is_data: bool = False) -> None:
        """A message cannot be read: it was damaged, or the peer speaks something else.

        Args:
            error: what is wrong with it.
            now_s: the instant.
            is_data: it has a payload, and so was on its way before HELLO, and is no answer to that.
        """
        self.unreadable += 1
        if self.state == "greeting" and not is_data:
            text = f"the peer's answer to HELLO cannot be read: {error.detail}"
            self._greet_again(Error(self.session, error.code, text))
        elif self.state == "open":
            self._misunderstood(Error(self.session, error.code, error.detail), now_s)

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

    def _opened(self, welcome: Welcome) -> None:
        """WELCOME came."""

    def _take(self, message: Message) -> None:
        """A message of this role's own came."""

    def _beat(self) -> None:
        """A heartbeat goes out."""

    def _misunderstood(self, error: Error, now_s: float) -> None:
        """A message of either side was damaged on its way. What matters is said again with a heartbeat."""

    # -- inside

    def _on_error(self, message: Error, now_s: float) -> None:
        if message.code == ErrorCode.NO_SESSION:
            if self.state == "open":
                self.connected(now_s)
        elif message.session not in (0, self.session):
            return
        elif message.code == ErrorCode.QUARANTINED:
            self.quarantine = message.text  # it ends; what matters is said again until then
        elif kind_of_refusal(message.code) == "session":
            self._refused(message)
        elif self.state == "greeting":
            self._greet_again(message)
        elif self.state == "open":
            self._misunderstood(message, now_s)

    def _refused(self, refusal: Error) -> None:
        self.state = "refused"
        self.refusal = refusal

    def _greet_again(self, refusal: Error) -> None:
        self._greetings_lost += 1
        if self._greetings_lost >= GREETINGS_BEFORE_REFUSAL:
            self._refused(refusal)
        else:
            self._spoke_s = -math.inf  # at the next tick

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
