"""What a sandbox in a pod may do, as the API server, the kubelet and the kernel of a real cluster see it."""

import base64
import json
import os
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    ClusterError,
    Injection,
    KubernetesConfig,
    PodPlace,
    Sandbox,
    SandboxClient,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
)
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.backend import KubernetesBackend

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
]
ROOT_OR_NOT = pytest.mark.parametrize("user", [None, 1234], ids=["root", "user"])


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return msgspec.structs.replace(config, cpu=0.2)


def backend_of(client: SandboxClient) -> KubernetesBackend:
    backend = client._backend
    assert isinstance(backend, KubernetesBackend)
    return backend


def place_of(sandbox: Sandbox) -> PodPlace:
    place = sandbox.handle.place
    assert isinstance(place, PodPlace)
    return place


async def text_of(sandbox: Sandbox, command: str) -> str:
    """All that a command prints."""
    result = await sandbox.execute(command, timeout_s=20)
    return (result.stdout + result.stderr).decode("utf-8", "replace")


@ROOT_OR_NOT
async def test_a_sandbox_has_no_privilege_and_no_secret(cluster: KubernetesConfig, user: int | None) -> None:
    config = msgspec.structs.replace(cluster, run_as_user=user)
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start(SandboxSpec(env={"GIVEN": "to the sandbox"}))
        backend = backend_of(client)
        pod = await backend.api.get(place_of(sandbox).pod)
        # The kernel: no capability, also none to gain; seccomp filters; set-uid programs have no effect.
        for process in ("1", "self"):
            status = dict(
                line.split(":\t", 1)
                for line in (await text_of(sandbox, f"cat /proc/{process}/status")).splitlines()
            )
            assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
            assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
            assert status["Uid"].split() == [str(user or 0)] * 4
        # The kubelet: no account of the cluster inside, and what is asked for is what there is.
        assert "No such file" in await text_of(sandbox, "ls /var/run/secrets /run/secrets")
        assert pod["status"]["qosClass"] == "Guaranteed"
        # Its own processes and nobody else's.
        seen = await text_of(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "/pause" not in seen
        assert "kubelet" not in seen
        # The token is derived, and only its hash left the client; the launcher's memory, where it passes
        # through with each request, is closed.
        token = backend.token(place_of(sandbox).pod)
        key = config.resolved_run_key_file().read_bytes()
        everywhere = (
            "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; env; ls -R /run /tmp; cat $(find /run -type f)"
        )
        logs = f"api/v1/namespaces/{config.namespace}/pods/{place_of(sandbox).pod}/log"
        access = backend.api.access
        log = await anyio.to_thread.run_sync(Request("GET", logs).send, access.new_pool(), access, 20.0)
        for text in (json.dumps(pod), log.data.decode(), await text_of(sandbox, everywhere), repr(backend)):
            for secret in (token, base64.b64encode(token.encode()).decode(), key.hex()):
                assert secret not in text
        closed = await text_of(sandbox, "for f in mem environ maps fd/0; do cat /proc/1/$f | head -c 1; done")
        assert closed.count("ermission denied") == 4, closed


@ROOT_OR_NOT
async def test_what_an_agent_kills_is_its_own(cluster: KubernetesConfig, user: int | None) -> None:
    """NVIDIA-NeMo/Gym#2262: ``pkill -f`` of an agent hit the server that ran its commands."""
    config = msgspec.structs.replace(cluster, run_as_user=user)
    async with SandboxClient.kubernetes(config) as client:
        sandbox, neighbour = [await client.start() for _ in range(2)]
        await neighbour.execute("setsid sleep 5000 >/dev/null 2>&1 &")
        for command in ("kill 0", "kill -9 -1", "pkill -9 -f .", "kill -9 1", "kill -TERM 1", "kill -QUIT 1"):
            await sandbox.execute(command, timeout_s=10)
            session = await sandbox.session(f"s{abs(hash(command))}")
            await session.run(command, timeout_s=10)
            assert (await sandbox.execute("echo answers")).stdout == b"answers\n", command
        assert (await neighbour.execute("pkill -0 -f 'sleep 5000'")).exit_code == 0
        pod = await backend_of(client).api.get(place_of(sandbox).pod)
        (container,) = pod["status"]["containerStatuses"]
        assert (container["restartCount"], container["ready"]) == (0, True)


@pytest.fixture
async def levels(cluster: KubernetesConfig) -> AsyncIterator[dict[str, str]]:
    """Namespaces by the level of Pod Security that they enforce."""
    made = {level: f"sandbox-k8s-{level}-{os.urandom(3).hex()}" for level in ("baseline", "restricted")}
    async with SandboxClient.kubernetes(cluster) as client:
        api = backend_of(client).api
        for level, name in made.items():
            labels = {"pod-security.kubernetes.io/enforce": level}
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
            await api.ask(Request("POST", "api/v1/namespaces", body=body), f"creating namespace {name}")
        yield made
        for name in made.values():
            await api.ask(Request("DELETE", f"api/v1/namespaces/{name}"), f"deleting namespace {name}")


async def test_pod_security_admits_sandboxes(cluster: KubernetesConfig, levels: dict[str, str]) -> None:
    """``restricted`` wants a user who is not root, by number; ``baseline`` takes everything that we make."""
    async with SandboxClient.kubernetes(cluster) as client:
        backend = backend_of(client)

        async def admits(level: str, injection: Injection, user: int | None) -> str:
            backend.config = msgspec.structs.replace(
                cluster, namespace=levels[level], injection=injection, run_as_user=user
            )
            pod = backend._manifest(SandboxSpec(network=True), "0" * 16, "a" * 32)
            path = f"api/v1/namespaces/{levels[level]}/pods"
            try:
                await backend.api.ask(Request("POST", path, {"dryRun": "All"}, pod), "trying a pod")
            except ClusterError as problem:
                return str(problem)
            return ""

        tools = cluster.injection.image
        for injection in (
            Injection(kind="image_volume", image=tools),
            Injection(kind="init_copy", image=tools),
            Injection(kind="baked"),
        ):
            for level, user in (("baseline", None), ("baseline", 1000), ("restricted", 1000)):
                assert await admits(level, injection, user) == "", (level, injection, user)
            refused = await admits("restricted", injection, None)
            assert "policy_refused" in refused
            missing = refused.splitlines()[0].partition("restricted:latest")[2].split("), ")
            assert len(missing) == 1, missing
            assert "runAsNonRoot != true" in missing[0]


@pytest.fixture
async def runtime_class(cluster: KubernetesConfig) -> AsyncIterator[str]:
    """A RuntimeClass for containerd's runc, which every node has."""
    name, path = f"sandbox-k8s-{os.urandom(3).hex()}", "apis/node.k8s.io/v1/runtimeclasses"
    body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}}
    body["handler"] = "runc"
    async with SandboxClient.kubernetes(cluster) as client:
        api = backend_of(client).api
        await api.ask(Request("POST", path, body=body), f"making runtime class {name}")
        yield name
        await api.ask(Request("DELETE", f"{path}/{name}"), f"deleting runtime class {name}")


