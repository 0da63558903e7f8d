"""Which of the back end's verbs the caller has: asked of the API server, for the caller itself."""

from collections.abc import Iterable

import anyio

from sandbox_k8s.errors import ClusterError
from sandbox_k8s.kubernetes import permissions
from sandbox_k8s.kubernetes.api import PodApi, Request
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.kubernetes.permissions import Permission

from .finding import Finding, advice, broken, refused, works

_PATH = "apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_GRANT = "apply: sandbox-k8s manifests rbac"


async def rights(api: PodApi, config: KubernetesConfig) -> list[Finding]:
    """A finding for workers, one for each data path that needs rights, and one for the reaper."""
    asked = (
        ("rights of workers", permissions.WORKER, True),
        ("rights for api_proxy", permissions.API_PROXY, config.data_path == "api_proxy"),
        ("rights for port_forward", permissions.PORT_FORWARD, config.data_path == "port_forward"),
        ("rights of the reaper", permissions.REAPER, False),
    )
    return [await _of_role(api, config.namespace, *one) for one in asked]


async def _of_role(
    api: PodApi, namespace: str, what: str, wanted: Iterable[Permission], needed: bool
) -> Finding:
    denied: list[Permission] = []
    failed: ClusterError | None = None

    async def ask(one: Permission) -> None:
        nonlocal failed
        try:
            if not await is_allowed(api, namespace, one):
                denied.append(one)
        except ClusterError as problem:
            failed = problem

    async with anyio.create_task_group() as tasks:
        for one in wanted:
            tasks.start_soon(ask, one)
    if failed is not None:
        return refused(what, failed)
    if not denied:
        return works(what, _by_resource(wanted))
    missing = "; ".join(f"{one.name}: {one.why}" for one in wanted if one in denied)
    return (broken if needed else advice)(what, f"may not {missing}; {_GRANT}")


async def is_allowed(api: PodApi, namespace: str, one: Permission) -> bool:
    """Whether the caller may do that in the namespace.

    Raises:
        ClusterError: The API server does not tell.
    """
    resource, _, subresource = one.resource.partition("/")
    attributes = {
        "namespace": namespace,
        "group": one.group,
        "resource": resource,
        "subresource": subresource,
        "verb": one.verb,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.ask(Request("POST", _PATH, body=body), f"asking whether one may {one.name}")
    return bool(answer["status"].get("allowed", False))


def _by_resource(wanted: Iterable[Permission]) -> str:
    rules = permissions.rules(wanted)
    return "; ".join(f"{one['resources'][0]}: {' '.join(one['verbs'])}" for one in rules)
