"""`RankSession`: a rank other than 0. It asks for steps, holds its share, and says when it is done."""

from __future__ import annotations

import msgspec

from trainer_bridge.codec import Data
from trainer_bridge.config import Timing
from trainer_bridge.messages import Error, Message, Welcome
from trainer_bridge.rank_messages import Ask, Done, Ready, Share, Verdict
from trainer_bridge.session.guest import GuestSession
from trainer_bridge.wire_types import MAX_TEXT

MISUNDERSTANDINGS_BEFORE_REFUSAL = 32
"""So many more damaged messages than heartbeats went by, and none answered: it is not the network."""


Key = tuple[bytes, int]
"""Rollout id and attempt: which message a share means, in whatever order and how often they come."""


class Granted(msgspec.Struct, frozen=True, eq=False):
    """A step that this rank was told to go with."""

    share: Share
    rollouts: tuple[Data, ...]
    """In the order of the share."""
    world: int
    """Ranks, as they were asked for."""


class RankSession(GuestSession):
    """Greets, and takes part in one step at a time.

    Every message may be lost, come twice or come late: what was said is said again, each heartbeat (READY,
    DONE) or when nothing has come for `resend_s` (ASK), and what is about a step that is over is ignored.

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
        """`none`, or `aborted` because the question cannot be met, if that is what it brought."""
        self.holding: int | None = None
        """The step that was granted and is not done with. None: there is none."""
        self.broken = ""
        """Why the last step that was granted is void; taken by the owner. Empty: it is not."""
        self._misunderstandings = 0.0
        self._misunderstood_s = 0.0
        self._receiver = b""
        self._over = 0
        """Steps up to this one were granted, or are void."""
        self._last = 0
        """The step that was granted last. 0: none, or it is void."""
        self._ask: tuple[int, int] | None = None
        self._share: Share | None = None
        self._wanted: dict[Key, None] = {}
        """What the share means, in its order."""
        self._held: dict[Key, Data] = {}
        self._done: Done | None = None
        self._quiet_beats = 0
        """Heartbeats since something was heard of the step that this rank waits for."""

    @property
    def is_answered(self) -> bool:
        """The last question brought something."""
        return self.granted is not None or self.answer is not None or bool(self.broken)

    # -- the transport says

    def disconnected(self) -> None:
        """The connection is gone, and with it what was on its way."""
        super().disconnected()
        if self.state == "down":
            self._share = None

    def on_data(self, data: Data, now_s: float) -> None:
        """A rollout of the share came, or of another one."""
        self._heard_s = now_s
        key = (data.head.rollout_id, data.head.attempt)
        if self._share is not None and key not in self._held and key in self._wanted:
            self._held[key] = data
            self._quiet_beats = 0
            self._say_ready()

    # -- the owner says

    def ask(self, world: int, groups: int) -> None:
        """Wait for the next step."""
        self.answer = self.granted = None
        self._ask = (world, groups)
        self._quiet_beats = 0
        if self.state == "open":
            self._say_again()

    def withdraw(self, now_s: float) -> None:
        """Wait no longer. A step that was granted just now stays `granted`."""
        if self._ask is None:
            return
        self._ask = None
        if self.state != "down":
            # Rank 0 forgets the question, and what it may have answered just now is not taken for the next.
            self.disconnected()
            self.connected(now_s)

    def done(self, step: int, *, committed: bool, reason: str) -> None:
        """This rank is done with a step."""
        self.holding = None
        if not committed:
            self._last = 0
        self._done = Done(self.session, step, committed, reason[:MAX_TEXT])
        if self.state == "open":
            self._out.append(self._done)

    # -- inside

    def _opened(self, welcome: Welcome) -> None:
        if self._receiver not in (b"", welcome.receiver):
            self._begin_anew()
        self._receiver = welcome.receiver
        self._say_again()

    def _begin_anew(self) -> None:
        """Another receiver answers: it counts steps from 1, and knows of none of ours."""
        if self.holding is not None:
            self._void(f"rank 0 was restarted in step {self.holding}")
        elif self._last:
            self._void(f"rank 0 was restarted after step {self._last}, which may be in no checkpoint")
        self._share, self._done = None, None
        self._held.clear()
        self._over = self._last = 0

    def _take(self, message: Message) -> None:
        if isinstance(message, Share):
            self._on_share(message)
        elif isinstance(message, Verdict):
            self._on_verdict(message)

    def _on_share(self, share: Share) -> None:
        if share.step <= self._over:
            if self._done is not None and self._done.step == share.step:
                self._say_done()  # that this rank is done with it was lost, or overtaken
            return
        if self._share is not None and share.step < self._share.step:
            return
        self._share, self._wanted = share, _keys(share)
        self._held = {key: data for key, data in self._held.items() if key in self._wanted}
        self._quiet_beats = 0
        self._say_ready()

    def _misunderstood(self, error: Error, now_s: float) -> None:
        """Greet anew: then each side says again what the other may have missed."""
        passed = (now_s - self._misunderstood_s) / self._timing.heartbeat_s
        self._misunderstood_s = now_s
        self._misunderstandings = max(self._misunderstandings - passed, 0.0) + 1
        if self._misunderstandings >= MISUNDERSTANDINGS_BEFORE_REFUSAL:
            self._refused(error)
        else:
            self.disconnected()
            self.connected(now_s)

    def _beat(self) -> None:
        """What the receiver may have missed on this connection."""
        if self._ask is None:
            self._say_done()
        elif self._has_share:
            self._say_ready()
        else:
            self._quiet_beats += 1
            if self._quiet_beats * self._timing.heartbeat_s >= self._timing.resend_s:
                self._quiet_beats = 0
                self._say_again()

    def _say_again(self) -> None:
        """What the receiver may have missed on an earlier connection."""
        self._say_done()
        if self._ask is not None:
            self._out.append(Ask(self.session, self._rank, *self._ask, self._last))

    def _say_done(self) -> None:
        if self._done is not None:
            self._out.append(msgspec.structs.replace(self._done, session=self.session))

    def _say_ready(self) -> None:
        # Without a question nobody waits for it: the receiver sends it again once this rank asks.
        if self._share is not None and self._ask is not None and self._has_share:
            self._out.append(Ready(self.session, self._share.step))

    @property
    def _has_share(self) -> bool:
        return self._share is not None and len(self._held) == len(self._wanted)

    def _on_verdict(self, verdict: Verdict) -> None:
        self._misunderstandings = 0.0
        self._quiet_beats = 0
        if verdict.verdict == "go":
            self._on_go(verdict.step)
        elif verdict.step and verdict.step == self._last and verdict.verdict == "aborted":
            self._void(verdict.reason)
        elif verdict.step:
            self._forget(verdict.step)
        elif self._ask is not None:
            self.answer = verdict
            self._ask = self._share = None

    def _on_go(self, step: int) -> None:
        share = self._share
        if share is None or share.step != step or not self._has_share or self._ask is None:
            return  # it is told again when this rank says READY again
        rollouts = tuple(self._held[key] for key in self._wanted)
        self.granted = Granted(share, rollouts, self._ask[0])
        self.holding = self._last = self._over = step
        self._ask = self._share = self._done = None
        self._held = {}

    def _forget(self, step: int) -> None:
        """A step that was not granted, or that is over for this rank, is over for all."""
        self._over = max(self._over, step)
        if self._share is not None and self._share.step <= self._over:
            self._share = None
        if self._done is not None and self._done.step == step and self._last != step:
            self._done = None  # given back, and they know it

    def _void(self, reason: str) -> None:
        """The step that was granted last counts for nobody, also if this rank is done with it."""
        self.broken = reason
        self.holding = self.granted = self._ask = self._share = self._done = None
        self._last = 0


def _keys(share: Share) -> dict[Key, None]:
    """In the order of the share."""
    return {(said.rollout_id, said.attempt): None for group in share.groups for said in group.rollouts}
