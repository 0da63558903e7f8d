"""What only pods have, on the fake and on a real cluster: owners in annotations, ways there, failures."""

import base64
import json
import signal
import time
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import (
    AccessError,
    ClientConfig,
    ClusterError,
    ConfigError,
    FencedError,
    PodPlace,
    SandboxClient,
    SandboxHandle,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxSpec,
    SandboxStartError,
)
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import ConflictError, PodMissingError, Request, refusal
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import DataPath, KubernetesConfig
from sandbox_k8s.testing import FaultProxy, Faults
from sandbox_k8s.testing.fault_proxy import Upstream

PODS = ["fake", pytest.param("kubernetes", marks=pytest.mark.cluster)]
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("place", PODS, indirect=True)]


def backend_of(client: SandboxClient) -> KubernetesBackend:
    backend = client._backend
    assert isinstance(backend, KubernetesBackend)
    return backend


def place_of(handle: SandboxHandle) -> PodPlace:
    assert isinstance(handle.place, PodPlace)
    return handle.place


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return config


@pytest.mark.parametrize("path", ["pod_ip", "api_proxy", "port_forward"])
async def test_every_way_to_the_launcher_carries_everything(
    cluster: KubernetesConfig, path: DataPath
) -> None:
    """kubernetes-client/python#1866: too much at once; tomplus/kubernetes_asyncio#226: no port-forward."""
    config = msgspec.structs.replace(cluster, data_path=path)
    data = bytes(range(256)) * 5000
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()
        await sandbox.write("blob", data)
        assert await sandbox.read("blob") == data
        session = await sandbox.session()
        assert (await session.run("sleep 60", timeout_s=0.2)).timed_out
        assert (await session.run("wc -c < blob; exit 3")).exit_code == 3
        assert getattr(client.stats, path) == 1


@pytest.mark.parametrize("kind", ["init_copy", "image_volume"])
async def test_the_launcher_comes_into_an_image_that_knows_nothing_of_it(
    cluster: KubernetesConfig, kind: str
) -> None:
    """google/tunix#2073, open-telemetry/opentelemetry-operator#3332: no server there, or for another libc."""
    injection = msgspec.structs.replace(cluster.injection, kind=kind)
    async with SandboxClient.kubernetes(msgspec.structs.replace(cluster, injection=injection)) as client:
        sandbox = await client.start(SandboxSpec(env={"GIVEN": "a b"}))
        shown = await sandbox.execute("echo $GIVEN $LD_LIBRARY_PATH; pwd; grep NoNewPrivs /proc/1/status")
        assert shown.stdout == b"a b\n/workspace\nNoNewPrivs:\t1\n"


async def test_a_sandbox_costs_two_requests_and_all_share_two_watches(client: SandboxClient) -> None:
    """opensandbox-group/OpenSandbox#969: what was watched got ready 26 s after the pod."""
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(client.start)
    for owned in client._owned:
        await owned.sandbox.stop()
    assert (client.stats.watches, client.stats.lists) == (2, 2)
    assert backend_of(client).api.requests == 2 * 3 + 2


async def test_an_image_that_is_not_there_is_named_within_seconds(client: SandboxClient) -> None:
    """METR/vivaria#657: pods that could not pull held nodes and GPUs. Here they fail, and are deleted."""
    begun = time.monotonic()
    with pytest.raises(SandboxStartError, match="image_name_invalid") as failed:
        await client.start(SandboxSpec(image="localhost/No Such"))
    assert time.monotonic() - begun < 15
    assert (failed.value.fault, failed.value.retryable) == ("image", False)
    assert failed.value.diagnosis is not None
    assert "couldn't parse image name" in failed.value.evidence
    assert [info.state for info in await client.list()] in ([], ["dead"])


async def test_a_refusal_is_a_start_error_with_its_class(client: SandboxClient) -> None:
    with pytest.raises(SandboxStartError, match="spec_invalid") as failed:
        await client.start(SandboxSpec(env={"A B\x01": "no name for a variable"}, image="x" * 70_000))
    assert failed.value.retryable is False
    assert await client.list() == ()


async def test_a_pod_that_finds_no_room_is_given_up_in_time(cluster: KubernetesConfig) -> None:
    config = msgspec.structs.replace(cluster, failing_timeout_s=0.3)
    async with SandboxClient.kubernetes(config) as client:
        with pytest.raises(SandboxStartError, match="unschedulable_resources") as failed:
            await client.start(SandboxSpec(cpu=900.0))
    assert (failed.value.fault, failed.value.retryable) == ("infra", True)


