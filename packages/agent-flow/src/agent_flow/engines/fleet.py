"""Which replicas there are, and which of them may be called: the join rule, asked and asked again."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import numpy as np

from agent_flow.clock import Clock
from agent_flow.config import SamplingConfig
from agent_flow.engines.replica import Replica, ReplicaInfo, ReplicaRequest
from agent_flow.engines.slots import BreakerConfig, Call, Slot
from agent_flow.engines.weights import CurrentWeights
from agent_flow.errors import EngineError, UsageError, unwrapped

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_FIRST_WAIT_S = 0.1
_MOST_WAIT_S = 5.0


def back_off_s(clock: Clock, tries: int) -> float:
    """Seconds before the next try: twice as long each time, up to 5 s, with jitter. None before the first."""
    if not tries:
        return 0.0
    jitter = int(clock.new_id()[:8], 16) / 2**32
    return min(_MOST_WAIT_S, _FIRST_WAIT_S * 2 ** min(tries - 1, 16)) * (1 + jitter) / 2


class Fleet:
    """The replicas of a router. One task for each asks what it serves, whenever that is in doubt.

    Replicas may come and go while the session is open.
    """

    def __init__(
        self, replicas: Sequence[Replica], weights: CurrentWeights, breaker: BreakerConfig, clock: Clock
    ) -> None:
        self.slots = [Slot(replica, breaker) for replica in replicas]
        self.weights = weights
        self.context_length = 0
        """Tokens of prompt and completion together, the same for all replicas; 0 before the session."""
        self.openings = 0
        """How often a breaker opened."""
        self.refusals = 0
        """How often a replica was kept out since it reported other weights."""
        self._breaker = breaker
        self._clock = clock
        self._changed = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None

    @property
    def is_open(self) -> bool:
        """Whether the session is."""
        return self._group is not None

    @property
    def ready(self) -> list[Slot]:
        """The replicas that may be called."""
        return [slot for slot in self.slots if slot.state == "ready"]

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Ask every replica; then keep asking those that are in doubt, until the end.

        Raises:
            UsageError: a replica does not answer, or they do not agree; says which and what to do.
        """
        with unwrapped():
            await self._open()
            async with anyio.create_task_group() as group:
                self._group = group
                for slot in self.slots:
                    group.start_soon(self._keep, slot)
                try:
                    yield
                finally:
                    self._group = None
                    group.cancel_scope.cancel()

    async def changed(self) -> None:
        """Wait until a replica became ready, or somebody called `notify`."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all who wait in `changed`."""
        self._changed.set()
        self._changed = anyio.Event()

    def add(self, replica: Replica) -> None:
        """A further replica: called as soon as it reports the current weights.

        Raises:
            UsageError: there is one with this address, or no session is open.
        """
        if self._group is None:
            raise UsageError("a replica can only be added while the session is open", where=replica.address)
        if any(slot.address == replica.address for slot in self.slots):
            raise UsageError("there is a replica with this address already", where=replica.address)
        slot = Slot(replica, self._breaker)
        self.slots.append(slot)
        self._group.start_soon(self._keep, slot)

    def take_out(self, address: str) -> Slot:
        """No further calls for a replica; those that run are not touched.

        Raises:
            UsageError: there is no replica with this address.
        """
        slot = next((slot for slot in self.slots if slot.address == address), None)
        if slot is None:
            known = ", ".join(slot.address for slot in self.slots)
            raise UsageError("no replica has this address", where=address, fix=f"one of {known}")
        self.slots.remove(slot)
        slot.remove()
        return slot

    def set_version(self, weight_version: str) -> None:
        """From now on only replicas that report these weights, or newer ones of the run, are called.

        Raises:
            UsageError: not a weight version.
        """
        self.weights.set(weight_version)
        self._doubt_all(f"the current weights became {weight_version}")

    def saw(self, slot: Slot, version: int, policy_run: str) -> None:
        """An answer of this replica has tokens of this version; see `CurrentWeights.advance`."""
        if self.weights.advance(version, policy_run):
            self._doubt_all(f"{slot.address} answered with newer weights: {self.weights.text}")
        elif version > slot.version:
            slot.doubt("it answered with newer weights than it had reported")

    def failed(self, slot: Slot, reason: str, call: Call) -> None:
        """A call failed in a way that may pass: none go there before the replica was asked."""
        if not slot.failed(reason, call):
            return
        opened = slot.state == "open"
        self.openings += opened
        until = f"for {slot.open_s:.0f} s" if opened else "before it was asked what it serves"
        logger.warning("%s: no calls %s: %s", slot.address, until, reason)

    def why_not(self) -> str:
        """Each replica and why it is not called, for an error."""
        return "; ".join(f"{slot.address}: {slot.reason}" for slot in self.slots) or "there are none"

    async def _open(self) -> None:
        if not self.slots:
            raise UsageError("there are no servers", where="addresses", fix="name one or more")
        infos: dict[str, ReplicaInfo] = {}
        wrong: dict[str, str] = {}

        async def ask(slot: Slot) -> None:
            try:
                infos[slot.address] = await _info(slot)
            except EngineError as error:
                wrong[slot.address] = error.message

        async with anyio.create_task_group() as group:
            for slot in self.slots:
                group.start_soon(ask, slot)
        if wrong:
            raise UsageError(
                "; ".join(f"{address}: {why}" for address, why in sorted(wrong.items())),
                where="addresses",
                fix="start the servers, or leave out the addresses that are not there",
            )
        if len({info.context_length for info in infos.values()}) > 1:
            each = "; ".join(f"{address}: {infos[address].context_length}" for address in sorted(infos))
            raise UsageError(
                f"the servers have different context lengths: {each}",
                where="addresses",
                fix="start all of them with one context length",
            )
        self.weights.agree({address: info.weight_version for address, info in infos.items()})
        for slot in self.slots:
            self.context_length = infos[slot.address].context_length
            self._admit(slot, infos[slot.address])

    async def _keep(self, slot: Slot) -> None:
        """Ask a replica whenever it is in doubt, until it is removed."""
        with anyio.CancelScope() as slot.keeper:
            while slot.state != "removed":
                if slot.state == "ready":
                    await slot.woken()
                    continue
                wait_s = back_off_s(self._clock, slot.asked)
                if slot.state == "open":
                    await anyio.sleep(max(slot.open_s, wait_s))
                else:
                    await slot.woken(wait_s)
                await self._ask(slot)

    async def _ask(self, slot: Slot) -> None:
        try:
            info = await _info(slot)
            objection = self._objection(info)
            if not objection and slot.half_open:
                await self._try(slot, info)
        except EngineError as error:
            slot.forget()
            self.openings += slot.half_open
            slot.unanswered(error.message)
            return
        if objection:
            if objection != slot.reason:
                self.refusals += 1
                logger.warning("%s: no calls: %s", slot.address, objection)
            slot.refused(objection)
            return
        logger.info("%s: ready, with weights %s", slot.address, info.weight_version)
        self._admit(slot, info)

    def _objection(self, info: ReplicaInfo) -> str:
        if info.context_length != self.context_length:
            return f"its context length is {info.context_length}, the others' is {self.context_length}"
        return self.weights.objection(info.weight_version)

    def _admit(self, slot: Slot, info: ReplicaInfo) -> None:
        if slot.info is not None and slot.info.weight_version != info.weight_version:
            slot.forget()
        slot.join(info, self.weights.read(info.weight_version))
        if self.weights.see(info.weight_version):
            self._doubt_all(f"{slot.address} has newer weights: {info.weight_version}", but=slot)
        self.notify()

    def _doubt_all(self, reason: str, but: Slot | None = None) -> None:
        for slot in self.slots:
            if slot is but:
                continue
            slot.doubt(reason)
            slot.ask_now()

    async def _try(self, slot: Slot, info: ReplicaInfo) -> None:
        """The half-open breaker's one call: a token after a prompt of one, which nobody keeps."""
        request = ReplicaRequest(
            rid=self._clock.new_id(),
            prompt_ids=np.zeros(1, dtype=np.int32),
            stop_ids=frozenset(),
            sampling=SamplingConfig(),
            max_new_tokens=1,
            salt=info.weight_version,
        )
        with anyio.move_on_after(_ANSWER_S) as scope:
            records = await slot.replica.sample(request)
            if records[-1].weight_version != self.weights.read(info.weight_version):
                raise EngineError("weights", f"it says {info.weight_version}, and samples with other weights")
        if scope.cancelled_caught:
            raise EngineError("silent", f"no answer to a call of one token within {_ANSWER_S:g} s")


async def _info(slot: Slot) -> ReplicaInfo:
    with anyio.move_on_after(_ANSWER_S):
        return await slot.replica.info()
    raise EngineError("silent", f"no answer within {_ANSWER_S:g} s")
