"""A scripted inference server, and a loop in virtual time: nothing waits, and a seed gives the same run."""

import asyncio
import selectors
import zlib
from collections.abc import Iterable
from random import Random

import anyio
import msgspec
import numpy as np
import pytest
from agent_flow.clock import Clock
from agent_flow.config import SamplingConfig
from agent_flow.engines.replica import ReplicaInfo, ReplicaRequest
from agent_flow.engines.router import EngineRouter, RouterConfig
from agent_flow.engines.version import VersionReader
from agent_flow.errors import EngineError
from agent_flow.protocols import GenerateRequest
from agent_flow.rollout import Rollout
from agent_flow.task import Task
from token_tracking import ChatTemplate, Conversation, GenerationRecord

STOP_ID = 0
PROMPT = (7, 8, 32)
"""Its uninterrupted run has 62 tokens, the stop token included."""


class _Jumps(selectors.DefaultSelector):
    """Waiting is a jump of the clock; nothing is ever read."""

    now_s = 0.0
    turns = 0

    def select(self, timeout=None):
        self.turns += 1
        if timeout is None or self.turns > 500_000:
            raise RuntimeError(f"stuck at {self.now_s:.3f} s, after {self.turns} turns of the loop")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self):
        return self._jumps.now_s


class SeededClock(Clock):
    def __init__(self, seed=0):
        self._chance = Random(seed)

    def new_id(self):
        return f"{self._chance.getrandbits(128):032x}"


def next_id(prefix: tuple[int, ...]) -> int:
    """The model: a function of everything before. About one token in thirty is the stop token."""
    digest = zlib.crc32(repr(prefix).encode())
    return STOP_ID if digest % 30 == 0 else 1 + digest % 97


def uninterrupted(prompt: Iterable[int], most: int) -> tuple[list[int], str]:
    """What a server without faults samples, and the finish reason."""
    ids, held = [], tuple(prompt)
    while len(ids) < most:
        ids.append(next_id(held + tuple(ids)))
        if ids[-1] == STOP_ID:
            return ids, "stop"
    return ids, "length"


class Plan(msgspec.Struct, frozen=True):
    """What becomes of a call: after so many tokens it ends like this, whatever the model says."""

    end: str = ""
    """`abort`, `die` (the process ends), `cut` (the connection does), `refuse` (503), `wrong` (400)."""
    tokens: int = 0
    delay_s: float = 0.0
    """Before the first token."""
    down_s: float = 0.0
    """After `die`: how long it does not answer."""
    reload_s: float = 0.0
    """After that: how long it has the weights of its disk."""


