"""What went wrong for others, as their public reports tell it, and must not here (see docs/reports.md)."""

import ast
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import msgspec
import pytest
from aiohttp import web
from sandbox_k8s import (
    BackendUnavailableError,
    ClientConfig,
    ClientStats,
    Injection,
    LocalConfig,
    PodPlace,
    Sandbox,
    SandboxClient,
    SandboxLostError,
    SandboxNotFoundError,
)
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.kubernetes.forward import PortForwards
from sandbox_k8s.kubernetes.listing import Listing
from sandbox_k8s.kubernetes.paths import DataPaths, ProxyRoute
from sandbox_k8s.kubernetes.streams import ApiStreams
from sandbox_k8s.routes import AddressRoute, UnixRoute
from sandbox_k8s.run_key import RunKey
from sandbox_k8s.testing import FakeCluster
from sandbox_k8s.testing.kubeconfig import kubeconfig
from sandbox_k8s.transport import LauncherClient

from .virtual_network import quiet
from .virtual_time import run
from .virtual_workers import World

pytestmark = pytest.mark.anyio
in_a_process = pytest.mark.parametrize("place", ["process"], indirect=True)
in_a_fake_pod = pytest.mark.parametrize("place", ["fake"], indirect=True)
in_a_pod = pytest.mark.parametrize(
    "place", ["fake", pytest.param("kubernetes", marks=pytest.mark.cluster)], indirect=True
)


def backend_of(client: SandboxClient) -> KubernetesBackend:
    backend = client._backend
    assert isinstance(backend, KubernetesBackend)
    return backend


def pod_of(sandbox: Sandbox) -> PodPlace:
    assert isinstance(sandbox.handle.place, PodPlace)
    return sandbox.handle.place


