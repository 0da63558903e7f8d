"""Many sandboxes: what they cost the API server and the event loop, and how their starts are followed."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from sandbox_k8s import (
    Sandbox,
    SandboxClient,
    SandboxSpec,
    SandboxStartError,
    StartProgress,
)
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, RefusalError

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
        watch_s=300.0,  # so that none has to be opened anew meanwhile
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
    assert (client.stats.watches, client.stats.lists) == (2, 2)
    assert asked["POST pods"] == asked["DELETE pods"] == count
    # Beside them two lists, and a look at a pod here and there that was changed in the wrong moment.
    through_to_launchers = ("GET pods/proxy", "POST pods/proxy")
    assert sum(number for what, number in asked.items() if what not in through_to_launchers) < 2.1 * count


OBJECTS = """
import gc, sys
from pathlib import Path
import anyio
from sandbox_k8s import Injection, KubernetesConfig, SandboxClient, SandboxSpec

async def main(kubeconfig: Path, key: Path) -> None:
    config = KubernetesConfig(
        injection=Injection(kind="baked"), kubeconfig=kubeconfig, run_key_file=key, image="example.com/any:1",
        data_path="api_proxy", start_concurrency_max=16,
    )
    async with SandboxClient.kubernetes(config) as client:
        await client.start_many([SandboxSpec()] * 30)  # connections, threads, modules
        gc.collect()
        before = len(gc.get_objects())
        await client.start_many([SandboxSpec()] * 150)
        gc.collect()
        print((len(gc.get_objects()) - before) / 150, flush=True)

anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.timeout(120)
def test_a_sandbox_is_few_objects_for_the_garbage_collector(
    cluster: FakeCluster, tmp_path: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    """A task, a session and a pool of connections for each were a hundred, and stopped the loop for 80 ms."""
    out, err = script(OBJECTS, str(cluster.kubeconfig), str(tmp_path / "run.key")).communicate(timeout=100)
    assert out, err
    assert float(out) < 20


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


async def test_room_in_a_quota_is_waited_for(cluster: FakeCluster, client: SandboxClient) -> None:
    full = RefusalError(
        403, "Forbidden", "exceeded quota: q, requested: pods=1, used: pods=5, limited: pods=5"
    )
    cluster.refuse_creates(full, full)
    async with client:
        async with await client.start(SandboxSpec()):
            assert client.stats.start_slowdowns >= 1
        patient = client.config
        assert isinstance(patient, KubernetesConfig)
    hasty = SandboxClient.kubernetes(msgspec.structs.replace(patient, failing_timeout_s=0.01))
    cluster.refuse_creates(*[full] * 9)
    async with hasty:
        with pytest.raises(SandboxStartError, match="exceeded quota") as refused:
            await hasty.start(SandboxSpec())
    assert refused.value.diagnosis is not None
    assert (refused.value.diagnosis.failure, refused.value.diagnosis.retryable) == ("quota_exceeded", True)
    assert living(cluster) == []


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
    never_up = SandboxSpec(labels={"sim.fault": "stalled-pull"})
    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.start, never_up)
        while not client.stats.starts_in_flight:
            await anyio.lowlevel.checkpoint()
        threading.Event().wait(0.25)
        with anyio.fail_after(20):
            while client.stats.loop_stall_s < 0.2:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert client.stats.loop_stall_cpu_s < 0.2  # it waited, and did not compute
