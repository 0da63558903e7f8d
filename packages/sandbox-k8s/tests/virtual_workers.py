"""Workers with real clients on a virtual cluster, a reaper, and what must hold whatever happens to them."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.abc
from sandbox_k8s import (
    FencedError,
    Injection,
    KubernetesConfig,
    Sandbox,
    SandboxClient,
    SandboxError,
    SandboxHandle,
    SandboxSpec,
    double_owners,
)
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.gate import StartGate
from sandbox_k8s.kubernetes.owners import Owners
from sandbox_k8s.kubernetes.reaper import reap
from sandbox_k8s.kubernetes.watch import PodWatch
from sandbox_k8s.run_key import RunKey
from sandbox_k8s.stats import ClientStats
from sandbox_k8s.transport import LauncherClient

from .virtual_cluster import VirtualCluster, entries_of
from .virtual_network import Network, VirtualApi, VirtualLauncherClient, VirtualStreams
from .virtual_time import EPOCH_NS, VirtualClock

SKEW_S = 2.5  # each way, so that two clocks are at most the stated 5 s apart
LEASE_S, DETACHED_S = 20.0, 90.0
SPEC = SandboxSpec(lease_s=LEASE_S, detached_lease_s=DETACHED_S)
CONFIG = KubernetesConfig(
    injection=Injection(kind="baked"),
    image="example.com/any:1",
    run_key_file=Path("/nonexistent"),
    start_timeout_s=30.0,
    record_s=30.0,
    api_patience_s=10.0,
    stop_timeout_s=30.0,
    answer_margin_s=5.0,
    data_path="pod_ip",
)
RECORD_LASTS_S = records.lasts_s(CONFIG.record_s, LEASE_S)
OVER_S = CONFIG.start_timeout_s + RECORD_LASTS_S + DETACHED_S + 60.0
"""After this long without a worker, every lease and record is over, skews and late messages included."""


class VirtualBackend(KubernetesBackend):
    """The real back end, opened on a cluster in memory."""

    def __init__(self, worker: "Worker", stats: ClientStats) -> None:
        super().__init__(CONFIG, worker.clock, stats)
        self._worker = worker

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        worker = self._worker
        cluster, network = worker.world.cluster, worker.network
        self.key = worker.world.key
        self.api = VirtualApi(cluster, network, CONFIG, worker.clock, worker.name)
        streams: Any = VirtualStreams(cluster, network)
        self.watch = PodWatch(self.api, streams, CONFIG, self._stats)
        self._owners = Owners(self.api, self.watch, CONFIG, worker.clock)
        self._forwards: Any = _NoForwards()
        self._gate = StartGate(CONFIG, self._stats)
        async with anyio.create_task_group() as tasks:
            watching = anyio.CancelScope(shield=True)
            tasks.start_soon(self._watch_in, watching)
            tasks.start_soon(self._gate.run)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                watching.cancel()

    async def _connect(self, name: str, pod: dict[str, Any], epoch: int | None) -> LauncherClient:
        worker = self._worker
        launcher = VirtualLauncherClient(worker.world.cluster, worker.network, name, epoch)
        try:
            await launcher.answers(5.0)
        except BaseException:
            await launcher.close()
            raise
        return launcher


class _NoForwards:
    def close(self, name: str) -> None:
        """Nothing is forwarded."""


class Worker:
    """One worker process: a client, and what it believes to own."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.network = Network(world.chance)
        self.clock = VirtualClock(world.cluster.loop, world.chance, world.skew_s())
        self.scope = anyio.CancelScope()
        self.mine: dict[str, Sandbox] = {}
        self.unrenewed: set[str] = set()
        """Whose stop was not confirmed: it is renewed no more, so that it ends by itself."""
        self.leaving: set[str] = set()
        self.done = anyio.Event()
        self._ready = anyio.Event()
        self._leave = anyio.Event()

    async def run(self) -> None:
        """The process."""
        try:
            with self.scope:
                stats = ClientStats()
                async with SandboxClient(VirtualBackend(self, stats), self.clock, stats) as client:
                    self.client = client
                    async with anyio.create_task_group() as self.tasks:
                        self._ready.set()
                        await self._leave.wait()
                        self.tasks.cancel_scope.cancel()  # an upload has no time-out of its own
        finally:
            self.mine.clear()
            self.done.set()

    async def up(self) -> "Worker":
        """Once it runs."""
        await self._ready.wait()
        return self

    def leave(self) -> None:
        """End well: what it owns is stopped."""
        self._leave.set()

    def kill(self) -> None:
        """kill -9: whatever it still tries reaches nobody."""
        self.network.dead = True
        self.mine.clear()
        self.scope.cancel()

    def do(self, action: Callable[[], Awaitable[object]]) -> None:
        """Begin something; its errors are those that a caller handles."""
        self.tasks.start_soon(self._tried, action)

    async def _tried(self, action: Callable[[], Awaitable[object]]) -> None:
        try:
            await action()
        except SandboxError:
            return

    async def start(self) -> Sandbox:
        """Start a sandbox."""
        return self._got(await self.client.start(SPEC))

    async def attach(self, handle: SandboxHandle) -> Sandbox:
        """Take one over."""
        return self._got(await self.client.attach(handle))

    def _got(self, sandbox: Sandbox) -> Sandbox:
        self.world.won(self, sandbox)
        self.mine[sandbox.id] = sandbox
        self.unrenewed.discard(sandbox.id)
        self.leaving.discard(sandbox.id)
        return sandbox

    async def attach_any(self) -> Sandbox:
        """Take over one that `list` shows, perhaps while it is still being started."""
        shown = await self.client.list()
        if not shown:
            return await self.start()
        return await self.attach(self.world.chance.choice(shown).handle)

    async def execute(self, sandbox: Sandbox, seconds: float) -> None:
        """Run a command of that length."""
        await self._use(sandbox, sandbox.execute(["work", str(seconds)], timeout_s=seconds))

    async def write(self, sandbox: Sandbox) -> None:
        """Write a file."""
        await self._use(sandbox, sandbox.write("file", b"data"))

    async def _use(self, sandbox: Sandbox, use: Awaitable[object]) -> None:
        try:
            await use
        except FencedError:
            if self.mine.get(sandbox.id) is sandbox:
                del self.mine[sandbox.id]  # it knows now
            raise

    async def detach(self, sandbox: Sandbox) -> SandboxHandle:
        """Leave one to whoever comes."""
        begun_s = self.world.cluster.now_s()
        self.leaving.add(sandbox.id)  # for good: one that fails may have got as far as the record
        handle = await sandbox.detach()
        if self.mine.get(sandbox.id) is sandbox:
            del self.mine[sandbox.id]
        self.world.promise(handle, begun_s + DETACHED_S)
        return handle

    async def stop(self, sandbox: Sandbox) -> None:
        """Stop one, twice."""
        try:
            await sandbox.stop()
        except SandboxError as problem:
            if not isinstance(problem, FencedError):
                self.unrenewed.add(sandbox.id)
            raise
        await sandbox.stop()
        if self.mine.get(sandbox.id) is sandbox:
            del self.mine[sandbox.id]


