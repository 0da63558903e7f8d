"""Pods of simulated nodes on a real API server: what many cost it, how starts are paced, how they fail.

Needs nodes of kwok with label type=kwok, whose pods have a status and no process: ready after a moment, or
with the fate that a label ``sim.fault`` names. SANDBOX_K8S_SIMULATED_PODS says how many they may take.
"""

import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from sandbox_k8s import ClientStats, ClusterError, SandboxClient, SandboxSpec, SandboxStartError
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.starting import create_within_quota, until_ready
from sandbox_k8s.kubernetes.watch import FollowedPod

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG", "")
SIMULATED = int(os.environ.get("SANDBOX_K8S_SIMULATED_PODS", "0"))
NO_SIMULATED = (
    "SANDBOX_K8S_SIMULATED_PODS does not say how many pods the simulated nodes (type=kwok) may take"
)
FAULT = "sim.fault"
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not KUBECONFIG, reason="SANDBOX_K8S_KUBECONFIG names no cluster"),
    pytest.mark.skipif(not SIMULATED, reason=NO_SIMULATED),
]


class SimulatedBackend(KubernetesBackend):
    """Its pods are for nodes that only pretend: they have neither an architecture nor a disk."""

    def _manifest(self, spec: SandboxSpec, sandbox_id: str, request: str) -> dict[str, Any]:
        pod = super()._manifest(spec, sandbox_id, request)
        pod["spec"]["nodeSelector"] = {"type": "kwok"}
        pod["spec"]["tolerations"] = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
        for amounts in pod["spec"]["containers"][0]["resources"].values():
            amounts.pop("ephemeral-storage", None)
        if FAULT in spec.labels:
            pod["metadata"]["labels"][FAULT] = spec.labels[FAULT]
        return pod

    async def come_up(self) -> FollowedPod:
        """As `start`, as far as pods without a launcher come: created in its turn, and ready."""
        async with self._gate.turn("simulated") as turn:
            pod = self._manifest(SandboxSpec(), os.urandom(8).hex(), os.urandom(16).hex())
            followed = self.watch.follow(pod["metadata"]["name"])
            followed.created(await create_within_quota(self.api, pod, self.config))
            await until_ready(followed, self.config, partial(self._gate.suffers, turn))
            return followed

    async def delete(self, followed: FollowedPod) -> None:
        """Delete a pod, and wait until it is gone."""
        assert followed.pod is not None
        await self._owners.delete(records.read_record(followed.pod, self.config.cluster).handle)


@pytest.fixture
async def simulated(tmp_path: Path) -> AsyncIterator[SimulatedBackend]:
    """A run of its own; at the end none of its pods may be left."""
    config = KubernetesConfig(
        injection=Injection(kind="baked"),
        kubeconfig=Path(KUBECONFIG),
        namespace=os.environ.get("SANDBOX_K8S_NAMESPACE", "default"),
        run=f"test-{os.urandom(6).hex()}",
        run_key_file=tmp_path / "run.key",
        image="simulated",
        cpu=0.1,
    )
    backend = SimulatedBackend(config, SystemClock(), ClientStats())
    yield backend
    async with backend.opened():
        assert (await backend.api.list(records.selector(config.run))).items == []


