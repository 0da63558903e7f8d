"""A thousand sandboxes: what they ask of the API server, and what they do to the event loop."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
from aiohttp import web
from sandbox_k8s import Sandbox, SandboxClient, SandboxError, SandboxSpec
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.routes import AddressRoute
from sandbox_k8s.testing import FakeClusterConfig

from .figures import Figures, rounded, show
from .processes import MB, fake_cluster, free_port, settings


async def thousand(client: SandboxClient, count: int) -> Figures:
    """Start and stop them; the client's own figures."""
    # A full collection takes as long as there are objects of modules: this script's are not the client's.
    gc.collect()
    gc.freeze()
    before = len(gc.get_objects())
    begin, cpu = time.perf_counter(), time.process_time()
    started = await client.start_many([SandboxSpec() for _ in range(count)])
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    sandboxes = [one for one in started if isinstance(one, Sandbox)]
    problems = [one for one in started if isinstance(one, SandboxError)]
    assert problems == [], f"{len(problems)} of {count} did not start: {problems[0]}"
    stats = client.stats
    found: Figures = {
        "watches": stats.watches,
        "loop_stall_ms": stats.loop_stall_s * 1000,
        "loop_stall_cpu_ms": stats.loop_stall_cpu_s * 1000,
        "objects_per_sandbox": (len(gc.get_objects()) - before) / count,
        "starts_per_s": count / seconds,
        "cpu_ms_per_start": cpu / count * 1000,
    }
    async with anyio.create_task_group() as tasks:
        for sandbox in sandboxes:
            tasks.start_soon(sandbox.stop)
    return found


async def on_fake_cluster(folder: Path, count: int) -> Figures:
    with fake_cluster(FakeClusterConfig(pods="status", speed=10.0)) as cluster:
        config = settings(cluster.kubeconfig, folder, data_path="api_proxy")
        async with SandboxClient.kubernetes(config) as client:
            found = await thousand(client, count)
        requests = cluster.requests()
    control = {name: number for name, number in requests.items() if "proxy" not in name}
    show("thousand", on="fake", count=count, requests=requests, **rounded(found))
    opened = sum(number for name, number in control.items() if name.startswith("WATCH"))
    calls = sum(control.values()) - opened
    return {
        "fake1000_watches": found.pop("watches"),
        "fake1000_calls_per_sandbox": calls / count,
        **found,
    }


class Stub:
    """Answers for launchers that simulated nodes do not run, all at one address."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield port
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.json_response({"epoch": 1, "sessions": {}, "lease_left_s": 600.0})


class ToStub(NamedTuple):
    """In the place of `DataPaths`: every pod's launcher is the stub."""

    port: int

    async def connect(self, pod: Any, client: Callable[[Any], Any], within_s: float) -> Any:
        return client(AddressRoute("127.0.0.1", self.port))


def make_room(access: ApiAccess) -> None:
    """Give simulated nodes what they are made without and our pods ask for: an architecture and a disk."""
    pool = access.new_pool()
    listed = Request("GET", "api/v1/nodes", {"labelSelector": "type=kwok"}).send(pool, access, 20.0)
    nodes = [node["metadata"]["name"] for node in json.loads(listed.data)["items"]]
    assert nodes, "the cluster has no simulated node (label type=kwok)"
    disk = {"ephemeral-storage": "1Ti"}
    for name in nodes:
        for path, body in (
            (f"api/v1/nodes/{name}", {"metadata": {"labels": {"kubernetes.io/arch": "amd64"}}}),
            (f"api/v1/nodes/{name}/status", {"status": {"capacity": disk, "allocatable": disk}}),
        ):
            patch = Request("PATCH", path, body=body, content_type="application/merge-patch+json")
            assert patch.send(pool, access, 20.0).status == 200, path


async def on_real_server(kubeconfig: Path, folder: Path, count: int) -> None:
    config = settings(
        kubeconfig, folder, cpu=0.01, memory_bytes=64 * MB, disk_bytes=64 * MB,
        node_selector={"type": "kwok"}, tolerations=({"key": "kwok.x-k8s.io/node", "operator": "Exists"},),
    )  # fmt: skip
    async with Stub().opened() as port, SandboxClient.kubernetes(config) as client:
        backend = client._backend
        assert isinstance(backend, KubernetesBackend)
        await anyio.to_thread.run_sync(make_room, backend.api.access)
        backend._paths = ToStub(port)  # type: ignore[assignment]
        found = await thousand(client, count)
        calls = backend.api.requests / count
    show("thousand", on="real API server", count=count, calls_per_sandbox=round(calls, 2), **rounded(found))