async def test_a_launcher_that_dies_at_once_is_not_waited_for(
    cluster: KubernetesConfig, place: str, request: pytest.FixtureRequest
) -> None:
    """Its pod was ready for a moment, so only the pod's later signs tell."""
    if place == "fake":  # limits no memory, and so tells what was recorded
        request.getfixturevalue("fake").doom("oom-at-start")
    config = msgspec.structs.replace(cluster, memory_bytes=9 << 20)
    begun = time.monotonic()
    async with SandboxClient.kubernetes(config) as client:
        with pytest.raises(SandboxStartError, match="oom_at_start|start_failed") as failed:  # noqa: RUF043
            await client.start()
    assert time.monotonic() - begun < 15
    assert failed.value.diagnosis is not None


class KnownIds(SystemClock):
    """The first id is known beforehand, and with it the pod's name."""

    def __init__(self) -> None:
        self.first = super().new_id()
        self._ids = iter([self.first])

    def new_id(self) -> str:
        return next(self._ids, None) or super().new_id()


STAGES = ["asked", "created", "placed", "running"]


def stage_of(pod: dict[str, Any] | None) -> str:
    if pod is None:
        return "asked"
    if pod["status"]["phase"] == "Running":
        return "running"
    return "placed" if "nodeName" in pod["spec"] else "created"


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelling_a_start_at_any_stage_leaves_no_pod(cluster: KubernetesConfig, stage: str) -> None:
    clock = KnownIds()
    async with SandboxClient.kubernetes(cluster, clock=clock) as client:
        followed = backend_of(client).watch.follow(f"sbx-{clock.first[:16]}")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.start)
            await anyio.lowlevel.checkpoint()
            while STAGES.index(stage_of(followed.pod)) < STAGES.index(stage):
                await followed.changed.wait()
            tasks.cancel_scope.cancel()
        assert client.stats.started == 0
        assert {info.state for info in await client.list()} <= {"dead"}


async def test_a_create_whose_answer_was_lost_is_adopted_and_never_doubled(client: SandboxClient) -> None:
    """allenai/open-instruct#1887: a gateway cut a create off, and an orphan stayed."""
    backend = backend_of(client)
    pod = backend._manifest(SandboxSpec(), "0123456789abcdef", "a" * 32)
    first = await backend.api.create(pod, records.REQUEST)
    posts: list[str] = []

    async def lose_the_first_answer(request: Any, what: str) -> dict[str, Any]:
        if request.method == "POST" and not posts:
            posts.append(what)
            raise refusal(what, 0, "ReadTimeoutError: cut")
        return await once(request, what)

    once = backend.api._once
    backend.api._once = lose_the_first_answer  # type: ignore[method-assign]
    again = await backend.api.create(pod, records.REQUEST)
    assert again["metadata"]["uid"] == first["metadata"]["uid"]
    # The same name from another request is another sandbox's.
    other = backend._manifest(SandboxSpec(), "0123456789abcdef", "b" * 32)
    posts.clear()
    with pytest.raises(ClusterError, match="name_taken"):
        await backend.api.create(other, records.REQUEST)
    await backend.api.delete(first["metadata"]["name"], uid=first["metadata"]["uid"])