async def test_many_cost_three_requests_each_at_most_and_share_two_watches(
    simulated: SimulatedBackend,
) -> None:
    stats = simulated._stats
    ready: list[FollowedPod] = []
    most_at_once = 0
    ends = anyio.CapacityLimiter(100)
    opened_s = anyio.current_time()
    async with simulated.opened():

        async def live() -> None:
            nonlocal most_at_once
            followed = await simulated.come_up()
            assert stats.starts_in_flight <= stats.start_limit
            most_at_once = max(most_at_once, stats.start_limit)
            ready.append(followed)

        async def end(followed: FollowedPod) -> None:
            async with ends:  # one server has to make them all go away within the time that each may take
                await simulated.delete(followed)

        assert stats.start_limit == simulated.config.start_concurrency
        begun_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(SIMULATED):
                tasks.start_soon(live)
        up_s = anyio.current_time() - begun_s
        async with anyio.create_task_group() as tasks:
            for followed in ready:
                tasks.start_soon(end, followed)
        took_s = anyio.current_time() - begun_s
        open_s = anyio.current_time() - opened_s
    requests = simulated.api.requests
    logging.getLogger("test").info("%.1f s up, %.1f s in all, %d requests, %s", up_s, took_s, requests, stats)
    assert len(ready) == SIMULATED
    assert most_at_once > simulated.config.start_concurrency or stats.start_slowdowns
    # A server with too much to do has some of them sent again, with a look whether it did the first.
    assert requests - 2 * stats.api_repeats < 3 * SIMULATED, stats
    # One for pods and one for events; each lasts its time, and is then opened again. A busy server may end
    # one early that does not keep up.
    opened = stats.watches - stats.watch_failures
    assert opened <= 2 * (1 + open_s // simulated.config.watch_s) + 2, (open_s, stats)


@pytest.fixture
async def quota_namespace(simulated: SimulatedBackend) -> AsyncIterator[str]:
    """A namespace that takes five pods."""
    name = f"sandbox-k8s-quota-{os.urandom(3).hex()}"
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "five"}}
    quota["spec"] = {"hard": {"pods": "5"}}
    async with simulated.opened():
        ask = simulated.api.ask
        await ask(Request("POST", "api/v1/namespaces", body=made), "making a namespace")
        path = f"api/v1/namespaces/{name}/resourcequotas"
        await ask(Request("POST", path, body=quota), "making a quota")
        with anyio.fail_after(20):
            while not (await ask(Request("GET", f"{path}/five"), "reading it"))["status"].get("used"):
                await anyio.lowlevel.checkpoint()  # each question takes long enough
    yield name
    async with simulated.opened():
        await simulated.api.ask(Request("DELETE", f"api/v1/namespaces/{name}"), "deleting a namespace")


async def test_starts_slow_down_and_wait_when_a_quota_is_used_up(
    simulated: SimulatedBackend, quota_namespace: str
) -> None:
    config = msgspec.structs.replace(simulated.config, namespace=quota_namespace)
    stats = ClientStats()
    backend = SimulatedBackend(config, SystemClock(), stats)
    alive, most = 0, 0
    async with backend.opened():

        async def live() -> None:
            nonlocal alive, most
            followed = await backend.come_up()
            alive, most = alive + 1, max(most, alive + 1)
            if most == 5:
                full.set()
            await full.wait()
            await backend.delete(followed)
            alive -= 1

        full = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(live)
    assert (alive, most) == (0, 5)
    assert stats.start_slowdowns >= 1


async def test_a_quota_that_stays_used_up_is_given_up(
    simulated: SimulatedBackend, quota_namespace: str
) -> None:
    config = msgspec.structs.replace(simulated.config, namespace=quota_namespace, failing_timeout_s=1.0)
    backend = SimulatedBackend(config, SystemClock(), ClientStats())
    async with backend.opened():
        ready = [await backend.come_up() for _ in range(5)]
        with pytest.raises(ClusterError, match="exceeded quota") as refused:
            await backend.come_up()
        for followed in ready:
            await backend.delete(followed)
    assert refused.value.diagnosis is not None
    assert refused.value.diagnosis.failure == "quota_exceeded"


@pytest.mark.parametrize(
    ("fault", "failure", "retryable"),
    [
        ("image", "image_pull_failed", True),
        ("oom", "oom_at_start", False),
        ("evicted", "evicted_node_pressure", True),
        ("crash", "process_crashed", True),
        ("slow", "start_timeout", True),
    ],
)
async def test_a_start_with_a_fault_fails_with_its_class(
    simulated: SimulatedBackend, fault: str, failure: str, retryable: bool
) -> None:
    clock, stats = SystemClock(), ClientStats()
    config = msgspec.structs.replace(simulated.config, failing_timeout_s=1.0, start_timeout_s=6.0)
    async with SandboxClient(SimulatedBackend(config, clock, stats), clock, stats) as client:
        with pytest.raises(SandboxStartError) as failed:
            await client.start(SandboxSpec(labels={FAULT: fault}))
    found = failed.value.diagnosis
    assert found is not None
    assert (found.failure, failed.value.retryable) == (failure, retryable), failed.value
