"""Many sandboxes: what they cost the API server and the event loop, and how their starts are followed."""

import logging
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    ClientStats,
    Sandbox,
    SandboxClient,
    SandboxSpec,
    SandboxStartError,
    StartProgress,
)
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.starting import until_ready
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
pytestmark = pytest.mark.anyio


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(FakeClusterConfig(speed=20)) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path) -> SandboxClient:
    config = KubernetesConfig(
        injection=Injection(kind="baked"),
        kubeconfig=cluster.kubeconfig,
        run_key_file=tmp_path / "run.key",
        image="example.com/any:1",
        data_path="api_proxy",
        stop_timeout_s=120.0,
    )
    return SandboxClient.kubernetes(config)


def living(cluster: FakeCluster) -> list[str]:
    pods = [one["metadata"] for one in cluster.pods()]
    return [one["name"] for one in pods if "deletionTimestamp" not in one]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_sandboxes_share_two_watches_and_cost_two_requests_each(
    cluster: FakeCluster, client: SandboxClient, count: int
) -> None:
    async with client:
        results = await client.start_many([SandboxSpec()] * count)
        assert sum(isinstance(one, Sandbox) for one in results) == count
        assert len(living(cluster)) == count
    assert living(cluster) == []
    assert (client.stats.started, client.stats.stopped, client.stats.stop_failures) == (count, count, 0)
    asked = cluster.requests
    assert (client.stats.watches, client.stats.lists) == (2, 2) or count == 1000
    assert asked["POST pods"] == asked["DELETE pods"] == count
    # Beside them two lists, and a look at a pod here and there that was changed in the wrong moment.
    through_to_launchers = ("GET pods/proxy", "POST pods/proxy")
    assert sum(number for what, number in asked.items() if what not in through_to_launchers) < 2.1 * count


async def test_results_keep_their_order_and_one_failure_loses_nothing(
    cluster: FakeCluster, client: SandboxClient
) -> None:
    specs = [SandboxSpec(labels={"number": str(number)}) for number in range(6)]
    specs[2] = SandboxSpec(image="example.com/No Such")
    told: list[StartProgress] = []
    async with client:
        results = await client.start_many(specs, progress=told.append)
        assert [one.handle.labels for one in results if isinstance(one, Sandbox)] == [
            {"number": str(number)} for number in (0, 1, 3, 4, 5)
        ]
        problem = results[2]
        assert isinstance(problem, SandboxStartError)
        assert problem.diagnosis is not None
        assert problem.diagnosis.failure == "image_name_invalid"
    assert [one.left for one in told] == [5, 4, 3, 2, 1, 0]
    assert (told[-1].started, told[-1].failed) == (5, 1)
    assert [(one.index, one.problem) for one in told if one.problem] == [(2, problem)]
    assert sorted(one.index for one in told) == [0, 1, 2, 3, 4, 5]


async def test_many_starts_that_are_cancelled_leave_nothing(
    cluster: FakeCluster, client: SandboxClient
) -> None:
    async with client:
        with anyio.CancelScope() as scope:
            await client.start_many(
                [SandboxSpec()] * 40, progress=lambda now: scope.cancel() if now.started == 5 else None
            )
        assert scope.cancelled_caught
        assert living(cluster) == []
    assert client.stats.stop_failures == 0


async def test_a_loop_that_is_held_up_while_starts_are_under_way_is_seen(client: SandboxClient) -> None:
    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.start)
        while not client.stats.starts_in_flight:
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.03)
        threading.Event().wait(0.25)
    assert client.stats.loop_stall_s > 0.2


SIMULATED = int(os.environ.get("SANDBOX_K8S_SIMULATED_PODS", "0"))
NO_SIMULATED = (
    "SANDBOX_K8S_SIMULATED_PODS does not say how many pods the simulated nodes (type=kwok) may take"
)


def simulated(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod of a sandbox, for nodes that only pretend: they have neither an architecture nor a disk."""
    pod["spec"]["nodeSelector"] = {"type": "kwok"}
    pod["spec"]["tolerations"] = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    for amounts in pod["spec"]["containers"][0]["resources"].values():
        amounts.pop("ephemeral-storage", None)
    return pod


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SIMULATED, reason=NO_SIMULATED)
@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_simulated_pods_on_a_real_api_server(config: ClientConfig) -> None:
    """Pods of simulated nodes have no launcher: created, ready and deleted, with the back end's own parts."""
    assert isinstance(config, KubernetesConfig)
    stats = ClientStats()
    backend = KubernetesBackend(msgspec.structs.replace(config, cpu=0.1), SystemClock(), stats)
    ready: list[str] = []
    ends = anyio.CapacityLimiter(100)
    async with backend.opened():

        async def live() -> None:
            async with backend._gate.turn("simulated") as turn:
                sandbox_id = os.urandom(8).hex()
                pod = simulated(backend._manifest(SandboxSpec(), sandbox_id, os.urandom(16).hex()))
                followed = backend.watch.follow(pod["metadata"]["name"])
                followed.created(await backend.api.create(pod, records.REQUEST))
                await until_ready(followed, config, partial(backend._gate.suffers, turn))
                ready.append(followed.name)

        async def end(name: str) -> None:
            pod = backend.watch.follow(name).pod
            assert pod is not None
            async with ends:  # one server has to make them all go away within the time that each may take
                await backend._owners.delete(records.read_record(pod, config.cluster).handle)

        begun_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(SIMULATED):
                tasks.start_soon(live)
        up_s = anyio.current_time() - begun_s
        async with anyio.create_task_group() as tasks:
            for name in ready:
                tasks.start_soon(end, name)
        assert (await backend.api.list(records.selector(config.run))).items == []
        down_s = anyio.current_time() - begun_s - up_s
    logging.getLogger("test").info(
        "%.1f s up, %.1f s down, %d requests, %s", up_s, down_s, backend.api.requests, stats
    )
    assert len(ready) == SIMULATED
    assert backend.api.requests < 3 * SIMULATED
    assert stats.watches - stats.watch_failures <= 2 * (1 + (up_s + down_s) // config.watch_s)
