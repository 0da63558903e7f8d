"""`RankSession`: a rank other than 0. It asks for steps, holds its share, and says when it is done."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from trainer_bridge.codec import Data
from trainer_bridge.config import Timing
from trainer_bridge.control import ControlView
from trainer_bridge.errors import ErrorCode
from trainer_bridge.messages import (
    MINOR,
    Ask,
    Bye,
    Control,
    DataHead,
    Done,
    Error,
    Hello,
    Message,
    Ready,
    Report,
    Share,
    Verdict,
    Welcome,
)
from trainer_bridge.session.handshake import FEATURES, SCHEMAS

State = Literal["down", "greeting", "open", "refused", "ended"]


class Granted(msgspec.Struct, frozen=True, eq=False):
    """A step that this rank was told to go with."""

    share: Share
    rollouts: tuple[Data, ...]
    """In the order of the share."""


class RankSession:
    """Greets, and takes part in one step at a time.

    Args:
        process: 16 bytes, fresh for each process.
        rank: from 1; rank 0 holds the receiver.
    """

    def __init__(self, *, process: bytes, rank: int, timing: Timing) -> None:
        self._process = process
        self._rank = rank
        self._timing = timing
        self.state: State = "down"
        self.refusal: Error | None = None
        self.farewell = ""
        """The receiver's words at its end, if the state is `ended`."""
        self.control = ControlView()
        self.session = 0
        self.granted: Granted | None = None
        """What the last question brought; taken by the owner."""
        self.answer: Verdict | None = None
        """`none` or `aborted`, if that is what it brought."""
        self.holding: int | None = None
        """The step that was granted and is not done with. None: there is none."""
        self.broken = ""
        """Why the last step that was granted is void. Empty: it is not."""
        self._last = 0
        self._ask: tuple[int, int] | None = None
        self._share: Share | None = None
        self._held: list[Data] = []
        self._done: Done | None = None
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
            self._share = None
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
            self._say_again()
        elif isinstance(message, Control):
            self.control.apply(message)
        elif isinstance(message, Share):
            self._share, self._held = message, []
            self._say_ready()
        elif isinstance(message, Verdict):
            self._on_verdict(message)
        elif isinstance(message, Bye):
            self.state = "ended"
            self.farewell = message.reason

    def on_data(self, data: Data, now_s: float) -> None:
        """A rollout of the share came."""
        self._heard_s = now_s
        if self._share is not None:
            self._held.append(data)
            self._say_ready()

    def tick(self, now_s: float) -> bool:
        """Let time pass. False: the receiver was silent for too long."""
        if self.state == "greeting" and now_s - self._spoke_s >= self._timing.greet_again_s:
            self._greet(now_s)
        elif self.state == "open" and now_s - self._spoke_s >= self._timing.heartbeat_s:
            self._spoke_s = now_s
            self._out.append(Report(self.session, self.control.state.generation))
        silent = self.state in ("greeting", "open") and now_s - self._heard_s > self._timing.peer_timeout_s
        return not silent

    # -- the owner says

    def ask(self, world: int, groups: int) -> None:
        """Wait for the next step."""
        self.answer = self.granted = None
        self._ask = (world, groups)
        self._done = None
        if self.state == "open":
            self._say_again()

    def done(self, step: int, *, committed: bool, reason: str) -> None:
        """This rank is done with a step."""
        self.holding = None
        self._done = Done(self.session, step, committed, reason)
        if self.state == "open":
            self._out.append(self._done)

    def say_bye(self, reason: str) -> None:
        """Leave in order."""
        if self.state == "open":
            self._out.append(Bye(self.session, reason))

    def take_messages(self) -> list[Message]:
        """Everything that is to be sent now."""
        out = list(self._out)
        self._out.clear()
        return out

    # -- inside

    def _say_again(self) -> None:
        """What the receiver may have missed on an earlier connection."""
        if self._ask is not None:
            self._out.append(Ask(self.session, self._rank, *self._ask))
        elif self._done is not None:
            self._out.append(msgspec.structs.replace(self._done, session=self.session))

    def _say_ready(self) -> None:
        share = self._share
        if share is None or self._ask is None:
            return  # nobody waits for it: the receiver sends it again once this rank asks
        if len(self._held) == sum(len(group.rollouts) for group in share.groups):
            self._out.append(Ready(self.session, share.step))

    def _on_verdict(self, verdict: Verdict) -> None:
        share = self._share
        if verdict.verdict == "again":
            self._share = None
        elif verdict.verdict == "aborted" and verdict.step == self._last and self._ask is None:
            self.broken = verdict.reason
            self.holding = None
        elif verdict.verdict != "go":
            self.answer = verdict
            self._ask = self._share = None
        elif share is not None and share.step == verdict.step and self._ask is not None:
            self.granted = Granted(share, tuple(self._held))
            self.holding = self._last = share.step
            self._ask = self._share = None
            self._held = []

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
                role="rank",
                peer=self._process,
                name=f"rank {self._rank}",
                minor_min=MINOR,
                minor_max=MINOR,
                schemas=SCHEMAS,
                features=FEATURES,
            )
        )
