"""`ObserverSession`: looks on. It has no message that could take or acknowledge a sample."""

from __future__ import annotations

from trainer_bridge.config import Timing
from trainer_bridge.messages import Credit, Message, Status, Welcome
from trainer_bridge.session.guest import GuestSession

COPIES_AHEAD = 64
"""Copies that may be on the way; more are granted as they are looked at."""


class ObserverSession(GuestSession):
    """Greets, grants credit for copies, and counts them.

    Args:
        observer: 16 bytes, fresh.
        name: for people.
    """

    def __init__(self, *, observer: bytes, name: str, timing: Timing) -> None:
        super().__init__(role="observer", peer=observer, name=name, timing=timing)
        self.status: Status | None = None
        """How the receiver last said that it stands."""
        self._seen = 0
        self._granted = 0

    def on_copy(self, now_s: float) -> None:
        """A copy of DATA came."""
        self._heard_s = now_s
        self._seen += 1
        if self._granted - self._seen <= COPIES_AHEAD // 2:
            self._grant()

    def _opened(self, welcome: Welcome) -> None:
        self._seen = 0
        self._grant()

    def _take(self, message: Message) -> None:
        if isinstance(message, Status):
            self.status = message

    def _beat(self) -> None:
        self._grant()

    def _grant(self) -> None:
        self._granted = self._seen + COPIES_AHEAD
        self._out.append(Credit(self.session, self._granted, 0))
