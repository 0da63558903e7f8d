"""A real cluster that breaks: parts of it are killed in mid command, in mid watch, in mid start.

Needs a cluster that may be broken (`breaking`). SANDBOX_K8S_ETCD is the address of its etcd,
http://HOST:PORT.
"""

import base64
import json
import os
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    CommandResult,
    PodPlace,
    Sandbox,
    SandboxClient,
    SandboxLostError,
    SandboxStartError,
)
from sandbox_k8s.kubernetes import Diagnosis, classify
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.kubernetes.records import annotations_of
from sandbox_k8s.kubernetes.watch import FollowedPod
from sandbox_k8s.testing import FaultProxy, Faults, Upstream

from .breaking import BREAKABLE, without

ETCD = os.environ.get("SANDBOX_K8S_ETCD", "")
MERGE = "application/merge-patch+json"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
    BREAKABLE,
    # Python's ssl forgets a socket that was reset between connect and wrap, as a killed server resets it.
    pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*<ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return config


def backend_of(client: SandboxClient) -> KubernetesBackend:
    backend = client._backend
    assert isinstance(backend, KubernetesBackend)
    return backend


def place_of(sandbox: Sandbox) -> PodPlace:
    assert isinstance(sandbox.handle.place, PodPlace)
    return sandbox.handle.place


async def ask(client: SandboxClient, method: str, path: str, body: Any = None, kind: str = MERGE) -> Any:
    """One request to the API server, without a second try."""
    request = Request(method, path, body=body, content_type=kind)
    return await backend_of(client).api._once(request, f"{method} {path}")


async def delete_behind_its_back(client: SandboxClient, sandbox: Sandbox) -> None:
    place = place_of(sandbox)
    await backend_of(client).api.delete(place.pod, uid=place.uid)


async def until(
    client: SandboxClient, sandbox: Sandbox, holds: Callable[[Diagnosis], bool], within_s: float
) -> Diagnosis:
    """Follow a sandbox's pod until something holds of its diagnosis."""
    followed = backend_of(client).watch.follow(place_of(sandbox).pod)
    with anyio.fail_after(within_s):
        while True:
            changed = followed.changed
            found = classify(followed.pod or {}, followed.events, deleted=followed.gone)
            if holds(found):
                return found
            await changed.wait()


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd"])
async def test_commands_go_on_starts_wait_and_the_watch_resumes(part: str, client: SandboxClient) -> None:
    """The API server (its store) is killed in mid command, in mid start and in mid watch."""
    sandbox = await client.start()
    session = await sandbox.session()
    await session.run("X=kept")
    ended: list[CommandResult] = []
    started: list[Sandbox] = []
    done = anyio.Event()

    async def run() -> None:
        ended.append(await sandbox.execute("until [ -e end ]; do sleep 0.05; done; echo whole; exit 7"))
        done.set()

    async def start() -> None:
        started.append(await client.start())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        tasks.start_soon(start)
        async with without(part):
            tasks.start_soon(start)
            assert (await session.run("echo $X")).stdout == b"kept\n"
            await sandbox.write("end", b"")
            await done.wait()
    assert (ended[0].exit_code, ended[0].stdout, ended[0].infra_failed) == (7, b"whole\n", False)
    assert [(await one.execute("echo up")).stdout for one in started] == [b"up\n"] * 2
    alive = {one.id for one in (sandbox, *started)}
    assert {one.handle.sandbox_id for one in await client.list() if one.state == "running"} == alive
    assert (await session.run("echo $X")).stdout == b"kept\n"
    begun_s = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(delete_behind_its_back, client, sandbox)
        with pytest.raises(SandboxLostError) as lost:
            await sandbox.execute("sleep 600")
    assert lost.value.diagnosis is not None
    assert lost.value.diagnosis.failure == "deleted"
    assert time.monotonic() - begun_s < 10


