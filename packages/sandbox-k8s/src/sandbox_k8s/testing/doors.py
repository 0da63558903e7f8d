"""Ways into a pod through the API server: which there are, and when they are closed."""

from typing import Any

from aiohttp import web

from . import execs, ports, states
from .answers import RefusalError, bad_request
from .kubelet import Kubelet
from .paths import Path
from .placed import launcher_of, process_of
from .process_pod import ProcessPod
from .server import Stream
from .store import Object
from .streaming import streamed

_LOST = "error dialing backend: dial tcp 192.0.2.2:10250: connect: connection refused"


class Doors:
    """Logs, commands and connections of pods with a process."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def streams(self) -> dict[str, Stream]:
        """For `ApiServer`."""
        return {"log": self.log, "exec": self.execute, "portforward": self.forward, "proxy": self.proxy}

    async def log(self, request: web.Request, path: Path, pod: Object) -> web.StreamResponse:
        """What the container printed."""
        query = request.query
        _check_container(pod, query.get("container", ""))
        if "nodeName" not in pod["spec"]:
            return web.Response(status=204)
        self._check_node(pod)
        name = pod["spec"]["containers"][0]["name"]
        if _is_true(query.get("previous", "")):
            message = f'previous terminated container "{name}" in pod "{path.target.name}" not found'
            raise bad_request(message)
        runner = self._runner(pod)
        if runner is None:
            return web.Response(text="")
        if runner.main is None:
            waits = f'container "{name}" in pod "{path.target.name}" is waiting to start: ContainerCreating'
            raise bad_request(waits)
        tail = query.get("tailLines")
        lines = runner.log.read(
            follow=_is_true(query.get("follow", "")),
            tail=None if tail is None else int(tail),
            timestamps=_is_true(query.get("timestamps", "")),
        )
        return await streamed(request, lines, "text/plain")

    async def execute(self, request: web.Request, path: Path, pod: Object) -> web.StreamResponse:
        """Run a command beside the container's own."""
        _check_upgrade(request)
        _check_container(pod, request.query.get("container", ""))
        runner = self._reachable(pod)
        if isinstance(runner, web.Response):
            return runner
        if runner.main is None or runner.main.exit_code is not None:
            name = request.query.get("container") or pod["spec"]["containers"][0]["name"]
            return _kubelet_error(f'container not found ("{name}")')
        return await execs.serve(request, runner.main)

    async def forward(self, request: web.Request, path: Path, pod: Object) -> web.StreamResponse:
        """Connections to ports of the pod."""
        _check_upgrade(request)
        runner = self._reachable(pod)
        if isinstance(runner, web.Response):
            return runner
        return await ports.forward(request, runner.address)

    async def proxy(self, request: web.Request, path: Path, pod: Object) -> web.StreamResponse:
        """A request to a port of the pod."""
        address = pod["status"].get("podIP")
        if address is None:
            raise bad_request("address not allowed")
        if self._runner(pod) is not None:
            return await ports.proxy(request, address, path)
        launcher = launcher_of(self._kubelet.runner(pod["metadata"]["uid"]))
        if launcher is None or launcher.ended or not states.is_ready(pod):
            raise ports.unreachable(address, path.port)
        return await launcher.answer(request, request.path.partition("/proxy")[2])

    def _reachable(self, pod: Object) -> ProcessPod | web.Response:
        if "nodeName" not in pod["spec"]:
            raise bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
        self._check_node(pod)
        runner = self._runner(pod)
        return _kubelet_error(_NO_PROCESS) if runner is None else runner

    def _check_node(self, pod: Object) -> None:
        if pod["spec"]["nodeName"] in self._kubelet.nodes.lost:
            raise RefusalError(
                500, "InternalError", f"Internal error occurred: {_LOST}", details=_internal(_LOST)
            )

    def _runner(self, pod: Object) -> ProcessPod | None:
        """The process of a pod; None for a pod that has none."""
        return process_of(self._kubelet.runner(pod["metadata"]["uid"]))


_NO_PROCESS = (
    "sandbox_k8s.testing: this pod is a status alone; label it sim.kind=process for a program inside"
)


def _internal(message: str) -> dict[str, Any]:
    return {"causes": [{"message": message}]}


def _kubelet_error(text: str) -> web.Response:
    """Errors of the kubelet are no Status objects."""
    return web.Response(status=500, text=text)


def _check_upgrade(request: web.Request) -> None:
    if "upgrade" not in request.headers.get("Connection", "").lower():
        raise bad_request("Upgrade request required")


def _check_container(pod: Object, name: str) -> None:
    if name and name not in [one["name"] for one in pod["spec"]["containers"]]:
        raise bad_request(f"container {name} is not valid for pod {pod['metadata']['name']}")


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true")
