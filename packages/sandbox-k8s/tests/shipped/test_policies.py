"""The shipped network policies on a real cluster."""

import json
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from sandbox_k8s import KubernetesConfig, Sandbox, SandboxClient, SandboxSpec
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.shipped import ManifestOptions, manifests

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
    pytest.mark.timeout(180),
]


async def reaches(sandbox: Sandbox, address: str, port: int) -> bool:
    """Whether a TCP connection from inside comes about."""
    return (await sandbox.execute(f"exec 3<>/dev/tcp/{address}/{port}", timeout_s=2)).exit_code == 0


async def until_not(sandbox: Sandbox, address: str, port: int) -> None:
    with anyio.fail_after(20):
        while await reaches(sandbox, address, port):
            await anyio.lowlevel.checkpoint()  # a connection of its own takes long enough


async def test_policies_keep_sandboxes_in_and_all_but_workers_out(
    worker: KubernetesConfig,
    start_all: Callable[..., Any],
    apply: Callable[[Any], str],
    kubectl: Callable[..., str],
) -> None:
    """Sandboxes of another run, which the policies do not select, are the rest of the world."""
    kept = msgspec.structs.replace(worker, cpu=0.15, run="kept-in")
    other = msgspec.structs.replace(kept, run="the-world", port=8001)
    async with SandboxClient.kubernetes(kept) as client, SandboxClient.kubernetes(other) as world:
        opened, closed, sibling = await start_all(
            client, SandboxSpec(network=True), SandboxSpec(), SandboxSpec()
        )
        target, stranger, colleague = await start_all(world, *[SandboxSpec()] * 3)
        name = f"-n={worker.namespace}"
        shown = json.loads(kubectl("get", "pods", name, "-o", "json"))["items"]
        pods = {pod["metadata"]["labels"].get(records.SANDBOX): pod["status"] for pod in shown}
        ip = {sandbox_id: status.get("podIP") for sandbox_id, status in pods.items()}
        kubectl("label", "pod", name, colleague.handle.place.pod, "sandbox-k8s/worker=true")
        said = await closed.execute("echo $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT")
        api_server = said.stdout_text.split()
        outside = {
            "API server": (api_server[0], int(api_server[1])),
            "kubelet of its node": (pods[closed.id]["hostIP"], 10250),
            "another sandbox": (ip[sibling.id], kept.port),
            "any other pod": (ip[target.id], other.port),
        }
        for what, (address, port) in outside.items():
            assert await reaches(closed, address, port), f"{what} cannot be reached even without a policy"
        for one in (stranger, colleague):
            assert await reaches(one, ip[closed.id], kept.port)

        options = ManifestOptions(
            namespace=worker.namespace,
            run=kept.run,
            allow=(f"{ip_network(ip[target.id] + '/24', strict=False)}:{other.port}",),
            deny=(f"{ip[stranger.id]}/32",),
        )
        apply(manifests("network-policy", options))
        await until_not(closed, *outside["any other pod"])
        await until_not(opened, ip[stranger.id], other.port)
        for what, (address, port) in outside.items():
            assert not await reaches(closed, address, port), what
        assert await reaches(opened, ip[target.id], other.port)
        for what in ("API server", "kubelet of its node", "another sandbox"):
            assert not await reaches(opened, *outside[what]), what
        assert not await reaches(stranger, ip[closed.id], kept.port)
        assert await reaches(colleague, ip[closed.id], kept.port)
        guest = await client.attach(closed.handle, take_ownership=False)
        assert (await guest.execute("echo reached")).stdout == b"reached\n"
