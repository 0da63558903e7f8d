"""The way to the launchers of a cluster: by the pods' addresses, the API server's proxy, or port-forward."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel

from sandbox_k8s.errors import AccessError, ClusterError, SandboxLostError
from sandbox_k8s.routes import AddressRoute, Connections, Route, open_pool
from sandbox_k8s.stats import ClientStats
from sandbox_k8s.transport import LauncherClient

from .access import ApiAccess
from .config import DataPath, KubernetesConfig
from .forward import ForwardRoute, PortForwards

_log = logging.getLogger("sandbox_k8s")
_ORDER: tuple[DataPath, ...] = ("pod_ip", "api_proxy", "port_forward")
_TRY_S = 4.0
_PODS_TO_TRY = 2


class ProxyRoute:
    """Over the API server's pod proxy."""

    def __init__(
        self, access: ApiAccess, namespace: str, pod: str, port: int, shared: aiohttp.ClientSession
    ) -> None:
        self._access = access
        self._shared = shared
        self.base_url = f"{access.base_url}api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/"

    def connections(self) -> Connections:
        """Those to the API server, the same for all pods."""
        return Connections(self._shared, shared=True)

    def options(self) -> dict[str, Any]:
        """What the API server wants to see."""
        return self._access.known_options()


class DataPaths:
    """Connects to launchers. The way is chosen with the first sandbox, and then kept.

    All launchers share one pool of connections: through the API server all of them lead to one place, and a
    pool for each of a thousand sandboxes is a hundred thousand objects and a thousand TLS handshakes.
    """

    def __init__(
        self, config: KubernetesConfig, access: ApiAccess, forwards: PortForwards, stats: ClientStats
    ) -> None:
        self.chosen: DataPath | None = config.data_path
        self._config = config
        self._access = access
        self._forwards = forwards
        self._stats = stats
        self._choosing = anyio.Lock()
        self._failed_s: list[float] = []
        """When no way was found, in a row; of different pods."""

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Hold the pool."""
        self._shared = open_pool(aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0))
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._shared.close()
                # Aborted transports close their sockets one turn of the loop later.
                await anyio.lowlevel.checkpoint()

    async def connect(
        self, pod: Mapping[str, Any], client: Callable[[Route], LauncherClient], within_s: float
    ) -> LauncherClient:
        """A launcher that answers.

        Args:
            pod: As the API server shows it.
            client: Makes the client of a route.
            within_s: How long the launcher may take to come up.

        Raises:
            SandboxLostError: It does not answer, or not on the way that works for others.
            AccessError: Its key is another one.
            ClusterError: The API server keeps the way closed that this client is to take.
        """
        if self.chosen is None:
            asked_s = anyio.current_time()
            async with self._choosing:
                if self.chosen is None:
                    self._share_failure(pod, asked_s)
                    return await self._choose(pod, client)
        return await self._try(self.chosen, pod, client, within_s)

    def _share_failure(self, pod: Mapping[str, Any], asked_s: float) -> None:
        """Not every start of a thousand tries all ways in turn when there is none: two pods are enough."""
        if sum(failed_s >= asked_s for failed_s in self._failed_s) >= _PODS_TO_TRY:
            raise SandboxLostError(
                f"pod {pod['metadata']['name']} runs, and while it waited no way led to the launchers of "
                f"{_PODS_TO_TRY} others; sandbox-k8s doctor --kubernetes tries each way and says why"
            )

    async def _choose(
        self, pod: Mapping[str, Any], client: Callable[[Route], LauncherClient]
    ) -> LauncherClient:
        refused: list[str] = []
        unknown: AccessError | None = None
        for path in _ORDER:
            try:
                launcher = await self._try(path, pod, client, _TRY_S)
            except (SandboxLostError, AccessError, ClusterError) as problem:
                refused.append(f"{path}: {problem}")
                unknown = problem if isinstance(problem, AccessError) else unknown
                continue
            self.chosen = path
            self._failed_s.clear()
            _log.log(
                logging.WARNING if refused else logging.INFO,
                "sandboxes of %s/%s are reached by %s; KubernetesConfig(data_path=%r) says so at once%s",
                *(self._config.cluster, self._config.namespace, path, path),
                "".join(f"\n{one}" for one in refused),
            )
            return launcher
        self._failed_s = [*self._failed_s[1 - _PODS_TO_TRY :], anyio.current_time()]
        if unknown is not None:
            raise unknown  # a launcher is there, and the key is not its own
        raise SandboxLostError(
            f"pod {pod['metadata']['name']} runs and no way leads to its launcher",
            evidence="\n".join(refused),
        )

    async def _try(
        self,
        path: DataPath,
        pod: Mapping[str, Any],
        client: Callable[[Route], LauncherClient],
        within_s: float,
    ) -> LauncherClient:
        launcher = client(await self._route(path, pod))
        try:
            await launcher.answers(within_s)
        except BaseException as problem:
            with anyio.CancelScope(shield=True):
                await launcher.close()
            runtime = self._config.runtime_class
            if isinstance(problem, SandboxLostError) and path == "port_forward" and runtime:
                raise SandboxLostError(
                    f"{problem.args[0]}; runtime class {runtime!r} may have no port-forward, as gVisor and "
                    "Kata: take data_path='api_proxy' or 'pod_ip'",
                    evidence=problem.evidence,
                    diagnosis=problem.diagnosis,
                ) from problem
            raise
        self._count(path)
        return launcher

    async def _route(self, path: DataPath, pod: Mapping[str, Any]) -> Route:
        name: str = pod["metadata"]["name"]
        if path == "pod_ip":
            address: str | None = pod.get("status", {}).get("podIP")
            if address is None:
                raise SandboxLostError(f"pod {name} has no address: it starts, or has ended")
            return AddressRoute(address, self._config.port, self._shared)
        if path == "api_proxy":
            return ProxyRoute(self._access, self._config.namespace, name, self._config.port, self._shared)
        return ForwardRoute(await self._forwards.socket_of(name, self._config.port), self._forwards, name)

    def _count(self, path: DataPath) -> None:
        if path == "pod_ip":
            self._stats.pod_ip += 1
        elif path == "api_proxy":
            self._stats.api_proxy += 1
        else:
            self._stats.port_forward += 1
