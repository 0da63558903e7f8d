"""Pods, configurations and answers that no test of the straight way meets."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sandbox_k8s import ConfigError, SandboxClient, SandboxLostError, SandboxSpec, SandboxStartError
from sandbox_k8s.kubernetes import classify
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.gate import StartGate
from sandbox_k8s.kubernetes.records import PREFETCH, has_ended
from sandbox_k8s.routes import AddressRoute
from sandbox_k8s.stats import ClientStats
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods
from sandbox_k8s.transport import LauncherClient

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
pytestmark = pytest.mark.anyio


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(FakeClusterConfig(speed=50)) as cluster:
        yield cluster


def config_of(cluster: FakeCluster, tmp_path: Path, **more: Any) -> KubernetesConfig:
    return KubernetesConfig(
        **{"injection": Injection(kind="baked"), "data_path": "api_proxy", **more},
        kubeconfig=cluster.kubeconfig,
        run_key_file=tmp_path / "run.key",
        image="example.com/any:1",
    )


@pytest.mark.skipif(bool(why_no_process_pods()), reason=why_no_process_pods())
async def test_variables_reach_commands_as_they_were_given(tmp_path: Path) -> None:
    """Kubernetes replaces $(NAME) in a pod's variables, and makes one dollar of two."""
    given = {"A": "secret", "B": "x$(A)y", "C": "a$$b", "D": "$", "LD_LIBRARY_PATH": "/$(A)/$$"}
    with FakeCluster(FakeClusterConfig(pods="process", speed=20)) as cluster:
        config = config_of(cluster, tmp_path, injection=Injection(kind="image_volume", image="tools:1"))
        async with SandboxClient.kubernetes(config) as client:
            sandbox = await client.start(SandboxSpec(env=given))
            for name, value in given.items():
                assert (await sandbox.execute(["printenv", name])).stdout == f"{value}\n".encode()


def pod(*containers: dict[str, Any], **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "labels": labels},
        "status": {"phase": "Running", "containerStatuses": list(containers)},
    }


def test_only_the_launchers_own_container_ends_a_sandbox() -> None:
    """An injected sidecar that ended, or one image of a prefetch that is there, made a reaper come."""
    over, alive = {"state": {"terminated": {"exitCode": 0}}}, {"state": {"running": {}}}
    assert not has_ended(pod({"name": "istio-init", **over}, {"name": "sandbox", **alive}))
    assert has_ended(pod({"name": "sidecar", **alive}, {"name": "sandbox", **over}))
    assert not has_ended(pod({"name": "image-0", **over}, {"name": "image-1", **alive}, **{PREFETCH: "1"}))


@pytest.mark.parametrize(
    ("kind", "image", "said", "refused"),
    [
        ("image_volume", "tools:1", 'failed to pull image "tools:1": not found', False),
        ("image_volume", "tools:1", 'failed to pull image "example.com/any:1": not found', True),
        ("baked", None, 'failed to pull image "example.com/any:1": not found', True),
    ],
)
async def test_a_missing_tools_image_does_not_bar_the_sandboxes_images(
    cluster: FakeCluster, tmp_path: Path, kind: Any, image: str | None, said: str, refused: bool
) -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": said}}
    found = classify(pod({"name": "sandbox", "image": "example.com/any:1", "state": waiting}))
    assert found.failure == "image_not_found"
    injection = Injection(kind=kind, image=image)
    gate = StartGate(config_of(cluster, tmp_path, injection=injection, image_failures=1), ClientStats())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.run)
        for attempt in range(2):
            with pytest.raises(
                SandboxStartError, match="not tried again" if refused and attempt else "missing"
            ):
                async with gate.turn("example.com/any:1"):
                    raise SandboxStartError("missing", diagnosis=found)
        tasks.cancel_scope.cancel()


async def test_when_no_way_leads_to_launchers_starts_do_not_wait_for_each_other(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_k8s.kubernetes.paths._TRY_S", 0.1)
    config = config_of(cluster, tmp_path, data_path=None)
    cluster.forbid("get", "pods/proxy")
    cluster.forbid("create", "pods/proxy")
    async with SandboxClient.kubernetes(config) as client:
        failed = await client.start_many([SandboxSpec()] * 6)
    said = [str(one) for one in failed]
    assert sum("while it waited no way led to the launchers of 2 others" in one for one in said) == 4, said


def test_certificates_and_files_that_are_none_are_named(cluster: FakeCluster, tmp_path: Path) -> None:
    server = {"server": "https://127.0.0.1:1", "certificate-authority-data": "aGVsbG8="}
    known = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    broken = tmp_path / "broken"
    for text, match in (
        (json.dumps(known), "certificates of .*broken cannot be used"),
        ("a: [b\n", "broken (cannot be used|is no kubeconfig)"),
        ("just text", "broken (cannot be used|is no kubeconfig)"),
    ):
        broken.write_text(text)
        with pytest.raises(ConfigError, match=match):
            ApiAccess(KubernetesConfig(injection=Injection(kind="baked"), kubeconfig=broken))


async def test_a_redirect_does_not_carry_the_key_elsewhere() -> None:
    seen: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("X-API-Key", ""))
        return web.json_response({})

    stranger = web.Application()
    stranger.router.add_route("*", "/{path:.*}", elsewhere)
    async with TestServer(stranger) as other:

        async def redirect(_: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(str(other.make_url("/taken")))

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", redirect)
        async with TestServer(app) as server:
            assert server.port is not None
            client = LauncherClient(
                AddressRoute("127.0.0.1", server.port), "key", 1, margin_s=5.0, where="a sandbox"
            )
            with pytest.raises(SandboxLostError, match="307"):
                await client.call("/sbx/info", {})
            await client.close()
    assert seen == []


async def test_asyncios_own_time_out_leaves_no_pod_of_a_create_under_way(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for` cancels through anyio's shields, and the pod came after nobody had found it."""
    asked, go_on = threading.Event(), threading.Event()
    send = Request.send

    def held_up(self: Request, *arguments: Any) -> Any:
        if self.method == "POST":
            asked.set()
            go_on.wait(10)
        return send(self, *arguments)

    monkeypatch.setattr(Request, "send", held_up)
    async with SandboxClient.kubernetes(config_of(cluster, tmp_path)) as client:
        start = asyncio.create_task(client.start())
        await anyio.to_thread.run_sync(asked.wait)
        start.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert [one for one in cluster.pods() if "deletionTimestamp" not in one["metadata"]] == []


async def test_a_start_under_way_in_another_task_ends_with_its_client(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.doom("unschedulable-cpu")
    client = SandboxClient.kubernetes(config_of(cluster, tmp_path))
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            with pytest.raises(ConfigError, match="closed while this sandbox was starting"):
                await client.start()

        async with client:
            tasks.start_soon(start)
            with anyio.fail_after(10):
                while not cluster.pods():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
    assert [one for one in cluster.pods() if "deletionTimestamp" not in one["metadata"]] == []
