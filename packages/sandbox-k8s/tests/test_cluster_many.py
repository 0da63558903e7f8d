"""Many sandboxes at once, and sandboxes that run out of memory, in pods of a real cluster."""

import json
import sys
from collections.abc import Callable
from typing import Any

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
    SandboxSpec,
)
from sandbox_k8s.kubernetes import Diagnosis, classify
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.kubernetes.watch import FollowedPod

MANY = 50

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.timeout(180),
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
]


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return config


def backend_of(client: SandboxClient) -> KubernetesBackend:
    backend = client._backend
    assert isinstance(backend, KubernetesBackend)
    return backend


async def until(followed: FollowedPod, holds: Callable[[Diagnosis], bool], within_s: float) -> Diagnosis:
    """Follow a pod until something holds of its diagnosis."""
    with anyio.fail_after(within_s):
        while True:
            changed = followed.changed
            found = classify(followed.pod or {"metadata": {}}, followed.events, deleted=followed.gone)
            if holds(found):
                return found
            await changed.wait()


async def test_fifty_at_once_run_and_are_gone_for_two_requests_each(cluster: KubernetesConfig) -> None:
    # One watch of each kind outlives the test. The node of a test has two processors for all of them.
    config = msgspec.structs.replace(
        cluster, cpu=0.03, memory_bytes=64 << 20, watch_s=170.0, stop_timeout_s=90.0
    )
    said: dict[str, bytes] = {}
    async with SandboxClient.kubernetes(config) as client:

        async def use(number: int) -> None:
            async with await client.start() as sandbox:
                result = await sandbox.execute(f"echo {number} > mine; cat mine; echo {sandbox.id}")
                assert result.exit_code == 0
                said[sandbox.id] = result.stdout

        async with anyio.create_task_group() as tasks:
            for number in range(MANY):
                tasks.start_soon(use, number)
        requests = backend_of(client).api.requests
        assert await client.list() == ()
        stats = client.stats
    sys.stdout.write(f"{MANY} sandboxes: {requests} requests, {stats.watches} watches, {stats.lists} lists\n")
    assert sorted(int(one.split()[0]) for one in said.values()) == list(range(MANY))
    assert all(said[one].split()[1].decode() == one for one in said)
    assert (stats.started, stats.stopped, stats.stop_failures) == (MANY, MANY, 0)
    assert (stats.watches, stats.lists) == (2, 2)
    # A create and a delete; now and then a pod changes under its delete, which is then made anew.
    assert requests < 3 * MANY


async def test_a_child_out_of_memory_is_told_by_its_command_alone(cluster: KubernetesConfig) -> None:
    """No status of the pod ever shows it; where the whole group is killed, the pod does."""
    config = msgspec.structs.replace(cluster, memory_bytes=64 << 20)
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()
        before = await sandbox.info()
        # `tail` keeps a line without end in memory.
        words = "head -c 300M /dev/zero | tail -n 1 | wc -c; exit ${PIPESTATUS[1]}"
        result = await end_of(sandbox, words)
        if isinstance(result, SandboxLostError):  # cgroup v2 with memory.oom.group
            assert result.diagnosis is not None
            assert result.diagnosis.failure == "oom_at_run"
            return
        assert (result.exit_code, result.infra_failed, result.timed_out) == (137, False, False)
        assert (await sandbox.execute("echo alive")).stdout == b"alive\n"
        assert (await sandbox.info())["pid"] == before["pid"]
        pod = await backend_of(client).api.get(place_of(sandbox).pod)
        assert classify(pod).state == "ready"
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


async def test_the_launcher_out_of_memory_is_the_tasks_fault_and_no_result(cluster: KubernetesConfig) -> None:
    """What commands write to /dev/shm counts, and nothing can take it back: the largest process is killed."""
    config = msgspec.structs.replace(cluster, memory_bytes=56 << 20)
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()
        await sandbox.execute("sleep 3.5")  # what dies younger, in whole seconds, did so at its start
        for number in range(20):
            words = f"dd if=/dev/zero of=/dev/shm/{number} bs=1M count=50; sleep 0.2"
            end = await end_of(sandbox, words)
            if isinstance(end, SandboxLostError):
                break
            assert not end.infra_failed
        assert isinstance(end, SandboxLostError)
        assert end.diagnosis is not None
        assert (end.diagnosis.failure, end.diagnosis.guess) == ("oom_at_run", False)
        assert (end.fault, end.retryable) == ("task", False)


async def end_of(sandbox: Sandbox, command: str) -> CommandResult | SandboxLostError:
    try:
        return await sandbox.execute(command)
    except SandboxLostError as lost:
        return lost


def place_of(sandbox: Sandbox) -> PodPlace:
    assert isinstance(sandbox.handle.place, PodPlace)
    return sandbox.handle.place


async def test_a_container_that_restarts_is_never_called_ready_again(client: SandboxClient) -> None:
    """Its Ready flaps: it is True again within a tenth of a second after the restart."""
    backend = backend_of(client)
    pod: dict[str, Any] = json.loads(
        json.dumps(backend._manifest(SandboxSpec(), "0123456789abcdef", "a" * 32))
    )
    pod["spec"] |= {"restartPolicy": "Always", "activeDeadlineSeconds": 60}
    container = pod["spec"]["containers"][0]
    container["command"] = ["sh", "-c", "sleep 1.5; exit 3"]
    followed = backend.watch.follow(pod["metadata"]["name"])
    path = f"api/v1/namespaces/{backend.config.namespace}/pods"
    followed.created(await backend.api._once(Request("POST", path, body=pod), "creating"))
    seen: list[tuple[str, int]] = []
    try:
        await until(followed, lambda one: one.state == "ready", 30)

        def again(found: Diagnosis) -> bool:
            statuses = (followed.pod or {})["status"]["containerStatuses"]
            seen.append((found.failure or found.state, statuses[0]["restartCount"]))
            return statuses[0]["restartCount"] > 0 and statuses[0]["ready"]

        found = await until(followed, again, 30)
    finally:
        uid = (followed.pod or {})["metadata"]["uid"]
        await backend.api.delete(followed.name, uid=uid, grace_s=0)
    assert (found.state, found.failure) == ("failed", "process_crashed")
    assert "restart 1" in found.why
    first = next(number for number, (word, _) in enumerate(seen) if word == "process_crashed")
    assert {word for word, _ in seen[first:]} == {"process_crashed"}
