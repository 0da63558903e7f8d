"""The network between workers and a virtual cluster: requests and answers that are late, lost or doubled."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any

import anyio
import msgspec
from sandbox_k8s import KubernetesConfig
from sandbox_k8s.answers import error_of
from sandbox_k8s.kubernetes.api import PodApi, Request, refusal
from sandbox_k8s.transport import LauncherClient

from .virtual_cluster import VirtualCluster
from .virtual_time import VirtualClock


class Network:
    """What happens to one worker's messages. Everything off is a perfect network."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.trouble = 0.0
        self.lag_s = 0.0
        self.dead = False
        self.hampered_s = -1e9
        """When something last kept a request of this worker from the API server, or from being quick."""

    async def travel(self) -> None:
        """Be under way for a moment."""
        self._alive()
        await anyio.sleep(self.lag_s + 0.001 + 0.02 * self.chance.random())
        self._alive()

    def fate(self) -> str:
        """What becomes of a request: ``fine``, ``lost``, ``mute`` (done, unanswered), ``late``, ``twice``."""
        if not self.trouble or self.chance.random() >= self.trouble:
            return "fine"
        return self.chance.choice(("lost", "mute", "late", "twice"))

    def _alive(self) -> None:
        if self.dead:
            raise ConnectionResetError("this worker was killed")


class VirtualApi(PodApi):
    """The real `PodApi`, whose requests go to a cluster in memory."""

    def __init__(
        self,
        cluster: VirtualCluster,
        network: Network,
        config: KubernetesConfig,
        clock: VirtualClock,
        who: str,
    ) -> None:
        super().__init__(None, config, clock)  # type: ignore[arg-type]
        self._cluster = cluster
        self._network = network
        self._who = who

    async def _once(self, request: Request, what: str) -> dict[str, Any]:
        self.requests += 1
        network, cluster = self._network, self._cluster
        try:
            await network.travel()
            fate = network.fate()
            if fate != "fine" or network.lag_s > 1.0 or cluster.down():
                network.hampered_s = cluster.now_s()
            if fate == "lost":
                await anyio.sleep(1.0)
                raise ConnectionResetError("lost")
            if fate == "late":
                late_s = 30.0 * network.chance.random()
                cluster.loop.call_later(late_s, cluster.serve, request, self._who)
                raise ConnectionResetError("no answer")
            status, answer = cluster.serve(request, self._who)
            if fate == "twice":
                cluster.loop.call_later(3.0 * network.chance.random(), cluster.serve, request, self._who)
            if fate == "mute":
                raise ConnectionResetError("no answer")
            await network.travel()
        except ConnectionError as problem:
            raise refusal(what, 403 if network.dead else 0, str(problem)) from problem
        if status >= 400:
            raise refusal(what, status, json.dumps(answer))
        return msgspec.json.decode(msgspec.json.encode(answer))


class VirtualStreams:
    """`ApiStreams.watch` on a cluster in memory."""

    def __init__(self, cluster: VirtualCluster, network: Network) -> None:
        self._cluster = cluster
        self._network = network

    async def watch(self, path: str, query: dict[str, str], lasts_s: float) -> AsyncGenerator[dict[str, Any]]:
        if path.endswith("/events"):
            await anyio.sleep(lasts_s)
            return
        async for change in self._cluster.changes(int(query["resourceVersion"]), lasts_s):
            if self._network.dead:
                raise refusal("watching", 0, "this worker was killed")
            yield change
        if self._cluster.down():
            raise refusal("watching", 503, "the API server is away")


class _Answer:
    def __init__(self, body: Any) -> None:
        self._body = body

    async def json(self) -> Any:
        return self._body

    async def read(self) -> bytes:
        head = {
            "signal": None,
            "timed_out": False,
            "infra_error": "",
            "duration_s": 0.0,
            "session_alive": True,
        }
        head |= {"cancelled": "", "parts": [0, 0, 0, 0], "totals": [0, 0], **self._body}
        return json.dumps(head).encode() + b"\n"


class VirtualLauncherClient(LauncherClient):
    """The real client of a launcher, whose requests go to one in memory."""

    def __init__(self, cluster: VirtualCluster, network: Network, name: str, epoch: int | None) -> None:
        self._margin_s = 5.0
        self._where = name
        self.explain = None
        self._epoch = epoch
        self._cluster = cluster
        self._network = network
        self._name = name
        self._closed = anyio.Event()
        self._carried: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        self._closed.set()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, work_s: float | None = 0.0, **options: Any
    ) -> AsyncGenerator[Any]:
        if self._closed.is_set():
            raise self._left(path)
        data = options.get("data") or b""
        data = data if isinstance(data, bytes) else data.getvalue() if hasattr(data, "getvalue") else b"{}"
        body: dict[str, Any] = json.loads(data.partition(b"\n")[0] or b"{}")
        if "command" in body:
            body["seconds"] = body["command"][1]
        total_s = None if work_s is None else work_s + self._margin_s
        try:
            with anyio.fail_after(total_s):
                status, answer = await self._ask(path, body)
        except (TimeoutError, ConnectionError) as problem:
            raise await self._lost(f"{self._where} does not answer ({path}): {problem}") from problem
        if status >= 400:
            raise error_of(json.dumps(answer).encode(), status, self._where)
        yield _Answer(answer)

    async def _ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        network = self._network
        await network.travel()
        fate = network.fate()
        if fate == "lost":
            await anyio.sleep_forever()
        if fate == "late":
            self._carry(path, body, 30.0 * network.chance.random())
            await anyio.sleep_forever()
        if fate == "twice":
            self._carry(path, body, 5.0 * network.chance.random())
        answer = self._carry(path, body, 0.0)
        if fate == "mute":
            await anyio.sleep_forever()
        # Carried on without us when this is cancelled: a connection that is cut may be noticed late.
        await asyncio.wait([answer])
        await network.travel()
        return answer.result()

    def _carry(self, path: str, body: dict[str, Any], after_s: float) -> "asyncio.Task[tuple[int, Any]]":
        async def carry() -> tuple[int, Any]:
            if after_s:
                await anyio.sleep(after_s)
            launcher = self._cluster.launchers.get(self._name)
            if launcher is None:
                raise ConnectionRefusedError("no route")
            return await launcher.answer(path, self._epoch, body)

        task = asyncio.get_running_loop().create_task(carry())
        self._carried.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._carried.discard(task)
        if not task.cancelled():
            task.exception()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines of thousands of failing requests."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
