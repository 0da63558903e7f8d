"""What owners and reapers need of an API server: on the one in memory, the fake cluster, and a real one.

The schedules in virtual time prove as much as their cluster in memory is like a real one in this.
"""

import os
from pathlib import Path
from random import Random

import anyio
import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    ClusterError,
    FencedError,
    KubernetesConfig,
    SandboxClient,
    SandboxSpec,
    double_owners,
)
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import ConflictError, PodApi, PodMissingError
from sandbox_k8s.kubernetes.manifest import pod_manifest, pod_name
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

from .virtual_cluster import VirtualCluster
from .virtual_network import Network, VirtualApi
from .virtual_time import VirtualClock, run
from .virtual_workers import CONFIG

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
PODS = ["fake", pytest.param("kubernetes", marks=pytest.mark.cluster)]


async def contract(api: PodApi, config: KubernetesConfig) -> None:
    """Versions, preconditions, adoption, and what is gone."""
    sandbox_id = os.urandom(8).hex()
    name = pod_name(sandbox_id)
    record = records.Record(key_id="k", workdir="/", lease_s=60.0, detached_lease_s=60.0, created_ns=1)
    wanted = pod_manifest(
        SandboxSpec(),
        config,
        sandbox_id=sandbox_id,
        token_hash="0" * 64,
        annotations=records.annotations(record, request="mine", epoch=1, expires_ns=5),
    )
    made = await api.create(wanted, records.REQUEST)
    uid, first = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    with pytest.raises(ClusterError) as taken:
        await api.create(wanted, records.REQUEST)
    assert (taken.value.code, isinstance(taken.value, ConflictError)) == (409, False)
    held = await changed(api, name, {records.EPOCH: "2", records.OWNER: "a"})
    assert records.annotations_of(held)[records.EPOCH] == "2"
    assert records.annotations_of(held)[records.REQUEST] == "mine", "what is not named stays"
    with pytest.raises(ConflictError):
        await api.annotate(name, {records.EPOCH: "9"}, first)
    with pytest.raises(ConflictError):
        await api.delete(name, uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(ConflictError):
        await api.delete(name, uid=uid, resource_version=first)
    listed = (await api.list(records.selector(config.run))).items
    assert [records.read_record(one, config.cluster).handle.epoch for one in listed] == [2]
    await api.delete(name, uid=uid)
    with anyio.fail_after(30):
        while (left := await api.find(name)) is not None:
            assert "deletionTimestamp" in left["metadata"]
            await anyio.sleep(0.1)
    await api.delete(name, uid=uid)
    with pytest.raises(PodMissingError):
        await api.get(name)
    with pytest.raises(PodMissingError):
        await api.annotate(name, {records.EPOCH: "9"}, first)


async def changed(api: PodApi, name: str, changes: dict[str, str]) -> dict[str, object]:
    """Change the pod as it is now; the kubelet changes it as well."""
    while True:
        pod = await api.get(name)
        try:
            return await api.annotate(name, changes, pod["metadata"]["resourceVersion"])
        except ConflictError:
            continue


def test_in_memory() -> None:
    async def on_memory() -> None:
        chance = Random(1)
        cluster = VirtualCluster(chance)
        clock = VirtualClock(cluster.loop, chance)
        await contract(VirtualApi(cluster, Network(chance), CONFIG, clock, "test"), CONFIG)

    run(on_memory())


@pytest.mark.anyio
async def test_a_pod_without_a_process_keeps_the_rules_and_the_log_of_one_with(tmp_path: Path) -> None:
    with FakeCluster(FakeClusterConfig(pods="status", speed=50)) as cluster:
        config = msgspec.structs.replace(
            CONFIG, kubeconfig=cluster.kubeconfig, run_key_file=tmp_path / "run.key", data_path="api_proxy"
        )
        async with SandboxClient.kubernetes(config) as one, SandboxClient.kubernetes(config) as two:
            sandbox = await one.start()
            guest = await one.attach(sandbox.handle, take_ownership=False)
            taken = await two.attach(sandbox.handle)
            with pytest.raises(FencedError):
                await sandbox.renew()
            with pytest.raises(FencedError, match="only the owner, epoch 2"):
                await guest.renew()
            log = await taken.log()
            assert [(line.what, line.epoch) for line in log if line.what in ("fence", "refused")] == [
                ("fence", 1),
                ("fence", 2),
                ("refused", 1),
                ("refused", None),
            ]
            assert double_owners(log) == ()
            assert await taken.log(log[-1].number) == ()


@pytest.mark.anyio
@pytest.mark.parametrize("place", PODS, indirect=True)
async def test_over_http(config: ClientConfig) -> None:
    assert isinstance(config, KubernetesConfig)
    clock = SystemClock()
    api = PodApi(ApiAccess(config), config, clock)
    try:
        await contract(api, config)
    finally:
        api.close()
