"""Sandboxes that are ready before they are needed."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from sandbox_k8s import (
    ConfigError,
    LocalConfig,
    PodPlace,
    Sandbox,
    SandboxClient,
    SandboxSpec,
    SandboxStartError,
    WarmPool,
)
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    with FakeCluster(FakeClusterConfig(speed=50)) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path) -> SandboxClient:
    config = KubernetesConfig(
        injection=Injection(kind="baked"),
        kubeconfig=cluster.kubeconfig,
        run_key_file=tmp_path / "run.key",
        image="example.com/any:1",
        data_path="api_proxy",
    )
    return SandboxClient.kubernetes(config)


def living(cluster: FakeCluster) -> list[str]:
    pods = [one["metadata"] for one in cluster.pods()]
    return [one["name"] for one in pods if "deletionTimestamp" not in one]


def pod_of(sandbox: Sandbox) -> str:
    place = sandbox.handle.place
    assert isinstance(place, PodPlace)
    return place.pod


async def filled(pool: WarmPool, size: int) -> None:
    with anyio.fail_after(20):
        while pool.ready < size:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_what_is_taken_is_replaced_and_the_rest_is_stopped_at_the_end(
    cluster: FakeCluster, client: SandboxClient
) -> None:
    async with client:
        async with client.warm_pool(size=2) as pool:
            await filled(pool, 2)
            waited = [await pool.take() for _ in range(2)]
            assert (client.stats.pool_hits, client.stats.pool_misses) == (2, 0)
            more = await pool.take()  # as likely as not the pool is empty now
            assert client.stats.pool_hits + client.stats.pool_misses == 3
            await filled(pool, 2)
            assert len(living(cluster)) == 5
        taken = {pod_of(one) for one in (*waited, more)}
        assert set(living(cluster)) == taken
        assert (await waited[0].info())["epoch"] == 1
        with pytest.raises(ConfigError, match="not open"):
            await pool.take()
    assert living(cluster) == []


async def test_those_who_wait_are_served_in_their_order_beyond_the_size(client: SandboxClient) -> None:
    order: list[int] = []
    async with client, client.warm_pool(size=1) as pool:

        async def take(number: int) -> None:
            await pool.take()
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(take, number)
        assert order == [0, 1, 2, 3, 4, 5]
        assert client.stats.pool_misses == 6
        await filled(pool, 1)


async def test_a_dead_one_is_not_handed_out(cluster: FakeCluster, client: SandboxClient) -> None:
    async with client, client.warm_pool(size=1) as pool:
        await filled(pool, 1)
        (dead,) = living(cluster)
        cluster.evict(dead)
        while cluster.pods() and dead in {one["metadata"]["name"] for one in cluster.pods()}:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        sandbox = await pool.take()
        assert pod_of(sandbox) != dead
        assert (await sandbox.info())["epoch"] == 1
        assert client.stats.pool_dead == 1


async def test_one_that_dies_while_it_waits_is_replaced(cluster: FakeCluster, client: SandboxClient) -> None:
    async with client, client.warm_pool(SandboxSpec(lease_s=1.0), size=1) as pool:
        await filled(pool, 1)
        (dead,) = living(cluster)
        cluster.evict(dead)
        with anyio.fail_after(10):
            while not client.stats.pool_dead:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        await filled(pool, 1)
        assert dead not in living(cluster)


async def test_an_image_that_is_missing_is_not_started_for_ever(
    cluster: FakeCluster, client: SandboxClient
) -> None:
    """daytonaio/daytona#3289: the warm pool recreated failing sandboxes without end."""
    for _ in range(50):
        cluster.doom("image-not-found")
    async with client, client.warm_pool(size=2) as pool:
        for _ in range(4):
            with pytest.raises(SandboxStartError, match="image_not_found"):
                await pool.take()
        # The two of the beginning, one for whoever takes; then the image's breaker is open.
        assert cluster.requests["POST pods"] <= 4
        assert client.stats.pool_failures >= 4
        assert pool.ready == 0


async def test_a_take_that_is_given_up_loses_no_sandbox(cluster: FakeCluster, client: SandboxClient) -> None:
    async with client, client.warm_pool(size=1) as pool:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pool.take()
        await filled(pool, 1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pool.take()
        await filled(pool, 1)
        await anyio.sleep(0.05)
        assert len(living(cluster)) == pool.ready


async def test_the_users_error_comes_out_of_the_pool_as_it_is(
    cluster: FakeCluster, client: SandboxClient
) -> None:
    async def use() -> None:
        async with client.warm_pool(size=1) as pool:
            await filled(pool, 1)
            raise ZeroDivisionError

    async with client:
        with pytest.raises(ZeroDivisionError):
            await use()
        assert living(cluster) == []


async def test_on_one_machine_it_is_the_same(root: Path) -> None:
    async with (
        SandboxClient.local(LocalConfig(root=root, isolation="process")) as client,
        client.warm_pool(size=1) as pool,
    ):
        await filled(pool, 1)
        async with await pool.take() as sandbox:
            assert (await sandbox.execute("echo warm")).stdout == b"warm\n"
        assert client.stats.pool_hits == 1
        with pytest.raises(ConfigError, match="size=0"):
            client.warm_pool(size=0)