@pytest.mark.skipif(not ETCD, reason="SANDBOX_K8S_ETCD is not set, so nothing can be compacted")
async def test_a_watch_that_is_older_than_what_etcd_keeps_misses_nothing(cluster: KubernetesConfig) -> None:
    """A half-open watch sleeps through a deletion, a compaction and a restart of the API server."""
    access = ApiAccess(cluster)
    upstream = Upstream(access.base_url.rstrip("/"), access.options()["headers"], access.tls)
    with FaultProxy(upstream, Faults()) as proxy:
        behind = msgspec.structs.replace(cluster, kubeconfig=proxy.kubeconfig, watch_s=4.0)
        async with SandboxClient.kubernetes(cluster) as direct, SandboxClient.kubernetes(behind) as client:
            kept, deleted = await client.start(), await client.start()
            name = place_of(deleted).pod
            seen = backend_of(client).watch.follow(place_of(kept).pod)
            missed = backend_of(client).watch.follow(name)
            truth = backend_of(direct).watch.follow(name)
            await holds(truth, lambda: truth.pod is not None)
            proxy.faults = Faults(half_open_watch=1.0)
            await change(direct, kept, "1")
            await holds(seen, lambda: probe(seen) == "1")
            lists = client.stats.lists
            await delete_behind_its_back(direct, deleted)
            for number in range(2, 6):
                await change(direct, kept, str(number))
            await holds(truth, lambda: truth.gone)
            assert not missed.gone
            assert probe(seen) == "1"
            await compact()
            async with without("kube-apiserver"):
                proxy.faults = Faults()
            await holds(missed, lambda: missed.gone)
            assert client.stats.lists > lists
            assert probe(seen) == "5"
            assert (await kept.execute("echo alive")).stdout == b"alive\n"


