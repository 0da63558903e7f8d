"""The Kubernetes back end on the fake cluster, whole and with a network that breaks requests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
from sandbox_k8s import FencedError, PodPlace, SandboxClient, SandboxLostError, SandboxStartError
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, FaultProxy, Faults, why_no_process_pods

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(bool(why_no_process_pods()), reason=why_no_process_pods()),
]
Connect = Callable[[Path], SandboxClient]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(FakeClusterConfig(pods="process", speed=20)) as cluster:
        yield cluster


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """Clients of one run, by kubeconfig."""

    def make(kubeconfig: Path) -> SandboxClient:
        config = KubernetesConfig(
            injection=Injection(kind="image_volume", image="example.com/tools:1"),
            kubeconfig=kubeconfig,
            namespace="default",
            run="on-the-fake",
            run_key_file=tmp_path / "run.key",
            image="example.com/any:1",
            grace_s=0.1,
        )
        return SandboxClient.kubernetes(config)

    return make


async def test_a_sandbox_lives_is_handed_over_and_ends(cluster: FakeCluster, connect: Connect) -> None:
    async with connect(cluster.kubeconfig) as first, connect(cluster.kubeconfig) as second:
        sandbox = await first.start()
        session = await sandbox.session()
        await session.run("export X=kept; cd /tmp")
        assert (await sandbox.execute("echo out; exit 3")).exit_code == 3
        cluster.restart_api_server()
        taken = await second.attach(sandbox.handle)
        with pytest.raises(FencedError):
            await sandbox.execute("true")
        assert (await taken.execute("echo still")).stdout == b"still\n"
        await taken.stop()
        assert await second.list() == ()
    assert cluster.pods() == []


@pytest.mark.parametrize("skew_s", [-7200.0, 7200.0])
async def test_a_cluster_whose_clock_is_wrong_costs_no_sandbox(
    cluster: FakeCluster, connect: Connect, skew_s: float
) -> None:
    """Records are in the time of workers, and nothing of a diagnosis compares it with the cluster's."""
    cluster.skew_clock(skew_s)
    async with connect(cluster.kubeconfig) as first, connect(cluster.kubeconfig) as second:
        sandbox = await first.start()
        await (await sandbox.session()).run("X=kept")
        taken = await second.attach(await sandbox.detach())
        assert (await (await taken.session()).run("echo $X")).stdout == b"kept\n"
        assert await second.reap() == ()
        assert [info.state for info in await second.list()] == ["running"]
        assert isinstance(taken.handle.place, PodPlace)
        cluster.kill_pod(taken.handle.place.pod, "Evicted")
        with pytest.raises(SandboxLostError) as lost:
            await taken.execute("sleep 60")
        assert lost.value.diagnosis is not None
        assert lost.value.diagnosis.failure == "evicted_storage_limit"
        with anyio.fail_after(10):
            while not (reaped := await second.reap()):
                pass  # its kubelet tells its end a moment after the event
        assert [one.why for one in reaped] == ["its launcher ended"]


async def test_a_stop_that_no_node_confirms_is_an_error(
    cluster: FakeCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubernetes-sigs/agent-sandbox#1388: that a deletion had failed was logged, and the caller not told."""
    async with connect(cluster.kubeconfig) as client:
        sandbox = await client.start()
        cluster.lose_node()
        with monkeypatch.context() as change:
            change.setattr("sandbox_k8s.kubernetes.owners._GONE_S", 0.2)
            with pytest.raises(SandboxLostError, match="its node did not confirm its end") as lost:
                await sandbox.stop()
        assert lost.value.retryable
        assert client.stats.stopped == 0
        cluster.find_node()
        await sandbox.stop()
        assert client.stats.stopped == 1
    assert cluster.pods() == []


async def test_an_image_that_is_missing_is_named(cluster: FakeCluster, connect: Connect) -> None:
    """METR/vivaria#657: pods that could not pull stayed, and held nodes and GPUs."""
    cluster.doom("image-not-found")
    async with connect(cluster.kubeconfig) as client:
        with pytest.raises(SandboxStartError, match="image_not_found") as failed:
            await client.start()
    assert (failed.value.fault, failed.value.retryable) == ("image", False)
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods())


async def test_starts_and_stops_survive_a_bad_network(cluster: FakeCluster, connect: Connect) -> None:
    """allenai/open-instruct#1887: a gateway cut a create off, and an orphan stayed."""
    faults = Faults(
        seed=4, too_many_requests=0.1, server_error=0.2, reset=0.1, lost_answer=0.3, doubled_event=0.3,
        cut_watch=0.1, retry_after_s=0,
    )  # fmt: skip
    with FaultProxy(cluster.upstream, faults) as proxy:
        async with connect(proxy.kubeconfig) as client:
            for _ in range(3):
                sandbox = await client.start()
                assert (await sandbox.execute("echo out")).stdout == b"out\n"
                await sandbox.stop()
        assert {"server_error", "lost_answer"} <= proxy.counts.keys()
    assert [
        one["metadata"]["name"] for one in cluster.pods() if "deletionTimestamp" not in one["metadata"]
    ] == []