class World:
    """The cluster and its workers; `broken` is what did not hold."""

    def __init__(self, seed: int, key: RunKey, tasks: anyio.abc.TaskGroup) -> None:
        self.chance = Random(seed)
        self.key = key
        self.cluster = VirtualCluster(self.chance)
        self.cluster.deleted_by = self._deleted
        self.workers: list[Worker] = []
        self.handles: dict[str, SandboxHandle] = {}
        self.broken: list[str] = []
        self._tasks = tasks
        self._winners: dict[tuple[str, int], str] = {}
        self._promises: dict[str, tuple[int, float]] = {}
        self._epochs: dict[str, int] = {}
        self._born = 0

    def skew_s(self) -> float:
        """How far a clock is off."""
        return self.chance.uniform(-SKEW_S, SKEW_S)

    async def worker(self) -> Worker:
        """One more worker process."""
        self._born += 1
        worker = Worker(self, f"worker-{self._born}")
        self.workers.append(worker)
        self._tasks.start_soon(worker.run)
        return await worker.up()

    def alive(self) -> list[Worker]:
        """The workers that were not killed and did not leave."""
        return [one for one in self.workers if not one.network.dead and not one.done.is_set()]

    def won(self, worker: Worker, sandbox: Sandbox) -> None:
        """A worker was told that it owns a sandbox."""
        handle = sandbox.handle
        self.handles[handle.sandbox_id] = handle
        key = (handle.sandbox_id, handle.epoch)
        if key in self._winners:
            self.broken.append(f"{worker.name} and {self._winners[key]} both won epoch {handle.epoch}")
        self._winners[key] = worker.name

    def promise(self, handle: SandboxHandle, until_s: float) -> None:
        """A worker was told that a sandbox waits for so long."""
        self._promises[handle.sandbox_id] = handle.epoch, until_s

    def owners(self, sandbox_id: str) -> list[Worker]:
        """The workers that believe to own a sandbox, and whom its launcher takes for the owner."""
        launcher = self.cluster.launchers.get(f"sbx-{sandbox_id}")
        if launcher is None or not launcher.alive or launcher.ownership.over(self.cluster.now_s()):
            return []
        return [
            one
            for one in self.alive()
            if sandbox_id in one.mine and one.mine[sandbox_id].handle.epoch == launcher.ownership.epoch
        ]

    def check(self) -> None:
        """What must hold at every moment."""
        for sandbox_id in self.handles:
            owners = self.owners(sandbox_id)
            if len(owners) > 1:
                self.broken.append(f"{sandbox_id} has owners {[one.name for one in owners]}")
            pod = self.cluster.pod(f"sbx-{sandbox_id}")
            stays = [one for one in owners if sandbox_id not in one.leaving]
            if stays and pod is not None and record_of(pod).state == "detached":
                self.broken.append(f"{stays[0].name} owns {sandbox_id}, whose record says that it waits")
        for name, launcher in self.cluster.launchers.items():
            before, epoch = self._epochs.get(name, 0), launcher.ownership.epoch
            if epoch < before:
                self.broken.append(f"{name} went back from epoch {before} to {epoch}")
            self._epochs[name] = epoch
            if launcher.alive:
                self.broken += [f"{name}: {what}" for what in double_owners(entries_of(launcher))]
        self._hold()

    def _hold(self) -> None:
        assert not self.broken, "; ".join(self.broken)

    def _deleted(self, name: str, who: str) -> None:
        """Somebody deletes a pod: what others own is left alone, and a reaper waits for what was promised."""
        sandbox_id = name.removeprefix("sbx-")
        if who == "reaper":
            self._reaped(name)
        launcher = self.cluster.launchers.get(name)
        if launcher is None or not launcher.alive:
            return
        owners = [one for one in self.owners(sandbox_id) if one.name != who]
        if who == "reaper":  # one that could not renew its record has lost it
            owners = [one for one in owners if self.cluster.now_s() - one.network.hampered_s > RECORD_LASTS_S]
            owners = [one for one in owners if sandbox_id not in one.unrenewed]
        if owners:
            self.broken.append(f"{who} deletes {name}, which {[one.name for one in owners]} own")
        epoch, until_s = self._promises.get(sandbox_id, (0, 0.0))
        waits = launcher.ownership.epoch == epoch and self.cluster.now_s() < until_s
        if who == "reaper" and waits:
            left_s = until_s - self.cluster.now_s()
            self.broken.append(f"{who} deletes {name}, which was to wait {left_s:.1f} s more")

    def _reaped(self, name: str) -> None:
        """A reaper deletes a pod: by the record of this moment it must be over, on every clock."""
        pod = self.cluster.pod(name)
        assert pod is not None
        if not records.has_ended(pod) and (left_s := self.due_s(pod) + SKEW_S) > 0.001:
            self.broken.append(f"a reaper deletes {name}, whose record may last {left_s:.2f} s more")

    def due_s(self, pod: dict[str, Any]) -> float:
        """Seconds until a pod's record is over, on a clock that is right."""
        return (record_of(pod).expires_ns - EPOCH_NS) / 1e9 - self.cluster.now_s()

    async def sweep(self, trouble: float = 0.0, lag_s: float = 0.0) -> None:
        """One sweep of a reaper, whose clock is off as well."""
        network, begun_s = Network(self.chance), self.cluster.now_s()
        network.trouble, network.lag_s = trouble, lag_s
        clock = VirtualClock(self.cluster.loop, self.chance, self.skew_s())
        api = VirtualApi(self.cluster, network, CONFIG, clock, "reaper")
        try:
            await reap(api, CONFIG, clock.now_ns(), dry_run=False)
        except SandboxError:
            assert trouble or self.cluster.refused_s >= begun_s, "a sweep failed on a network without trouble"

    def sweep_when_due(self, number: int, after_s: float, lag_s: float, *, down: bool) -> None:
        """Have a sweep come when a record falls due, which its owner could not renew if the server was down.

        Args:
            number: Which pod.
            after_s: How much later than that.
            lag_s: How slow the reaper is: what it saw may have changed when it deletes.
            down: The API server is away until then, so that renewals and the sweep come at the same time.
        """
        names = sorted(self.cluster.pods)
        if not names:
            return
        pod = self.cluster.pod(names[number % len(names)])
        assert pod is not None
        due_s = max(0.0, self.due_s(pod) + after_s)
        if down:
            self.cluster.break_api(due_s)

        async def then() -> None:
            await anyio.sleep(due_s)
            await self.sweep(0.0, lag_s)

        self._tasks.start_soon(then)

    async def end(self) -> None:
        """Every worker is killed or leaves; after the leases and one sweep there must be nothing."""
        self.cluster.break_api(0.0)
        for one in self.alive():
            one.network.trouble = one.network.lag_s = 0.0
            self.chance.choice((one.leave, one.kill))()
        for one in self.workers:
            await one.done.wait()
        await anyio.sleep(OVER_S)
        still = [name for name, one in self.cluster.launchers.items() if one.alive]
        if still:
            self.broken.append(f"outlived their leases: {still}")
        await self.sweep()
        await anyio.sleep(5.0)
        if self.cluster.pods:
            self.broken.append(f"left behind: {sorted(self.cluster.pods)}")
        for name, logs in self.cluster.logs.items():
            for log in logs:
                self.broken += [f"{name}: {what}" for what in double_owners(log)]
        self._hold()


def record_of(pod: dict[str, Any]) -> records.PodRecord:
    """What a pod's annotations say."""
    return records.read_record(pod, CONFIG.cluster)