async def holds(followed: FollowedPod, what: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while True:
            changed = followed.changed
            if what():
                return
            await changed.wait()


def probe(followed: FollowedPod) -> str | None:
    return None if followed.pod is None else annotations_of(followed.pod).get("sandbox-k8s/probe")


async def change(client: SandboxClient, sandbox: Sandbox, value: str) -> None:
    body = {"metadata": {"annotations": {"sandbox-k8s/probe": value}}}
    place = place_of(sandbox)
    await ask(client, "PATCH", f"api/v1/namespaces/{place.namespace}/pods/{place.pod}", body)


async def compact() -> None:
    """Make etcd forget all but its newest revision."""
    async with aiohttp.ClientSession(ETCD) as http:
        key = base64.b64encode(b"/").decode()
        async with http.post("/v3/kv/range", json={"key": key}) as answer:
            newest = json.loads(await answer.read())["header"]["revision"]
        async with http.post("/v3/kv/compaction", json={"revision": newest, "physical": True}) as answer:
            assert answer.status == 200, await answer.read()


async def test_a_lost_node_is_named_and_a_stop_says_what_it_could_not_confirm(
    cluster: KubernetesConfig,
) -> None:
    forwarding = msgspec.structs.replace(cluster, data_path="port_forward")
    async with SandboxClient.kubernetes(cluster) as client, SandboxClient.kubernetes(forwarding) as other:
        stopped, kept, behind = await client.start(), await client.start(), await other.start()
        refused: list[str] = []
        told = anyio.Event()

        async def stop() -> None:
            with pytest.raises(SandboxLostError, match="its node did not confirm its end") as problem:
                await stopped.stop()
            refused.append(str(problem.value))
            told.set()

        async with anyio.create_task_group() as tasks, without("kubelet"):
            tasks.start_soon(stop)
            found = await until(client, kept, lambda one: one.failure == "node_lost", 60)
            assert (found.state, found.guess) == ("failing", False)
            assert (await kept.execute("echo runs on")).stdout == b"runs on\n"
            with pytest.raises(SandboxLostError) as lost:
                await behind.execute("echo no way leads there")
            assert lost.value.diagnosis is not None
            assert (lost.value.diagnosis.failure, lost.value.retryable) == ("node_lost", True)
            await told.wait()
        assert place_of(stopped).pod in refused[0]
        await until(client, kept, lambda one: one.state == "ready", 30)
        await stopped.stop()
        assert (await kept.execute("echo alive")).stdout == b"alive\n"
        assert (await behind.execute("echo alive")).stdout == b"alive\n"


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd"])
async def test_no_exit_code_is_guessed_when_what_carries_it_dies(
    cluster: KubernetesConfig, part: str
) -> None:
    carried = msgspec.structs.replace(cluster, data_path="api_proxy")
    async with SandboxClient.kubernetes(cluster) as client, SandboxClient.kubernetes(carried) as other:
        straight, behind = await client.start(), await other.start()
        ended: dict[str, CommandResult | SandboxLostError] = {}

        async def run(name: str, sandbox: Sandbox) -> None:
            try:
                words = "touch begun; until [ -e end ]; do sleep 0.05; done; echo whole; exit 7"
                ended[name] = await sandbox.execute(words)
            except SandboxLostError as problem:
                ended[name] = problem

        async with anyio.create_task_group() as tasks:
            for name, sandbox in (("straight", straight), ("behind", behind)):
                tasks.start_soon(run, name, sandbox)
                await sandbox.execute("until [ -e begun ]; do sleep 0.01; done")
            async with without(part):
                assert (await straight.execute("exit 3")).exit_code == 3
            await straight.write("end", b"")
            await behind.write("end", b"")
        first, second = ended["straight"], ended["behind"]
        assert isinstance(first, CommandResult)
        assert (first.exit_code, first.stdout) == (7, b"whole\n")
        # The connection was cut with what carried it, or it was not: a 0 it never is.
        assert isinstance(second, SandboxLostError) or second.exit_code == 7
        assert (await behind.execute("exit 5")).exit_code == 5
        assert (await straight.execute("exit 5")).exit_code == 5


async def first_failure(client: SandboxClient) -> SandboxStartError:
    """Of the starts after a change that the scheduler, which has its own view of nodes, has to hear of."""
    while True:
        try:
            early = await client.start()
        except SandboxStartError as problem:
            return problem
        await early.stop()


async def test_a_cordoned_node_is_waited_for_and_then_given_up(cluster: KubernetesConfig) -> None:
    config = msgspec.structs.replace(cluster, failing_timeout_s=2.0)
    async with SandboxClient.kubernetes(cluster) as patient, SandboxClient.kubernetes(config) as client:
        nodes = (await ask(client, "GET", "api/v1/nodes"))["items"]
        # Also a node that is tainted yet, since its kubelet came back a moment ago.
        names = [one["metadata"]["name"] for one in nodes if not one["spec"].get("unschedulable")]

        async def cordon(closed: bool) -> None:
            for name in names:
                await ask(client, "PATCH", f"api/v1/nodes/{name}", {"spec": {"unschedulable": closed}})

        started: list[Sandbox] = []

        async def start() -> None:
            started.append(await patient.start())

        async with anyio.create_task_group() as tasks:
            await cordon(True)
            try:
                failed = await first_failure(client)
                tasks.start_soon(start)
                with pytest.raises(SandboxStartError):
                    await client.start()
            finally:
                await cordon(False)
        assert failed.diagnosis is not None
        assert failed.diagnosis.failure == "unschedulable_nodes_down"
        assert (failed.fault, failed.retryable) == ("infra", True)
        assert (await started[0].execute("echo up")).stdout == b"up\n"


async def test_a_drained_sandbox_says_so(client: SandboxClient) -> None:
    sandbox = await client.start()
    place = place_of(sandbox)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": place.pod}}
    path = f"api/v1/namespaces/{place.namespace}/pods/{place.pod}/eviction"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client, "POST", path, eviction, "application/json")
        with pytest.raises(SandboxLostError) as lost:
            await sandbox.execute("sleep 600")
    assert lost.value.diagnosis is not None
    assert (lost.value.diagnosis.failure, lost.value.diagnosis.guess) == ("drained", False)
    assert (lost.value.fault, lost.value.retryable) == ("infra", True)
