"""`RankSession`: a rank other than 0. It asks for steps, holds its share, and says when it is done."""

from __future__ import annotations

import msgspec

from trainer_bridge.codec import Data
from trainer_bridge.config import Timing
from trainer_bridge.messages import Ask, Done, Message, Ready, Share, Verdict
from trainer_bridge.session.guest import GuestSession


class Granted(msgspec.Struct, frozen=True, eq=False):
    """A step that this rank was told to go with."""

    share: Share
    rollouts: tuple[Data, ...]
    """In the order of the share."""


class RankSession(GuestSession):
    """Greets, and takes part in one step at a time.

    Args:
        process: 16 bytes, fresh for each process.
        rank: from 1; rank 0 holds the receiver.
    """

    def __init__(self, *, process: bytes, rank: int, timing: Timing) -> None:
        super().__init__(role="rank", peer=process, name=f"rank {rank}", timing=timing)
        self._rank = rank
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

    # -- the transport says

    def disconnected(self) -> None:
        """The connection is gone, and with it what was on its way."""
        super().disconnected()
        if self.state == "down":
            self._share = None

    def on_data(self, data: Data, now_s: float) -> None:
        """A rollout of the share came."""
        self._heard_s = now_s
        if self._share is not None:
            self._held.append(data)
            self._say_ready()

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

    # -- inside

    def _opened(self) -> None:
        self._say_again()

    def _take(self, message: Message) -> None:
        if isinstance(message, Share):
            self._share, self._held = message, []
            self._say_ready()
        elif isinstance(message, Verdict):
            self._on_verdict(message)

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
