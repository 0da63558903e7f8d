"""The same law with real worker processes, kill -9 and real sandboxes; the launchers' logs are the judge."""

import os
import threading
from collections.abc import Callable, Iterator
from random import Random

import anyio
import anyio.abc
import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    FencedError,
    KubernetesConfig,
    SandboxClient,
    SandboxError,
    SandboxHandle,
    SandboxLostError,
    SandboxSpec,
    double_owners,
)

from .owner_crew import Answer, Crew, Process, crew

pytestmark = pytest.mark.anyio
LOCAL = pytest.mark.parametrize("place", ["process"], indirect=True)
PODS = pytest.mark.parametrize(
    "place", ["fake", pytest.param("kubernetes", marks=pytest.mark.cluster)], indirect=True
)
DETACHED_S = 8.0


class Life:
    """One sandbox from start to end, handed from worker to worker by chance."""

    def __init__(self, seed: int, crew: Crew, client: SandboxClient, lease_s: float) -> None:
        self.seed = seed
        self.lease_s = lease_s
        self.chance = Random(seed)
        self.crew = crew
        self.client = client
        self.broken: list[str] = []
        self.judged = False
        self.late = False
        """Its lease ran out while it was started."""
        self._held: list[tuple[Process, int]] = []

    async def run(self) -> None:
        """Live."""
        begun = await self.pick().ask("start", lease_s=self.lease_s, detached_s=DETACHED_S)
        if "error" in begun:
            # Or its worker was too busy to be heard of in time, and promise 5 ended it.
            self.late = begun["error"] == "SandboxStartError" and "the lease ran out" in begun["text"]
            assert self.late or begun["error"] == "Killed", begun
            return
        self.handle = begun["handle"]
        self.id = SandboxHandle.from_json(self.handle).sandbox_id
        self._held = [(self._picked, 1)]
        for _ in range(self.chance.randint(2, 5)):
            await self.step()
        await self.use()
        await self.judge()
        for worker, _ in self._held[-1:]:
            await worker.ask("stop", sandbox=self.id)

    def pick(self) -> Process:
        self._picked = self.chance.choice(self.crew.workers)
        return self._picked

    async def step(self) -> None:
        kind = self.chance.choices(("use", "attach", "race", "detach", "kill"), (3, 3, 4, 2, 0.4))[0]
        if kind == "use":
            await self.use()
        elif kind == "attach":
            await self.attach([self.pick()])
        elif kind == "race":
            workers = self.chance.sample(self.crew.workers, 2)
            async with anyio.create_task_group() as tasks:
                for worker, _ in self._held:
                    tasks.start_soon(self.ask_use, worker, [])
                await self.attach(workers)
        elif kind == "detach":
            await self._held[-1][0].ask("detach", sandbox=self.id)
        else:
            await self.crew.kill(self._held[-1][0])

    async def attach(self, workers: list[Process]) -> None:
        """Have all of them attach at once; those who are told that they won count."""

        async def one(worker: Process) -> None:
            answer = await worker.ask("attach", handle=self.handle)
            if "epoch" in answer:
                if answer["epoch"] in {epoch for _, epoch in self._held}:
                    self.broken.append(f"epoch {answer['epoch']} was won twice")
                self._held.append((worker, answer["epoch"]))
                self._held.sort(key=lambda held: held[1])

        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(one, worker)

    async def use(self) -> None:
        """Everybody who ever won runs a command now: it works for one at most."""
        served: list[Process] = []
        async with anyio.create_task_group() as tasks:
            for worker in {worker for worker, _ in self._held}:
                tasks.start_soon(self.ask_use, worker, served)
        if len(served) > 1:
            self.broken.append(f"{len(served)} workers of {self.id} were served")

    async def ask_use(self, worker: Process, served: list[Process]) -> None:
        answer = await worker.ask("execute", sandbox=self.id, command="echo $SANDBOX_ID; sleep 0.05")
        if answer.get("exit_code") == 0:
            served.append(worker)

    async def judge(self) -> None:
        """Read the launcher's log beside the owner."""
        try:
            guest = await self.client.attach(SandboxHandle.from_json(self.handle), take_ownership=False)
            async with guest:
                log = await guest.log()
        except SandboxError:
            return  # its lease was over, or its owner was killed
        self.judged = True
        self.broken += double_owners(log)


async def until(client: SandboxClient, states: list[str]) -> None:
    """Wait until the list shows no more than those states."""
    while True:
        if [info.state for info in await client.list()] == states:
            return
        await anyio.sleep(0.1)