async def test_a_sandbox_runs_with_the_runtime_class_that_it_is_given(
    cluster: KubernetesConfig, runtime_class: str
) -> None:
    config = msgspec.structs.replace(cluster, runtime_class=runtime_class)
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()
        pod = await backend_of(client).api.get(place_of(sandbox).pod)
        assert pod["spec"]["runtimeClassName"] == runtime_class
        assert (await sandbox.execute("echo alive")).stdout == b"alive\n"
    missing = msgspec.structs.replace(cluster, runtime_class=f"{runtime_class}-not")
    async with SandboxClient.kubernetes(missing) as client:
        with pytest.raises(SandboxStartError, match="reference_missing") as failed:
            await client.start()
    assert failed.value.retryable is False


@pytest.mark.timeout(200)
async def test_a_full_disk_evicts_its_own_sandbox_and_no_other(cluster: KubernetesConfig) -> None:
    """omnigent-ai/omnigent#6744: one busy sandbox filled its node, and innocent neighbours were evicted.

    The kubelet measures every 10 s or so, and takes up to a minute.
    """
    config = msgspec.structs.replace(cluster, disk_bytes=64 << 20, cpu=0.1)
    async with SandboxClient.kubernetes(config) as client:
        neighbour = await client.start()
        session = await neighbour.session()
        await session.run("X=kept")
        found: dict[str, SandboxLostError] = {}

        async def fill(path: str) -> None:
            sandbox = await client.start()
            with pytest.raises(SandboxLostError) as lost:
                await sandbox.execute(
                    f"dd if=/dev/zero of={path} bs=1M count=120 2>&1; sleep 1000", timeout_s=150
                )
            found[path] = lost.value

        async with anyio.create_task_group() as tasks:
            for path in ("/workspace/full", "/full", "/run/sandbox-k8s/full"):
                tasks.start_soon(fill, path)
        for path, problem in found.items():
            assert problem.diagnosis is not None, path
            assert problem.diagnosis.failure == "evicted_storage_limit", (path, problem)
        assert (await session.run("echo $X")).stdout == b"kept\n"
        assert await neighbour.execute("true")
