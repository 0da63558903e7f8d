"""`EngineRouter`: one engine out of several inference servers, of which each may fail, come and go."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Annotated, Literal

import anyio
import msgspec
from token_tracking import GenerationRecord
from token_tracking.sample import Scalar

from agent_flow.clock import Clock
from agent_flow.config import Count, Seconds
from agent_flow.engines.answer import check_answer, of_reported_weights
from agent_flow.engines.fleet import Fleet, back_off_s
from agent_flow.engines.replica import Replica, ReplicaRequest
from agent_flow.engines.slots import BreakerConfig, Call, Slot
from agent_flow.engines.turn import Turn
from agent_flow.engines.version import VersionReader
from agent_flow.engines.weights import CurrentWeights
from agent_flow.errors import EngineError
from agent_flow.protocols import GenerateRequest
from agent_flow.rollout import POLICY_RUN

logger = logging.getLogger(__name__)

KvRule = Literal["salt_now", "salt_at_start", "flush"]
TOO_LONG = "too_long"
"""Cause of a replica's `EngineError` whose prompt leaves no room: a limit, and no failure."""
_MOST_STARTS = 100_000
_COUNTS = (
    "calls",
    "calls_failed",
    "failovers",
    "retries",
    "aborts_continued",
    "affinity_breaks",
    "salts_overtaken",
    "tokens_thrown_away",
)


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every engine with servers behind it can be told."""

    policy_run: str = ""
    """The trainer's name for this run. Servers report weights as `POLICY_RUN/n`; those of another run never
    count as current. Empty: the run of the first version that a server reports."""
    kv_rule: KvRule = "salt_now"
    """What keeps a prompt from being read from a KV cache that other weights filled (miles#2782).
    `salt_now`: prefixes are shared among calls under the same weights alone. `salt_at_start`: a rollout keeps
    the prefixes of the weights that it began with, also when the weights change under it. `flush`: no salt;
    whoever loads new weights empties the caches."""
    patience_s: Seconds = 300.0
    """How long a turn waits while no server can be called, before it fails."""
    max_empty_calls: Count = 8
    """Calls of one turn in a row that may fail or be aborted without a new token, before it fails."""
    affinity_calls: Annotated[int, msgspec.Meta(ge=0)] = 16
    """A rollout leaves the server that holds its prefix when that one has more than so many calls more under
    way than the least loaded server, and more than `affinity_ratio` times as many."""
    affinity_ratio: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """See `affinity_calls`."""
    breaker_failures: Count = 3
    """After so many failures in a row a server is left alone for `breaker_open_s`."""
    breaker_open_s: Seconds = 5.0
    """How long a server is left alone the first time; twice as long each further time, up to a minute. Then
    one call of one token has to succeed before it gets others."""


class EngineRouter:
    """Spreads turns over replicas, and goes on elsewhere with what a replica gave before it failed.

    A rollout stays where its prefix is; a new one goes to the replica with the fewest calls. Every call has
    an id of its own; what was sampled before it is part of its prompt and counts against its budget.
    """

    def __init__(
        self, replicas: Sequence[Replica], versions: VersionReader, config: RouterConfig, clock: Clock
    ) -> None:
        self._config = config
        self._clock = clock
        breaker = BreakerConfig(failures=config.breaker_failures, open_s=config.breaker_open_s)
        self._fleet = Fleet(replicas, CurrentWeights(versions), breaker, clock)
        self._turns: set[Turn] = set()
        self._starts: OrderedDict[str, str] = OrderedDict()
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))

    def session(self) -> AbstractAsyncContextManager[None]:
        """Open as long as turns are asked for.

        Raises:
            UsageError: a replica does not answer, or they do not agree; says which and what to do.
        """
        return self._fleet.session()

    def add(self, replica: Replica) -> None:
        """A further replica; it is called as soon as it reports the current weights.

        Raises:
            UsageError: there is one with this address, or no session is open.
        """
        self._fleet.add(replica)

    async def remove(self, address: str) -> None:
        """Take a replica out; its turns go on elsewhere. Returns when no call runs there any more.

        Raises:
            UsageError: there is no replica with this address.
        """
        slot = self._fleet.take_out(address)
        async with anyio.create_task_group() as group:
            for call in list(slot.calls.values()):
                group.start_soon(self._cut, call)

    def set_version(self, weight_version: str) -> None:
        """From now on only replicas that report `POLICY_RUN/n`, or a later n, are called.

        Raises:
            UsageError: not a weight version.
        """
        self._fleet.set_version(weight_version)

    async def abort(self, rollout_id: str) -> None:
        """End the turns of a rollout that are under way: `generate` returns what there is, as `abort`.

        Returns when their calls have ended.
        """
        turns = [turn for turn in self._turns if turn.request.rollout_id == rollout_id]
        for turn in turns:
            turn.ordered.set()
        self._fleet.notify()
        async with anyio.create_task_group() as group:
            for turn in turns:
                if turn.call is not None:
                    group.start_soon(self._cut, turn.call)

    def stats(self) -> dict[str, int]:
        """What was counted since the start, by name; `replicas`, `ready` and `running` are as of now."""
        return {
            **self._counts,
            "breaker_openings": self._fleet.openings,
            "joins_refused": self._fleet.refusals,
            "replicas": len(self._fleet.slots),
            "ready": len(self._fleet.ready),
            "running": sum(len(slot.calls) for slot in self._fleet.slots),
        }

    def describe(self) -> dict[str, Scalar]:
        """What goes into a sample's provenance."""
        return {
            "engine_replicas": len(self._fleet.slots),
            "engine_weights": self._fleet.weights.text,
            POLICY_RUN: self._fleet.weights.policy_run,
            "engine_kv_rule": self._config.kv_rule,
        }

    async def generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        """Sample one turn, over aborts and failures; see `Engine.generate`.

        A turn whose budget or context is used up ends with `length`; one that leaves no room for a token has
        one record without ids.

        Raises:
            EngineError: no replica could be called for `patience_s` (`no_replica`); calls brought nothing
                (`keeps_aborting`, `keeps_failing`); or the engine refused for good. `partial` holds what
                there is.
        """
        if not self._fleet.is_open:
            raise EngineError("client", "generate was called outside session")
        turn = Turn(request)
        self._turns.add(turn)
        try:
            while not turn.over and not turn.ordered.is_set():
                if turn.room(self._fleet.context_length) < 1:
                    turn.end("length")
                    break
                slot = await self._slot_for(turn)
                if slot is not None:
                    await self._call(turn, slot)
        except EngineError as error:
            error.partial = tuple(turn.records)
            raise
        finally:
            self._turns.remove(turn)
        if not turn.records:
            turn.end("abort")
        return tuple(turn.records)

    async def _slot_for(self, turn: Turn) -> Slot | None:
        """The replica to call, as soon as there is one; None: the turn was aborted meanwhile."""
        with anyio.move_on_after(self._config.patience_s):
            while not turn.ordered.is_set():
                slot = self._choose(turn)
                if slot is not None:
                    return slot
                await self._fleet.changed()
            return None
        raise EngineError(
            "no_replica",
            f"no server could be called for {self._config.patience_s:g} s: {self._fleet.why_not()}",
            retryable=True,
        )

    def _choose(self, turn: Turn) -> Slot | None:
        slots = self._fleet.ready
        if not slots:
            return None
        load = {slot.address: slot.load(turn.length) for slot in slots}
        least = min(slots, key=lambda slot: load[slot.address])
        rollout = turn.request.rollout_id
        home = max(slots, key=lambda slot: slot.held(rollout))
        if not home.held(rollout) or home is least:
            return least
        (full, calls, _), (least_full, least_calls, _) = load[home.address], load[least.address]
        crowded = calls > least_calls + self._config.affinity_calls
        if (full and not least_full) or (crowded and calls > least_calls * self._config.affinity_ratio):
            self._counts["affinity_breaks"] += 1
            return least
        return home

    async def _call(self, turn: Turn, slot: Slot) -> None:
        """One call, and what becomes of its answer: the turn takes it, and may have to go on."""
        before = turn.tokens
        with self._running(turn, slot) as call:
            sent = self._request(turn, call)
            try:
                left = self._take(turn, call, sent, await slot.replica.sample(sent))
                if left:
                    raise _other_weights(call, left[0].weight_version)
            except EngineError as error:
                self._failed(turn, call, sent, error)
            else:
                turn.failed_at = ""
                slot.succeeded(call)
        turn.empty_calls = 0 if turn.tokens > before else turn.empty_calls + 1
        if turn.over or turn.ordered.is_set() or turn.room(self._fleet.context_length) < 1:
            return
        if turn.empty_calls >= self._config.max_empty_calls:
            raise turn.no_progress()
        if turn.empty_calls and not turn.failed_at:
            with anyio.move_on_after(back_off_s(self._clock, turn.empty_calls)):
                await turn.ordered.wait()

    @contextmanager
    def _running(self, turn: Turn, slot: Slot) -> Generator[Call]:
        """Count a call as running, from before it is sent until after its answer was taken."""
        if turn.failed_at:
            self._counts["retries" if turn.failed_at == slot.address else "failovers"] += 1
        elif turn.calls:
            self._counts["aborts_continued"] += 1
        turn.calls += 1
        self._counts["calls"] += 1
        rollout = turn.request.rollout_id
        call = turn.call = slot.start(self._clock.new_id(), rollout, turn.length)
        turn.policy_run = self._fleet.weights.policy_run
        try:
            yield call
        finally:
            turn.call = None
            slot.end(call)

    def _request(self, turn: Turn, call: Call) -> ReplicaRequest:
        request = turn.request
        return ReplicaRequest(
            rid=call.rid,
            prompt_ids=turn.prompt_ids(),
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            max_new_tokens=turn.room(self._fleet.context_length),
            salt=self._salt(turn, call.slot),
            session=turn.session,
        )

    def _salt(self, turn: Turn, slot: Slot) -> str:
        now = "" if slot.info is None else slot.info.weight_version
        match self._config.kv_rule:
            case "flush":
                return ""
            case "salt_now":
                return now
            case "salt_at_start":
                salt = self._starts.setdefault(turn.session, now)
                self._starts.move_to_end(turn.session)
                if len(self._starts) > _MOST_STARTS:
                    self._starts.popitem(last=False)
                return salt

    def _take(
        self, turn: Turn, call: Call, sent: ReplicaRequest, records: Sequence[GenerationRecord]
    ) -> Sequence[GenerationRecord]:
        """Append an answer, or what there is of one, to the turn. Returns what was not taken.

        Raises:
            EngineError: it contradicts itself or the call.
        """
        check_answer(call.slot.address, sent, records)
        good = of_reported_weights(records, call.version)
        if good:
            turn.take(good)
            call.slot.hold(turn.request.rollout_id, turn.length)
            self._fleet.saw(call.slot, max(record.weight_version for record in good), turn.policy_run)
            # The weights changed between question and call: the salt is that of older ones.
            self._counts["salts_overtaken"] += good[0].weight_version > call.version
        left = records[len(good) :]
        self._counts["tokens_thrown_away"] += sum(len(record.output_ids) for record in left)
        return left

    def _failed(self, turn: Turn, call: Call, sent: ReplicaRequest, error: EngineError) -> None:
        """Keep what a failed call gave, and say so of its replica. Raises what must not be tried again."""
        if error.partial:
            try:
                self._take(turn, call, sent, error.partial)
            except EngineError as wrong:
                error = wrong
        if error.cause == TOO_LONG:
            turn.end("length")
            return
        self._counts["calls_failed"] += 1
        if error.retryable:
            turn.failed_at, turn.failure = call.slot.address, error.message
            self._fleet.failed(call.slot, error.message, call)
        elif not turn.over:
            raise error

    async def _cut(self, call: Call) -> None:
        """Abort a call, again and again until it has ended.

        An abort that reaches the server before its call does nothing there (SkyRL#537).
        """
        tries = 0
        while not call.ended.is_set():
            tries += 1
            try:
                await call.slot.replica.abort(call.rid)
            except EngineError as error:
                logger.warning("%s: a call could not be aborted: %s", call.slot.address, error.message)
            with anyio.move_on_after(back_off_s(self._clock, tries)):
                await call.ended.wait()


def _other_weights(call: Call, version: int) -> EngineError:
    return EngineError(
        "weights",
        f"{call.slot.address} answered with weights {version}, it had reported {call.version}",
        retryable=True,
    )
