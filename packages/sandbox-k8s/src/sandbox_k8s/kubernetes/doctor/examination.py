"""All that can be found out of a cluster without changing anything there."""

from collections.abc import Callable

from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import ClusterError
from sandbox_k8s.kubernetes.api import PodApi, Request
from sandbox_k8s.kubernetes.config import KubernetesConfig

from .admission import admission
from .capacity import capacity
from .finding import Finding, broken, refused, works
from .rights import rights


async def examine(
    api: PodApi,
    config: KubernetesConfig,
    clock: Clock,
    tell: Callable[[Finding], None],
    *,
    knows_injection: bool,
) -> None:
    """Look at the API server, rights, admission, room and network.

    Args:
        api: Of the cluster.
        config: Of the run that is to come.
        clock: For the time that the API server takes.
        tell: Called with each finding as it is made.
        knows_injection: Whether ``config.injection`` is what the run will have.

    Raises:
        ClusterError: The API server does not answer, or does not know the caller.
    """
    begun_s = clock.monotonic_s()
    version = await api.ask(Request("GET", "version"), "asking for the version")
    took_ms = (clock.monotonic_s() - begun_s) * 1000
    tell(works("api server", f"{version.get('gitVersion', '?')}, answers within {took_ms:.0f} ms"))
    tell(await _namespace(api, config.namespace))
    found = await rights(api, config)
    found += await admission(api, config, knows_injection=knows_injection)
    found += await capacity(api, config)
    for finding in found:
        tell(finding)


async def _namespace(api: PodApi, name: str) -> Finding:
    try:
        found = await api.ask(Request("GET", f"api/v1/namespaces/{name}"), "reading the namespace")
    except ClusterError as problem:
        if problem.code == 404:
            return broken("namespace", f"there is no {name!r}; do: kubectl create namespace {name}")
        return refused("namespace", problem)
    if "deletionTimestamp" in found["metadata"]:
        return broken("namespace", f"{name!r} is being deleted")
    return works("namespace", f"{name!r} is there")