@pytest.mark.timeout(180)
async def test_every_kind_of_fault_on_the_wire_costs_no_sandbox(
    cluster: KubernetesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a proxy in front of either kind of cluster; `config` looks for what is left behind its back."""
    monkeypatch.setattr("sandbox_k8s.kubernetes.streams._SILENCE_S", 0.5)
    access = ApiAccess(cluster)
    upstream = Upstream(access.base_url.rstrip("/"), access.options()["headers"], access.tls)
    faults = Faults(
        seed=8, too_many_requests=0.08, server_error=0.08, reset=0.08, lost_answer=0.1, cut_watch=0.1,
        stalled_watch=0.1, half_open_watch=0.05, doubled_event=0.3, late_event=0.1, retry_after_s=0,
        stall_s=0.3,
    )  # fmt: skip
    with FaultProxy(upstream, faults) as proxy:
        config = msgspec.structs.replace(cluster, kubeconfig=proxy.kubeconfig, watch_s=1.0, cpu=0.1)
        async with SandboxClient.kubernetes(config) as client:

            async def live() -> None:
                async with await client.start() as sandbox:
                    taken = await client.attach(sandbox.handle)
                    assert (await taken.execute("echo out")).stdout == b"out\n"
                    await taken.stop()

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(live)
        stats = client.stats
        assert (stats.started, stats.stopped, stats.stop_failures) == (3, 3, 0)
        assert len(proxy.counts) >= 6, proxy.counts


async def test_conditions_of_changes_and_deletes_hold(client: SandboxClient) -> None:
    sandbox = await client.start()
    api, place = backend_of(client).api, place_of(sandbox.handle)
    old = await api.get(place.pod)
    await api.annotate(place.pod, {"sandbox-k8s/probe": "1"}, old["metadata"]["resourceVersion"])
    with pytest.raises(ConflictError):
        await api.annotate(place.pod, {"sandbox-k8s/probe": "2"}, old["metadata"]["resourceVersion"])
    with pytest.raises(ConflictError):
        await api.delete(place.pod, uid=place.uid, resource_version=old["metadata"]["resourceVersion"])
    with pytest.raises(ConflictError):
        await api.delete(place.pod, uid="0" * 8 + place.uid[8:])
    with pytest.raises(PodMissingError):
        await api.get("sbx-0000000000000000")


@pytest.mark.original("A-k8s-handle")
async def test_two_workers_attach_at_once_and_one_owns(make_client) -> None:
    async with make_client() as first, make_client() as second, make_client() as third:
        handle = await (await first.start()).detach()
        won: list[int] = []
        lost: list[str] = []

        async def attach(client: SandboxClient) -> None:
            try:
                won.append((await client.attach(handle)).handle.epoch)
            except FencedError as problem:
                lost.append(str(problem))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attach, second)
            tasks.start_soon(attach, third)
        assert len(won) + len(lost) == 2
        assert won
        owners = [owned.sandbox for client in (second, third) for owned in client._owned]
        works = 0
        for owner in owners:
            try:
                works += (await owner.execute("echo mine")).stdout == b"mine\n"
            except FencedError:
                continue
        assert works == 1


@pytest.mark.original("A-k8s-secret")
async def test_neither_the_pod_nor_the_handle_tells_the_token(client: SandboxClient) -> None:
    sandbox = await client.start()
    backend = backend_of(client)
    token = backend.token(place_of(sandbox.handle).pod)
    shown = json.dumps(await backend.api.get(place_of(sandbox.handle).pod))
    inside = (await sandbox.execute("cat /proc/1/cmdline; cat /proc/*/environ; env")).stdout.decode()
    key = backend.config.resolved_run_key_file().read_bytes()
    for text in (shown, inside, sandbox.handle.to_json().decode(), repr(backend.key)):
        assert token not in text
        assert base64.b64encode(token.encode()).decode() not in text
        assert key.hex() not in text


async def test_handles_that_lead_nowhere(client: SandboxClient) -> None:
    """kubernetes-sigs/agent-sandbox#149: a pod was looked for by a guessed name. Here the uid counts."""
    sandbox = await client.start()
    handle = SandboxHandle.from_json(sandbox.handle.to_json())
    replace = msgspec.structs.replace
    with pytest.raises(ConfigError, match=r"KubernetesConfig\.cluster"):
        await client.attach(replace(handle, place=replace(place_of(handle), cluster="elsewhere")))
    with pytest.raises(AccessError):
        await client.attach(replace(handle, key_id="0" * 16))
    with pytest.raises(SandboxNotFoundError, match="another one of that name"):
        await client.attach(replace(handle, place=replace(place_of(handle), uid="0")))
    await sandbox.stop()
    with pytest.raises(SandboxNotFoundError, match="no pod"):
        await client.attach(handle)


async def test_a_command_whose_pod_is_deleted_says_so(client: SandboxClient) -> None:
    """allenai/open-instruct#1887: a lost pod must not look like a failed task."""
    sandbox = await client.start()
    place = place_of(sandbox.handle)
    async with anyio.create_task_group() as tasks:

        async def delete() -> None:
            await sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
            await backend_of(client).api.delete(place.pod, uid=place.uid)

        tasks.start_soon(delete)
        with pytest.raises(SandboxLostError, match="deleted") as lost:
            await sandbox.execute("touch begun; sleep 600")
    assert lost.value.diagnosis is not None
    assert (lost.value.diagnosis.failure, lost.value.fault) == ("deleted", "infra")


@pytest.mark.slow
async def test_when_no_way_leads_to_the_pods_address_the_next_one_is_taken(
    cluster: KubernetesConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with SandboxClient.kubernetes(cluster) as client:
        sandbox = await client.start()
        backend, place = backend_of(client), place_of(sandbox.handle)
        backend._paths.chosen = None
        pod = await backend.api.get(place.pod)
        pod["status"]["podIP"] = "192.0.2.1"  # for documentation: nobody has it
        launcher = await backend._connect(place.pod, pod, None)
        assert (await launcher.info())["epoch"] == 1
        await launcher.close()
        assert (backend._paths.chosen, client.stats.api_proxy) == ("api_proxy", 1)
    assert "pod_ip" in caplog.text


START = """
import sys, anyio, msgspec
from sandbox_k8s import *
from sandbox_k8s.kubernetes.config import KubernetesConfig
async def main():
    config = msgspec.json.decode(sys.argv[1], type=KubernetesConfig, dec_hook=lambda kind, value: kind(value))
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start(SandboxSpec(lease_s=1.0))
        print(sandbox.id, flush=True)
        await sandbox.execute("sleep 600 & sleep 600")
anyio.run(main)
"""


async def test_kill_9_of_the_worker_ends_the_pod_within_its_lease_and_one_sweep_removes_it(
    cluster: KubernetesConfig, script, make_client
) -> None:
    """The trainer is killed before it can clean up.

    NovaSky-AI/SkyRL#1194, google/tunix#2312, kubernetes-sigs/agent-sandbox#1420: its sandboxes stayed.
    """
    process = script(START, msgspec.json.encode(cluster, enc_hook=str).decode())
    sandbox_id = (await anyio.to_thread.run_sync(process.stdout.readline)).strip()
    process.send_signal(signal.SIGKILL)
    async with make_client() as client:
        assert [one.handle.sandbox_id for one in await client.list()] == [sandbox_id]
        followed = backend_of(client).watch.follow(f"sbx-{sandbox_id}")
        with anyio.fail_after(8):
            while followed.pod is None or not records.has_ended(followed.pod):
                await followed.changed.wait()
            assert [one.why for one in await client.reap(dry_run=True)] == ["its launcher ended"]
            assert [one.sandbox_id for one in await client.reap()] == [sandbox_id]
        while not followed.gone:
            await followed.changed.wait()


async def test_a_pod_that_nobody_renewed_is_reaped_and_a_renewed_one_is_not(
    cluster: KubernetesConfig, client: SandboxClient
) -> None:
    sandbox = await client.start()
    api, place = backend_of(client).api, place_of(sandbox.handle)
    assert await client.reap() == ()
    pod = await api.get(place.pod)
    await api.annotate(place.pod, {records.EXPIRES: "1"}, pod["metadata"]["resourceVersion"])
    reaped = await client.reap(dry_run=True)
    assert "nobody renewed it" in reaped[0].why
    backend_of(client)._owners._expires_ns[sandbox.id] = 1
    await backend_of(client).renewed(sandbox.handle)
    assert await client.reap() == ()


async def test_a_pod_whose_labels_were_changed_is_not_taken_for_dead(client: SandboxClient) -> None:
    sandbox = await client.start()
    backend, place = backend_of(client), place_of(sandbox.handle)
    followed = backend.watch.follow(place.pod)
    changed = followed.changed
    answer = await relabel(backend, place.pod, "elsewhere")
    with anyio.fail_after(5):
        while followed.pod is None or followed.pod["metadata"]["labels"][records.RUN] != "elsewhere":
            await changed.wait()
            changed = followed.changed
    assert not followed.gone
    assert (await sandbox.execute("echo alive")).stdout == b"alive\n"
    await relabel(backend, place.pod, backend.config.run)
    assert answer["metadata"]["uid"] == place.uid


async def relabel(backend: KubernetesBackend, pod: str, run: str) -> dict[str, Any]:
    body = {"metadata": {"labels": {records.RUN: run}}}
    path = f"api/v1/namespaces/{backend.config.namespace}/pods/{pod}"
    request = Request("PATCH", path, body=body, content_type="application/merge-patch+json")
    return await backend.api._once(request, "relabelling")
