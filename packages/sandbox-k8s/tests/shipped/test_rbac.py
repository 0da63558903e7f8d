"""The shipped roles on a real cluster: they suffice for a whole life, and each verb is needed."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import (
    ClusterError,
    KubernetesConfig,
    PodPlace,
    Sandbox,
    SandboxClient,
    SandboxStartError,
)
from sandbox_k8s.kubernetes import permissions
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.config import DataPath
from sandbox_k8s.kubernetes.shipped import REAPER, WORKER, ManifestOptions, rbac

WORKER_VERBS = (*permissions.WORKER, *permissions.API_PROXY, *permissions.PORT_FORWARD)
PATHS: dict[str, DataPath] = {"pods/proxy": "api_proxy", "pods/portforward": "port_forward"}
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
    pytest.mark.timeout(180),
]


def backend_of(client: SandboxClient) -> KubernetesBackend:
    backend = client._backend
    assert isinstance(backend, KubernetesBackend)
    return backend


def place_of(sandbox: Sandbox) -> PodPlace:
    place = sandbox.handle.place
    assert isinstance(place, PodPlace)
    return place


@pytest.mark.parametrize("path", ["pod_ip", "api_proxy", "port_forward"])
async def test_the_shipped_role_is_enough_for_a_whole_life(worker: KubernetesConfig, path: DataPath) -> None:
    config = msgspec.structs.replace(worker, data_path=path)
    async with SandboxClient.kubernetes(config) as first, SandboxClient.kubernetes(config) as second:
        sandbox = await first.start()
        session = await sandbox.session()
        await session.run("export X=kept")
        await sandbox.write("f", b"bytes")
        assert (await sandbox.execute("cat f; exit 3")).exit_code == 3
        taken = await second.attach(await sandbox.detach())
        assert (await (await taken.session()).run("echo $X")).stdout == b"kept\n"
        assert await taken.read("f") == b"bytes"
        backend_of(second)._owners._expires_ns[taken.id] = 1
        await backend_of(second).renewed(taken.handle)
        assert [info.state for info in await second.list()] == ["running"]
        assert await second.reap() == ()
        await taken.stop()
        assert first.stats.watch_failures == 0


def test_the_accounts_may_do_that_and_nothing_else(namespace: str, kubectl: Callable[..., str]) -> None:
    for account, needed in ((WORKER, WORKER_VERBS), (REAPER, permissions.REAPER)):
        who = f"--as=system:serviceaccount:{namespace}:{account}"
        rows = kubectl("auth", "can-i", "--list", "--no-headers", who, "-n", namespace).splitlines()
        # Everybody who is known may ask about themselves, and read where the API is.
        shown = [row for row in rows if not row.startswith(" ") and "k8s.io" not in row]
        may = {(row.split()[0], verb) for row in shown for verb in row[row.rindex("[") + 1 : -1].split()}
        assert may == {(one.resource, one.verb) for one in needed}


def without(one: permissions.Permission, namespace: str, name: str) -> list[dict[str, Any]]:
    """The worker's account under another name, without one verb."""
    kept = [other for other in WORKER_VERBS if other != one]
    return rbac.account(name, ManifestOptions(namespace=namespace), kept)


async def use(one: permissions.Permission, client: SandboxClient, sandbox: Sandbox) -> object:
    """What a worker needs a permission for."""
    backend, handle, held = backend_of(client), sandbox.handle, place_of(sandbox)
    api = backend.api
    if one.verb == "watch":
        query = {"resourceVersion": "0"}
        path = f"api/v1/namespaces/{held.namespace}/{one.resource}"
        async with aclosing(backend.watch._streams.watch(path, query, 1.0)) as changes:
            return [change async for change in changes]
    if one.resource in ("pods/proxy", "pods/portforward"):
        guest = await client.attach(handle, take_ownership=False)
        return await (guest.write("f", b"") if one.verb == "update" else guest.execute("true"))
    calls: dict[tuple[str, str], Callable[[], Awaitable[object]]] = {
        ("pods", "create"): client.start,
        ("pods", "get"): lambda: client.attach(handle),
        ("pods", "list"): client.list,
        ("pods", "patch"): lambda: client.attach(handle),
        ("pods", "delete"): lambda: api.delete(held.pod, uid=f"not {held.uid}"),
        ("events", "list"): api.events_version,
    }
    return await calls[one.resource, one.verb]()


async def test_each_verb_of_the_worker_is_needed(
    worker: KubernetesConfig, apply: Callable[[Any], str], kubeconfig_of: Callable[[str], Path]
) -> None:
    names = {one: f"without-{one.verb}-{one.resource.replace('/', '-')}" for one in WORKER_VERBS}
    objects = [each for one, name in names.items() for each in without(one, worker.namespace, name)]
    apply(objects)
    said: dict[str, ClusterError] = {}

    async def refused(one: permissions.Permission, sandbox: Sandbox) -> None:
        kubeconfig = await anyio.to_thread.run_sync(kubeconfig_of, names[one])
        path = PATHS.get(one.resource, "pod_ip")
        config = msgspec.structs.replace(worker, kubeconfig=kubeconfig, data_path=path)
        async with SandboxClient.kubernetes(config) as client:
            with pytest.raises((ClusterError, SandboxStartError)) as failed:
                await use(one, client, sandbox)
            starting = isinstance(failed.value, SandboxStartError)
            problem = failed.value.__cause__ if starting else failed.value
            assert isinstance(problem, ClusterError)
            said[one.name] = problem

    async with SandboxClient.kubernetes(worker) as owner:
        sandbox = await owner.start()
        async with anyio.create_task_group() as tasks:
            for one in WORKER_VERBS:
                tasks.start_soon(refused, one, sandbox)
    assert said.keys() == {one.name for one in WORKER_VERBS}
    assert {problem.code for problem in said.values()} == {403}
    for name, problem in said.items():
        verb, resource = name.split()
        if resource == "pods/portforward":  # a WebSocket that is refused loses its reason
            assert "pods" in str(problem)
            continue
        assert problem.diagnosis is not None
        assert problem.diagnosis.failure == "permission_denied", problem
        assert f'cannot {verb} resource "{resource}"' in str(problem)


async def test_a_worker_that_may_not_watch_is_told_at_once(
    worker: KubernetesConfig, apply: Callable[[Any], str], kubeconfig_of: Callable[[str], Path]
) -> None:
    """Not after the whole time that a start may take."""
    (watch,) = [one for one in permissions.WORKER if (one.resource, one.verb) == ("pods", "watch")]
    objects = without(watch, worker.namespace, "blind")
    apply(objects)
    kubeconfig = kubeconfig_of("blind")
    async with SandboxClient.kubernetes(msgspec.structs.replace(worker, kubeconfig=kubeconfig)) as client:
        with anyio.fail_after(10), pytest.raises(SandboxStartError, match='cannot watch resource "pods"'):
            await client.start()
        assert {info.state for info in await client.list()} <= {"dead"}
