"""What a router knows of each replica: whether it may be called, what runs there, whose prefixes it holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import anyio
import msgspec
from token_tracking.sample import UNKNOWN_VERSION

from agent_flow.config import Count, Seconds
from agent_flow.engines.replica import Replica, ReplicaInfo

SlotState = Literal["joining", "ready", "open", "removed"]
"""`joining`: it has yet to report the current weights. `open`: its circuit breaker is. Calls go to `ready`
alone."""

_MOST_OPEN_S = 60.0
_MOST_HELD = 10_000


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When a replica that fails is left alone."""

    failures: Count = 3
    """Failures in a row that open the breaker."""
    open_s: Seconds = 5.0
    """How long it stays open the first time; twice as long each further time, up to a minute."""


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One call that runs at a replica."""

    rid: str
    slot: Slot
    tokens: int
    """Of its prompt."""
    join: int
    """Which join of the replica it was started after."""
    version: int
    """The weight version that the replica had reported then; -2: none that can be read."""
    ended: anyio.Event


class Slot:
    """One replica: its state, its breaker and its load. Whoever calls it says so here.

    A call that fails makes a replica `joining`: it may have started again, with other weights. `failures` in
    a row open the breaker; after its time one small call is made (`half_open`), whose success closes it.
    """

    def __init__(self, replica: Replica, breaker: BreakerConfig) -> None:
        self.replica = replica
        self._breaker = breaker
        self.state: SlotState = "joining"
        self.reason = "it was not asked yet"
        """Why it is not ready."""
        self.info: ReplicaInfo | None = None
        """What it said when it last joined, or None before that."""
        self.version = UNKNOWN_VERSION
        """Of the weights that it last reported."""
        self.calls: dict[str, Call] = {}
        self.asked = 0
        """How often in a row it was asked and did not join."""
        self.openings = 0
        """How often in a row its breaker opened, without a call that succeeded in between."""
        self.keeper: anyio.CancelScope | None = None
        """Of the task that asks it, while there is one."""
        self._wake = anyio.Event()
        self._join = 0
        self._failures = 0
        self._open_until_s = 0.0
        self._running_tokens = 0
        self._held: OrderedDict[str, int] = OrderedDict()
        self._held_tokens = 0

    @property
    def address(self) -> str:
        """The replica's base URL."""
        return self.replica.address

    @property
    def half_open(self) -> bool:
        """Whether a small call has to show that it samples, before it may be ready."""
        return self.state == "open"

    @property
    def open_s(self) -> float:
        """Seconds that the breaker stays open."""
        return max(0.0, self._open_until_s - anyio.current_time()) if self.state == "open" else 0.0

    def join(self, info: ReplicaInfo, version: int) -> None:
        """It reports the current weights, and answers: calls may go there."""
        if self.state == "open":
            self._failures = self._breaker.failures - 1  # the next failure opens it again at once
        self.state, self.reason = "ready", ""
        self.info, self.version = info, version
        self.asked = 0
        self._join += 1

    def doubt(self, reason: str) -> None:
        """It may have other weights than it said: no calls before it was asked."""
        if self.state == "ready":
            self.state, self.reason = "joining", reason
            self.ask_now()

    def ask_now(self) -> None:
        """Ask it without further waiting, if its breaker is not open."""
        if self.state == "joining":
            self.asked = 0
            self._wake.set()

    async def woken(self, most_s: float | None = None) -> None:
        """Wait until it is to be asked at once, or for so many seconds."""
        with anyio.move_on_after(most_s):
            await self._wake.wait()
        self._wake = anyio.Event()

    def refused(self, reason: str) -> None:
        """It was asked, and its weights are not the current ones."""
        self.asked += 1
        self.reason = reason

    def failed(self, reason: str, call: Call) -> bool:
        """A call failed in a way that may pass. Returns whether it is the first since the replica was ready.

        Calls that were under way when it failed before are the same failure, and only put it in doubt.
        """
        if call.join != self._join or self.state != "ready":
            self.doubt(reason)
            return False
        self.state, self.reason = "joining", reason
        self.asked = 0
        self._failures += 1
        if self._failures >= self._breaker.failures:
            self._open()
        self._wake.set()
        return True

    def unanswered(self, reason: str) -> None:
        """It was asked, or tried, and that failed."""
        self.asked += 1
        self.reason = reason
        if self.state == "open":
            self._open()

    def _open(self) -> None:
        self.state = "open"
        open_s = min(_MOST_OPEN_S, self._breaker.open_s * 2 ** min(self.openings, 16))
        self._open_until_s = anyio.current_time() + open_s
        self.openings += 1

    def succeeded(self, call: Call) -> None:
        """A call came to its end."""
        if call.join == self._join and self.state == "ready":
            self._failures = self.openings = 0

    def remove(self) -> None:
        """No further calls, for good."""
        self.state, self.reason = "removed", "it was removed"
        if self.keeper is not None:
            self.keeper.cancel()

    def start(self, rid: str, rollout_id: str, tokens: int) -> Call:
        """A call begins."""
        call = Call(
            rid=rid, slot=self, tokens=tokens, join=self._join, version=self.version, ended=anyio.Event()
        )
        self.calls[rid] = call
        self._running_tokens += tokens
        self.hold(rollout_id, tokens)
        return call

    def end(self, call: Call) -> None:
        """A call has ended, in whatever way."""
        del self.calls[call.rid]
        self._running_tokens -= call.tokens
        call.ended.set()

    def hold(self, rollout_id: str, tokens: int) -> None:
        """A rollout's prefix is in its KV cache; the ones that were used longest ago give way."""
        self._held_tokens += tokens - self._held.pop(rollout_id, 0)
        self._held[rollout_id] = tokens
        most = None if self.info is None else self.info.kv_tokens
        while len(self._held) > 1 and (
            len(self._held) > _MOST_HELD or (most is not None and self._held_tokens > most)
        ):
            self._held_tokens -= self._held.popitem(last=False)[1]

    def held(self, rollout_id: str) -> int:
        """Tokens of a rollout that are thought to be in its KV cache."""
        return self._held.get(rollout_id, 0)

    def forget(self) -> None:
        """Its KV cache is empty, or of no use any more."""
        self._held.clear()
        self._held_tokens = 0

    def load(self, tokens: int) -> tuple[bool, int, int]:
        """How much it has to do, comparable: a prompt that does not fit any more, calls, tokens held."""
        most = None if self.info is None else self.info.kv_tokens
        return (most is not None and self._running_tokens + tokens > most, len(self.calls), self._held_tokens)