class ScriptedReplica:
    """One server of the scripted model. Calls follow the plans in order, then they come to their end."""

    def __init__(self, address, plans=(), *, weights="run/1", context=10_000, kv_tokens=None, token_s=0.01):
        self.address = address
        self.plans = list(plans)
        self.weights = weights
        self.context = context
        self.kv_tokens = kv_tokens
        self.token_s = token_s
        self.requests: list[ReplicaRequest] = []
        self.aborts: list[str] = []
        self.asked = 0
        self.down_until_s = 0.0
        self.disk_until_s = 0.0
        self.reported = ""
        self._cut: dict[str, anyio.Event] = {}
        self._died = anyio.Event()

    @property
    def now_weights(self):
        return "default" if anyio.current_time() < self.disk_until_s else self.weights

    def version(self):
        run, _, number = self.now_weights.rpartition("/")
        return int(number) if run and number.isdigit() else -2

    async def info(self):
        self.asked += 1
        await anyio.sleep(0.001)
        self._up()
        self.reported = self.now_weights
        return ReplicaInfo(
            weight_version=self.now_weights,
            context_length=self.context,
            kv_tokens=self.kv_tokens,
            model_path="model",
        )

    async def sample(self, request):
        self._up()
        probe = request.prompt_ids.tolist() == [0]
        plan = Plan() if probe or not self.plans else self.plans.pop(0)
        self.requests.append(request)
        assert len(request.rid) == 32
        assert request.max_new_tokens >= 1
        assert len(request.prompt_ids) + request.max_new_tokens <= self.context
        cut = self._cut[request.rid] = anyio.Event()
        try:
            return await self._sample(request, plan, cut)
        finally:
            del self._cut[request.rid]

    async def _sample(self, request, plan, cut):
        if plan.end in ("wrong", "refuse"):
            raise EngineError(plan.end, f"status of {plan.end}", retryable=plan.end == "refuse")
        died = self._died
        await anyio.sleep(plan.delay_s)
        ids, versions = [], []
        held = tuple(request.prompt_ids.tolist())
        reason = "length"
        while len(ids) < request.max_new_tokens:
            if plan.end and len(ids) >= plan.tokens and not died.is_set():
                reason = plan.end
                break
            await anyio.sleep(self.token_s)
            if cut.is_set():
                reason = "abort"
                break
            if died.is_set():
                reason = "cut"
                break
            ids.append(next_id(held + tuple(ids)))
            versions.append(self.version())
            if ids[-1] == STOP_ID:
                reason = "stop"
                break
        if reason == "die":
            self.die(plan.down_s, plan.reload_s)
        if reason in ("die", "cut"):
            error = EngineError("connection", f"the connection was {reason}", retryable=True)
            error.partial = self._records(request, ids, versions, "abort") if ids else ()
            raise error
        return self._records(request, ids, versions, reason)

    def _records(self, request, ids, versions, reason):
        """One record for each run of tokens under one version."""
        starts = [i for i in range(len(ids)) if i == 0 or versions[i] != versions[i - 1]] or [0]
        prompt = request.prompt_ids.tolist()
        records = []
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            last = end == len(ids)
            stop = STOP_ID if last and reason == "stop" else None
            records.append(
                GenerationRecord(
                    prompt_ids=np.array(prompt + ids[:start], dtype=np.int32),
                    output_ids=np.array(ids[start:end], dtype=np.int32),
                    logprobs=np.full(end - start, -1.0, dtype=np.float32),
                    logprob_kind="raw",
                    finish_reason=reason if last else "abort",
                    stop_id=stop,
                    weight_version=versions[start] if ids else -2,
                )
            )
        return tuple(records)

    def die(self, down_s, reload_s):
        """Every call ends; later it has the weights of its disk, and later still those of the trainer."""
        self.down_until_s = anyio.current_time() + down_s
        self.disk_until_s = self.down_until_s + reload_s
        self._died.set()
        self._died = anyio.Event()

    async def abort(self, rid):
        self.aborts.append(rid)
        await anyio.sleep(0.001)
        if rid in self._cut:
            self._cut[rid].set()

    def _up(self):
        if anyio.current_time() < self.down_until_s:
            raise EngineError("connection", "connection refused", retryable=True)


@pytest.fixture(scope="session")
def scripted():
    return ScriptedReplica


@pytest.fixture(scope="session")
def plan():
    return Plan


@pytest.fixture(scope="session")
def model():
    """The uninterrupted run: `(prompt, most) -> (ids, finish reason)`."""
    return uninterrupted


@pytest.fixture(scope="session")
def routed():
    """Runs a coroutine function with an open router over these replicas, in virtual time."""

    def run(main, *replicas, seed=0, policy_run="run", **config):
        settings = RouterConfig(policy_run=policy_run, **config)
        router = EngineRouter(replicas, VersionReader(policy_run), settings, SeededClock(seed))

        async def body():
            async with router.session():
                try:
                    return await main(router)
                finally:
                    assert router.stats()["running"] == 0

        return anyio.run(body, backend_options={"loop_factory": VirtualLoop})

    return run


@pytest.fixture(scope="session")
def turn():
    """A request for one turn."""

    def make(rollout="a", prompt=PROMPT, most=40, attempt=0, stop_ids=(STOP_ID,), task_id="t"):
        return GenerateRequest(
            rollout_id=zlib.crc32(rollout.encode()).to_bytes(4).hex() * 4,
            attempt=attempt,
            task_id=task_id,
            member=0,
            turn=0,
            prompt_ids=np.array(prompt, dtype=np.int32),
            stop_ids=frozenset(stop_ids),
            sampling=SamplingConfig(max_new_tokens=max(most, 1)),
            max_new_tokens=most,
        )

    return make


@pytest.fixture(scope="session")
def ids_of():
    """All ids of an answer; also checks that each record goes on where the one before it ended."""

    def join(records, prompt=PROMPT):
        held = list(prompt)
        for place, record in enumerate(records, 1):
            assert record.prompt_ids.tolist() == held
            held += record.output_ids.tolist()
            assert place == len(records) or record.finish_reason == "abort"
            assert place == 1 or len(record.output_ids)
        return held[len(prompt) :]

    return join


@pytest.fixture(scope="module")
def template(example, qwen_tokenizer):
    return ChatTemplate.compile(qwen_tokenizer, (example / "qwen3.jinja").read_text())


@pytest.fixture
def rollout(template):
    task = Task(instance_id="t", problem_statement="p")
    ids = {"rollout_id": "a" * 32, "group_id": "b" * 32, "member": 0, "attempt": 0}
    return Rollout(task=task, mode="train", conversation=Conversation(template), **ids)