@pytest.fixture
def pods(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return config


@in_a_process
async def test_no_call_is_under_the_http_librarys_own_time_limit(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SWE-agent/SWE-ReX#245, #248, #268, #290: after 300 s the client gave up, and the command ran on."""
    monkeypatch.setattr(sandbox.launcher._http, "_timeout", aiohttp.ClientTimeout(total=0.15))
    session = await sandbox.session()
    for timeout_s in (None, 5.0):
        assert (await sandbox.execute("sleep 0.3; echo whole", timeout_s=timeout_s)).stdout == b"whole\n"
    assert (await session.run("sleep 0.3; echo whole")).stdout == b"whole\n"


@in_a_process
async def test_silence_in_the_middle_of_a_command_ends_the_call(
    config: ClientConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubernetes-client/python#1132, kubernetes/kubernetes#67457: a call that never returned."""
    monkeypatch.setattr("sandbox_k8s.launcher.execute.OVERRUN_S", 0.1)  # what killing may take
    assert isinstance(config, LocalConfig)
    async with SandboxClient.local(msgspec.structs.replace(config, answer_margin_s=0.1)) as client:
        sandbox = await client.start()
        launcher: int = (await sandbox.info())["pid"]
        os.kill(launcher, signal.SIGSTOP)
        with anyio.fail_after(5), pytest.raises(SandboxLostError, match="did not answer within"):
            await sandbox.execute("true", timeout_s=0.1)
        os.kill(launcher, signal.SIGCONT)
        assert (await sandbox.execute("echo again")).stdout == b"again\n"


@in_a_process
async def test_a_command_that_was_cut_off_is_not_sent_again(client: SandboxClient, tmp_path: Path) -> None:
    """UKGovernmentBEIS/inspect_k8s_sandbox#39: what it had done already must not be done twice."""
    sandbox = await client.start()
    log, launcher = tmp_path / "log", (await sandbox.info())["pid"]
    with pytest.raises(SandboxLostError):
        await sandbox.execute(f"echo run >> {log}; kill -9 {launcher}; sleep 600")
    assert log.read_text() == "run\n"


@in_a_fake_pod
async def test_a_container_that_died_between_two_calls_is_named(
    pods: KubernetesConfig, fake: FakeCluster
) -> None:
    """UKGovernmentBEIS/inspect_k8s_sandbox#39: all that was said was ``handshake status 500``."""
    async with SandboxClient.kubernetes(pods) as client:
        sandbox = await client.start()
        fake.kill_pod(pod_of(sandbox).pod, "OOMKilled")
        with pytest.raises(SandboxLostError, match="OOMKilled") as lost:
            await sandbox.execute("true")
        assert lost.value.diagnosis is not None
        assert lost.value.diagnosis.failure in ("oom_at_start", "oom_at_run")
        with pytest.raises(SandboxNotFoundError, match="has ended"):
            await client.attach(sandbox.handle)


@in_a_pod
async def test_streams_and_requests_at_the_same_time_do_not_meet(pods: KubernetesConfig) -> None:
    """kubernetes-client/python#928, zenml-io/zenml#4926, marin-community/marin#5545.

    One client of the library for both: requests of other threads failed with ``Handshake status 200 OK``.
    """
    config = msgspec.structs.replace(pods, data_path="port_forward")
    answers: list[bytes] = []
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()

        async def command(number: int) -> None:
            answers.append((await sandbox.execute(f"echo {number}")).stdout)

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(command, number)
                tasks.start_soon(client.list)
        assert sorted(int(answer) for answer in answers) == list(range(12))
        assert client.stats.port_forward == 1


@in_a_fake_pod
async def test_a_dropped_port_forward_is_opened_again(
    pods: KubernetesConfig, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubernetes/kubectl#1169, #1368, #1490, #1525, kubernetes/kubernetes#19231: one drop ended them all."""
    monkeypatch.setattr("sandbox_k8s.kubernetes.starting._REPORT_S", 0.1)
    async with SandboxClient.kubernetes(msgspec.structs.replace(pods, data_path="port_forward")) as client:
        sandbox = await client.start()
        session = await sandbox.session()
        await session.run("X=kept")
        for _ in range(2):
            fake.restart_api_server()
            try:
                await session.run("true")
            except SandboxLostError:  # sent into the connection before its end was known
                assert (await session.run("echo $X")).stdout == b"kept\n"
        assert (await session.run("echo $X")).stdout == b"kept\n"


@in_a_pod
async def test_ways_that_a_runtime_does_not_have_are_all_named(
    pods: KubernetesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubernetes-sigs/agent-sandbox#158, #170, google/gvisor#3811, containerd/containerd#6638,
    kata-containers/kata-containers#10843: port-forward fails there. It is the last way, and all are named.
    """
    async with SandboxClient.kubernetes(pods) as client:
        sandbox = await client.start()
        monkeypatch.setattr("sandbox_k8s.kubernetes.paths._TRY_S", 0.1)
        assert (client.stats.pod_ip, client.stats.port_forward) == (1, 0)
        backend = backend_of(client)
        backend._paths.chosen = None
        backend._paths._config = msgspec.structs.replace(pods, runtime_class="gvisor")
        pod = await backend.api.get(pod_of(sandbox).pod)
        pod["metadata"]["name"], pod["status"]["podIP"] = "no-such-pod", "127.255.255.254"
        with pytest.raises(SandboxLostError, match="no way leads") as lost:
            await backend._connect("no-such-pod", pod, None)
        ways = [line.partition(":")[0] for line in lost.value.evidence.splitlines()]
        assert [way for way in ways if way in ("pod_ip", "api_proxy", "port_forward")] == [
            "pod_ip",
            "api_proxy",
            "port_forward",
        ]
        assert "runtime class 'gvisor' may have no port-forward" in lost.value.evidence
        assert "data_path='api_proxy' or 'pod_ip'" in lost.value.evidence


@in_a_fake_pod
async def test_a_pod_without_room_is_waited_for_and_not_created_again(
    pods: KubernetesConfig, fake: FakeCluster
) -> None:
    """kubernetes-sigs/agent-sandbox#1215, #1266, #1285: too many by stale knowledge; a loop without room."""
    before = fake.requests.get("POST pods", 0)
    async with SandboxClient.kubernetes(pods) as client:
        async with cordoned(fake), anyio.create_task_group() as tasks:
            tasks.start_soon(client.start)
            while not (following := list(backend_of(client).watch._followed.values())):
                await anyio.lowlevel.checkpoint()
            while condition_of(following[0].pod) != "Unschedulable":
                await following[0].changed.wait()
            fake.cordon(back=True)
        assert client.stats.started == fake.requests["POST pods"] - before == 1


@asynccontextmanager
async def cordoned(fake: FakeCluster) -> AsyncIterator[None]:
    fake.cordon()
    try:
        yield
    finally:
        fake.cordon(back=True)


def condition_of(pod: dict[str, Any] | None) -> str:
    if pod is None:
        return ""
    return next((one.get("reason", "") for one in pod["status"].get("conditions", [])), "")


@in_a_pod
async def test_one_failed_clean_up_does_not_spare_the_others(
    pods: KubernetesConfig, make_client: Callable[[], SandboxClient]
) -> None:
    """google/tunix#2312, OpenHands: the first 404 while closing left all that came after it running."""
    async with make_client() as other:
        async with make_client() as client:
            taken, gone, _ = [await client.start() for _ in range(3)]
            await backend_of(other).api.delete(pod_of(gone).pod, uid=pod_of(gone).uid)
            kept = await other.attach(taken.handle)
        left = [info.handle.sandbox_id for info in await other.list() if info.state == "running"]
        assert left == [taken.id]
        assert (await kept.execute("echo mine")).stdout == b"mine\n"


@in_a_pod
async def test_a_renewal_that_races_the_reaper_wins(client: SandboxClient) -> None:
    """opensandbox-group/OpenSandbox#1200: a renewal came between the look at the clock and the deletion."""
    sandbox = await client.start()
    backend, place = backend_of(client), pod_of(sandbox)
    pod = await backend.api.get(place.pod)
    await backend.api.annotate(place.pod, {records.EXPIRES: "1"}, pod["metadata"]["resourceVersion"])
    list_pods = backend.api.list

    async def list_and_be_late(selector: str) -> Listing:
        found = await list_pods(selector)
        backend._owners._expires_ns[sandbox.id] = 1
        await backend.renewed(sandbox.handle)
        return found

    backend.api.list = list_and_be_late  # type: ignore[method-assign]
    assert await client.reap() == ()
    backend.api.list = list_pods  # type: ignore[method-assign]
    assert (await sandbox.execute("echo here")).stdout == b"here\n"
    assert await client.reap() == ()


@in_a_fake_pod
async def test_a_stopped_sandbox_has_no_process_left(client: SandboxClient) -> None:
    """kubernetes/kubernetes#110507, #119276, #120449: a forced deletion forgets a container that runs on."""
    sandbox = await client.start()
    await (await sandbox.session()).run("(trap '' TERM HUP; sleep 600; sleep 600) & setsid sleep 600 &")
    assert f"--sandbox-id {sandbox.id}" in all_processes()
    await sandbox.stop()
    assert sandbox.id not in all_processes()


def all_processes() -> str:
    return subprocess.run(["ps", "-wweo", "args="], capture_output=True, text=True, check=True).stdout


async def test_nothing_limits_how_many_requests_are_under_way(tmp_path: Path) -> None:
    """huggingface/trl#5847: aiohttp's 100 connections were the limit of 512 rollouts.

    Here a server answers nobody until all have asked.
    """
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    many, asked, everybody = 110, 0, anyio.Event()

    async def hold(request: web.Request) -> web.Response:
        nonlocal asked, everybody
        asked, all_here = asked + 1, everybody
        if asked == many:
            asked, everybody = 0, anyio.Event()
            all_here.set()
        await all_here.wait()
        return web.Response(text="{}\n", content_type="application/json")

    async def at_once(ask: Callable[[], Awaitable[object]]) -> None:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(many):
                    tasks.start_soon(ask)

    async with serving(hold, tmp_path) as (port, socket):
        (tmp_path / "kubeconfig").write_text(kubeconfig(f"http://127.0.0.1:{port}", None))
        config = KubernetesConfig(injection=Injection(kind="baked"), kubeconfig=tmp_path / "kubeconfig")
        access = ApiAccess(config)
        streams = ApiStreams(access)
        paths = DataPaths(config, access, PortForwards(streams, "ns"), ClientStats())
        async with streams.opened(), paths.opened():
            proxy = ProxyRoute(access, "ns", "pod", 1, paths._shared)
            for route in (AddressRoute("127.0.0.1", port), UnixRoute(socket), proxy):
                launcher = LauncherClient(route, "token", 1, margin_s=30.0, where="here")
                await at_once(partial(launcher.call, "/sbx/lease", {}))
                await launcher.close()

            async def watch() -> None:
                assert [one async for one in streams.watch("/api/v1/pods", {}, 30.0)] == [{}]

            await at_once(watch)


@asynccontextmanager
async def serving(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], folder: Path
) -> AsyncIterator[tuple[int, Path]]:
    """A server on a port and on a unix socket that answers everything so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        tcp, unix = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024), folder / "s"
        await tcp.start()
        await web.UnixSite(runner, str(unix), backlog=1024).start()
        yield runner.addresses[0][1], unix
    finally:
        await runner.cleanup()


def test_readiness_is_seen_when_it_comes(tmp_path: Path) -> None:
    """opensandbox-group/OpenSandbox#969: what was watched got ready 26 s after the pod.

    Many at once, and an API server that is away for a while; in virtual time, with the real client.
    """
    late_s: list[float] = []

    async def life() -> None:
        async with anyio.create_task_group() as tasks:
            world = World(1, RunKey(tmp_path / "run.key"), tasks)
            worker, cluster = await world.worker(), world.cluster

            async def start(back_s: float) -> None:
                sandbox = await worker.start()
                ready_s = cluster.launchers[f"sbx-{sandbox.id}"].began_s
                late_s.append(cluster.now_s() - max(ready_s, back_s))

            for away_s in (0.0, 5.0):
                back_s = cluster.now_s() + 0.08 + away_s
                async with anyio.create_task_group() as starting:
                    for _ in range(16):
                        starting.start_soon(start, back_s)
                    await anyio.sleep(0.08)
                    cluster.break_api(away_s)
            await world.end()

    with quiet():
        run(life())
    assert len(late_s) == 32
    assert max(late_s[:16]) < 0.2, "three messages to the launcher"
    assert max(late_s) < 5.0, "and a pause between two tries to watch"


def test_credentials_of_a_service_account_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubernetes-client/python#2584, #2591, #2592: release 36.0.0 sent none from inside a cluster."""
    library = pytest.importorskip("kubernetes.config.incluster_config")
    certificates = pytest.importorskip("certifi").where()
    (tmp_path / "token").write_text("the-token")
    monkeypatch.setattr(library, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(library, "SERVICE_CERT_FILENAME", certificates)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    access = ApiAccess(KubernetesConfig(injection=Injection(kind="baked")))
    assert access.base_url == "https://192.0.2.1:443/"
    headers = {name.lower(): value for name, value in access.options()["headers"].items()}
    assert headers["authorization"].lower() == "bearer the-token"
    monkeypatch.setattr(pytest.importorskip("kubernetes").client.Configuration, "auth_settings", lambda _: {})
    with pytest.raises(BackendUnavailableError, match="sends none with its requests"):
        ApiAccess(KubernetesConfig(injection=Injection(kind="baked")))


PAGE = Path(__file__).parents[1] / "docs" / "reports.md"
ROW = re.compile(r"\| (?P<reports>[^|]*#[^|]*) \| [^|]+ \| `(?P<file>\w+\.py)::(?P<test>\w+)` \|")


def test_the_page_of_reports_names_tests_that_name_them() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "#" in line and line[0] == "|"]
    assert len(rows) > 40
    said: dict[str, dict[str, str]] = {}
    for line in rows:
        row = ROW.fullmatch(line)
        assert row is not None, line
        if row["file"] not in said:
            said[row["file"]] = docstrings(Path(__file__).parent / row["file"])
        text = said[row["file"]].get(row["test"])
        assert text is not None, line
        assert [word for word in re.split(r",\s+", row["reports"]) if word not in text] == [], line


def docstrings(file: Path) -> dict[str, str]:
    """Of a file's tests, by name."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, functions)}
