"""A cluster in memory and in virtual time: what the API server, the kubelet, launchers and the network do.

The client, `Owners`, the reaper, `PodApi` with its repetitions, `PodWatch` and the launcher's `Ownership`
are the real ones. Here is only what lies between them: requests and answers that are late, lost or doubled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from random import Random
from typing import Any

import anyio
import msgspec
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.records import CONTAINER
from sandbox_k8s.launcher.ownership import FencedError, LeaseOverError, NotOwnerError, Operation, Ownership
from sandbox_k8s.log import LogEntry

DATE = "2027-01-15T08:00:00Z"
Pod = dict[str, Any]


class Launcher:
    """One container's launcher: the real rules, on simulated commands."""

    def __init__(self, cluster: "VirtualCluster", name: str, lease_s: float, epoch: int) -> None:
        self._cluster = cluster
        self._name = name
        self.ownership = Ownership(lease_s, cluster.now_s(), epoch=epoch)
        self.alive = True
        self.began_s = cluster.now_s()
        self.asked_in_vain = 0
        self._cuts: dict[Operation, anyio.Event] = {}
        self._over: dict[Operation, anyio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.look()

    def look(self) -> None:
        """End with the lease; look again when it could be over."""
        if self._timer is not None:
            self._timer.cancel()
        left_s = self.ownership.left_s(self._cluster.now_s())
        if not self.alive:
            return
        if self.ownership.over(self._cluster.now_s()):
            self._cluster.container_ended(self._name)
        elif left_s is not None:
            self._timer = self._cluster.loop.call_later(left_s + 0.01, self.look)

    def kill(self) -> None:
        """The process is gone."""
        self.alive = False
        for cut in self._cuts.values():
            cut.set()
        self.look()

    async def answer(self, path: str, epoch: int | None, body: dict[str, Any]) -> tuple[int, Any]:
        """Carry out a request as ``launcher.routes`` does."""
        if not self.alive:
            self.asked_in_vain += 1
            raise ConnectionResetError("nobody listens")
        self.ownership.heard(epoch, self._cluster.now_s())
        try:
            return 200, await self._carry_out(path, epoch, body)
        except FencedError as problem:
            return 409, {"error": "fenced", "message": str(problem)}
        except NotOwnerError as problem:
            return 409, {"error": "not-owner", "message": str(problem)}
        except LeaseOverError as problem:
            return 410, {"error": "lease-over", "message": str(problem)}

    async def _carry_out(self, path: str, epoch: int | None, body: dict[str, Any]) -> Any:
        own, now_s = self.ownership, self._cluster.now_s
        if path == "/sbx/info":
            return {"epoch": own.epoch, "sessions": {}, "lease_left_s": own.left_s(now_s())}
        if path == "/sbx/log":
            return {"entries": own.log.after(0)}
        if path == "/sbx/lease":
            if "lease_s" in body:
                own.change_lease(epoch, body["lease_s"], now_s())
            else:
                own.must_own(epoch, now_s())
            self.look()
            return {}
        if path == "/sbx/fence":
            number, older = own.fence(body["epoch"], now_s())
            for one in older:
                self._cuts[one].set()
            for over in [self._over[one] for one in older]:
                await over.wait()
            if not self.alive:
                raise ConnectionResetError("the sandbox died")
            own.fenced(number, body["epoch"], now_s())
            return {"epoch": body["epoch"]}
        return await self._work(path, epoch, body)

    async def _work(self, path: str, epoch: int | None, body: dict[str, Any]) -> Any:
        now_s = self._cluster.now_s
        operation = self.ownership.begin("write" if path == "/sbx/file" else "command", epoch, now_s())
        cut = self._cuts[operation] = anyio.Event()
        over = self._over[operation] = anyio.Event()
        try:
            with anyio.move_on_after(float(body.get("seconds", 0.5))):
                await cut.wait()
                await anyio.sleep(0.3 * self._cluster.chance.random())  # it gets its SIGTERM, and dies
        finally:
            del self._cuts[operation], self._over[operation]
            over.set()
            if self.alive:
                self.ownership.end(operation, now_s())
        if not self.alive:
            raise ConnectionResetError("the sandbox died")
        return {"exit_code": None if cut.is_set() else 0}


class VirtualCluster:
    """The API server's pods, and what the kubelet does to them."""

    def __init__(self, chance: Random) -> None:
        self.loop = asyncio.get_running_loop()
        self.chance = chance
        self.pods: dict[str, bytes] = {}
        self.launchers: dict[str, Launcher] = {}
        self.logs: dict[str, list[list[LogEntry]]] = {}
        self.deleted_by: Callable[[str, str], None] = lambda name, who: None
        self.refused_s = -1e9
        """When it last answered nobody."""
        self._down_until_s = 0.0
        self._version = 100
        self._history: list[tuple[int, str, bytes]] = []
        self._news = anyio.Event()

    def now_s(self) -> float:
        """True time."""
        return self.loop.time()

    def pod(self, name: str) -> Pod | None:
        """A copy of a pod."""
        data = self.pods.get(name)
        return None if data is None else msgspec.json.decode(data)

    def _save(self, kind: str, pod: Pod) -> Pod:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        data = msgspec.json.encode(pod)
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            del self.pods[name]
        else:
            self.pods[name] = data
        self._history.append((self._version, kind, data))
        self._news.set()
        self._news = anyio.Event()
        return pod

    # The API server

    def down(self) -> bool:
        """Whether the API server answers nobody."""
        return self.now_s() < self._down_until_s

    def break_api(self, lasts_s: float) -> None:
        """The API server is away for so long; 0 brings it back. Pods and launchers go on."""
        self._down_until_s = self.now_s() + lasts_s
        self._news.set()
        self._news = anyio.Event()

    def serve(self, request: Request, who: str) -> tuple[int, Any]:
        """Answer a request about pods."""
        if self.down():
            self.refused_s = self.now_s()
            return _status(503, "ServiceUnavailable", "the API server is away", {})
        name = request.path.rpartition("/pods/")[2] if "/pods/" in request.path else ""
        if request.method == "POST":
            return self._create(dict(request.body or {}))
        if not name:
            items = (
                []
                if request.path.endswith("/events")
                else [msgspec.json.decode(one) for one in self.pods.values()]
            )
            return 200, {"items": items, "metadata": {"resourceVersion": str(self._version)}}
        pod = self.pod(name)
        if pod is None:
            return _status(404, "NotFound", f'pods "{name}" not found', {"name": name, "kind": "pods"})
        if request.method == "PATCH":
            return self._patch(pod, request.body or {})
        if request.method == "DELETE":
            return self._delete(pod, request.body or {}, who)
        return 200, pod

    def _create(self, pod: Pod) -> tuple[int, Any]:
        pod = msgspec.json.decode(msgspec.json.encode(pod))
        name = pod["metadata"]["name"]
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists', {})
        pod["metadata"] |= {"uid": f"{self.chance.getrandbits(64):x}", "creationTimestamp": DATE}
        pod["status"] = {"phase": "Pending"}
        self.loop.call_later(0.1 + 0.3 * self.chance.random(), self._come_up, name, pod["metadata"]["uid"])
        return 201, self._save("ADDED", pod)

    def _patch(self, pod: Pod, body: Any) -> tuple[int, Any]:
        metadata = body["metadata"]
        if metadata["resourceVersion"] != pod["metadata"]["resourceVersion"]:
            return _conflict(pod)
        pod["metadata"]["annotations"] |= metadata["annotations"]
        return 200, self._save("MODIFIED", pod)

    def _delete(self, pod: Pod, body: Any, who: str) -> tuple[int, Any]:
        metadata, wanted = pod["metadata"], body["preconditions"]
        if any(metadata[name] != value for name, value in wanted.items()):
            return _conflict(pod)
        name = metadata["name"]
        if "deletionTimestamp" in metadata:
            return 200, pod
        self.deleted_by(name, who)
        metadata["deletionTimestamp"] = DATE
        pod = self._save("MODIFIED", pod)
        self.loop.call_later(0.2 + self.chance.random(), self._take_down, name, metadata["uid"])
        return 200, pod

    async def changes(self, version: int, lasts_s: float) -> AsyncGenerator[dict[str, Any]]:
        """A watch of pods."""
        until_s = self.now_s() + lasts_s
        while self.now_s() < until_s and not self.down():
            news = self._news
            for at, kind, data in self._history[-200:]:
                if at > version:
                    version = at
                    yield {"type": kind, "object": msgspec.json.decode(data)}
            if news is self._news:
                with anyio.move_on_at(until_s):
                    await news.wait()

    # The kubelet

    def _come_up(self, name: str, uid: str) -> None:
        pod = self.pod(name)
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
            return
        self._run(pod, 0)

    def _run(self, pod: Pod, restarts: int) -> None:
        name = pod["metadata"]["name"]
        before = self.launchers.get(name)
        command = pod["spec"]["containers"][0]["command"]
        lease_s = float(command[command.index("--lease") + 1])
        self.launchers[name] = Launcher(self, name, lease_s, 0 if before is None else before.ownership.epoch)
        pod["spec"]["nodeName"] = "node-1"
        ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": ready}
        pod["status"]["containerStatuses"] = [_container({"running": {"startedAt": DATE}}, restarts)]
        self._save("MODIFIED", pod)

    def restart_container(self, name: str) -> None:
        """The container dies and comes back, as a pod with another restart policy would have it."""
        pod, launcher = self.pod(name), self.launchers.get(name)
        if pod is None or launcher is None or not launcher.alive or "deletionTimestamp" in pod["metadata"]:
            return
        self._bury(name)
        self._run(pod, pod["status"]["containerStatuses"][0]["restartCount"] + 1)

    def container_ended(self, name: str) -> None:
        """The launcher ended by itself: the kubelet says so a little later."""
        self._bury(name)
        self.loop.call_later(0.1 + self.chance.random(), self._report_end, name)

    def _report_end(self, name: str) -> None:
        pod = self.pod(name)
        if pod is None:
            return
        end = {"exitCode": 0, "reason": "Completed", "startedAt": DATE, "finishedAt": DATE}
        pod["status"] |= {"phase": "Succeeded", "conditions": []}
        pod["status"]["containerStatuses"] = [_container({"terminated": end}, 0)]
        self._save("MODIFIED", pod)

    def _take_down(self, name: str, uid: str) -> None:
        pod = self.pod(name)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        self._bury(name)
        self._save("DELETED", pod)

    def _bury(self, name: str) -> None:
        launcher = self.launchers.get(name)
        if launcher is not None and launcher.alive:
            launcher.kill()
            self.logs.setdefault(name, []).append(entries_of(launcher))


def entries_of(launcher: Launcher) -> list[LogEntry]:
    """A launcher's log."""
    return [LogEntry(**line) for line in launcher.ownership.log.after(0)]


def _container(state: dict[str, Any], restarts: int) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "state": state,
        "ready": "running" in state,
        "restartCount": restarts,
        "image": "any",
        "imageID": "any@sha256:0",
        "containerID": f"containerd://{restarts}",
    }


def _status(code: int, reason: str, message: str, details: dict[str, str]) -> tuple[int, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    return code, status | {"reason": reason, "message": message, "details": details}


def _conflict(pod: Pod) -> tuple[int, Any]:
    name = pod["metadata"]["name"]
    return _status(409, "Conflict", f'Operation cannot be fulfilled on pods "{name}"', {"name": name})