async def lives(
    config: ClientConfig,
    many: int,
    *,
    workers: int,
    at_once: int,
    lease_s: float = 3.0,
    late_starts: int = 0,
) -> None:
    """Run lives, then wait for leases and sweep once: nothing may be left."""
    seed = int(os.environ.get("SANDBOX_K8S_SEED", "0"))
    make = SandboxClient.kubernetes if isinstance(config, KubernetesConfig) else SandboxClient.local
    run = [seed + number for number in range(many)]
    judged = late = 0
    broken: list[str] = []
    async with make(config) as client:  # type: ignore[arg-type]
        async with crew(config, workers) as hired, anyio.create_task_group() as tasks:

            async def live() -> None:
                nonlocal judged, late
                while run:
                    one = Life(run.pop(), hired, client, lease_s)
                    await one.run()
                    judged += one.judged
                    late += one.late
                    broken.extend(f"seed {one.seed}: {what}" for what in one.broken)

            for _ in range(at_once):
                tasks.start_soon(live)
        await anyio.sleep(DETACHED_S + 1)
        await client.reap()
        with anyio.fail_after(30):
            await until(client, [])
    assert broken == []
    assert judged > many / 2
    assert late <= late_starts


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", ["fake"], indirect=True)
async def test_300_lives_in_pods_of_the_fake_cluster(config: ClientConfig) -> None:
    await lives(config, int(os.environ.get("SANDBOX_K8S_FAKE_LIVES", "300")), workers=4, at_once=12)


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_60_lives_in_pods_of_a_real_cluster(config: ClientConfig) -> None:
    assert isinstance(config, KubernetesConfig)
    small = msgspec.structs.replace(config, cpu=0.05, memory_bytes=128 << 20)
    many = int(os.environ.get("SANDBOX_K8S_LIVES", "60"))
    # A node that starts pods is busy.
    await lives(small, many, workers=4, at_once=8, lease_s=6.0, late_starts=many // 10)


@LOCAL
async def test_two_processes_race_to_attach_20_times_and_one_wins(config: ClientConfig) -> None:
    async with crew(config, 3) as hired:
        first, *rivals = hired.workers
        begun = await first.ask("start", lease_s=30.0, detached_s=30.0)
        sandbox = SandboxHandle.from_json(begun["handle"]).sandbox_id
        owner, handle = first, begun["handle"]
        for _ in range(20):
            handle = (await owner.ask("detach", sandbox=sandbox))["handle"]
            answers: dict[Process, Answer] = {}

            async def attach(worker: Process, handle: str, answers: dict[Process, Answer]) -> None:
                answers[worker] = await worker.ask("attach", handle=handle)

            async with anyio.create_task_group() as tasks:
                for worker in rivals:
                    tasks.start_soon(attach, worker, handle, answers)
            told = [one for one, answer in answers.items() if "epoch" in answer]
            assert [answer["error"] for answer in answers.values() if "error" in answer] == [
                "FencedError"
            ] * (2 - len(told))
            served = []
            for worker in told:
                used = await worker.ask("execute", sandbox=sandbox, command="true")
                if "error" in used:
                    assert used["error"] == "FencedError"  # it came second, and the other one third
                else:
                    served.append(worker)
            (owner,) = served
        assert "error" not in await owner.ask("stop", sandbox=sandbox)


@PODS
async def test_a_lease_that_ran_out_says_so_in_the_pod_and_in_the_error(
    config: ClientConfig, make_client: Callable[[], SandboxClient]
) -> None:
    async with make_client() as client:
        sandbox = await client.start(SandboxSpec(lease_s=1.0))
        for owned in client._owned:
            owned.end_renewals()
        with anyio.fail_after(20):
            await until(client, ["dead"])
        with pytest.raises(SandboxLostError) as lost:
            await sandbox.execute("true")
        assert lost.value.diagnosis is not None
        said = lost.value.diagnosis.evidence_text + str(lost.value)
        assert "the lease ran out at 20" in said
        assert "its owner, epoch 1," in said
        assert [one.why for one in await client.reap()] == ["its launcher ended"]


@LOCAL
async def test_a_fence_ends_an_upload_of_the_older_owner(make_client: Callable[[], SandboxClient]) -> None:
    """Its worker may be a zombie that goes on sending: nothing of it may arrive after the fence."""
    go_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"a"
        go_on.wait(30)

    async with make_client() as old, make_client() as new:
        sandbox = await old.start()
        ended: list[SandboxError] = []

        async def upload() -> None:
            try:
                await sandbox.launcher.put("/sbx/file", {"path": "half"}, pieces())
            except SandboxError as problem:
                ended.append(problem)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upload)
            begun: list[str] = []
            while "write" not in begun:
                begun = [one.what for one in await sandbox.log()]
            with anyio.fail_after(10):
                taken = await new.attach(sandbox.handle)
            go_on.set()
        assert [type(one) for one in ended] == [FencedError]
        assert (await taken.execute("ls -A")).stdout == b""
        log = await taken.log()
        assert [one.what for one in log if one.what != "refused"] == (
            ["fence", "fenced", "write", "fence", "end", "fenced", "lease", "command", "end"]
        )
        assert double_owners(log) == ()
