"""A cluster in memory and in virtual time: what the API server, the kubelet, launchers and the network do.

The client, `Owners`, the reaper, `PodApi` with its repetitions, `PodWatch` and the launcher's `Ownership`
are the real ones. Here is only what lies between them: requests and answers that are late, lost or doubled.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any

import anyio
import msgspec
from sandbox_k8s import SandboxLostError
from sandbox_k8s.kubernetes.api import PodApi, Request, refusal
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.kubernetes.records import CONTAINER
from sandbox_k8s.launcher.ownership import FencedError, LeaseOverError, NotOwnerError, Operation, Ownership
from sandbox_k8s.log import LogEntry
from sandbox_k8s.transport import LauncherClient, _error

from .virtual_time import VirtualClock

DATE = "2027-01-15T08:00:00Z"
Pod = dict[str, Any]


class Network:
    """What happens to one worker's messages. Everything off is a perfect network."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.trouble = 0.0
        self.lag_s = 0.0
        self.dead = False

    async def travel(self) -> None:
        """Be under way for a moment."""
        self._alive()
        await anyio.sleep(self.lag_s + 0.001 + 0.02 * self.chance.random())
        self._alive()

    def fate(self) -> str:
        """What becomes of a request: ``fine``, ``lost``, ``mute`` (done, unanswered), ``late``, ``twice``."""
        if not self.trouble or self.chance.random() >= self.trouble:
            return "fine"
        return self.chance.choice(("lost", "mute", "late", "twice"))

    def _alive(self) -> None:
        if self.dead:
            raise ConnectionResetError("this worker was killed")


class Launcher:
    """One container's launcher: the real rules, on simulated commands."""

    def __init__(self, cluster: "VirtualCluster", name: str, lease_s: float, epoch: int) -> None:
        self._cluster = cluster
        self._name = name
        self.ownership = Ownership(lease_s, cluster.now_s(), epoch=epoch)
        self.alive = True
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

    def serve(self, request: Request, who: str) -> tuple[int, Any]:
        """Answer a request about pods."""
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
        while self.now_s() < until_s:
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


class VirtualApi(PodApi):
    """The real `PodApi`, whose requests go to a cluster in memory."""

    def __init__(
        self,
        cluster: VirtualCluster,
        network: Network,
        config: KubernetesConfig,
        clock: VirtualClock,
        who: str,
    ) -> None:
        super().__init__(None, config, clock)  # type: ignore[arg-type]
        self._cluster = cluster
        self._network = network
        self._who = who

    async def _once(self, request: Request, what: str) -> dict[str, Any]:
        self.requests += 1
        network, cluster = self._network, self._cluster
        try:
            await network.travel()
            fate = network.fate()
            if fate == "lost":
                await anyio.sleep(1.0)
                raise ConnectionResetError("lost")
            if fate == "late":
                late_s = 30.0 * network.chance.random()
                cluster.loop.call_later(late_s, cluster.serve, request, self._who)
                raise ConnectionResetError("no answer")
            status, answer = cluster.serve(request, self._who)
            if fate == "twice":
                cluster.loop.call_later(3.0 * network.chance.random(), cluster.serve, request, self._who)
            if fate == "mute":
                raise ConnectionResetError("no answer")
            await network.travel()
        except ConnectionError as problem:
            raise refusal(what, 403 if network.dead else 0, str(problem)) from problem
        if status >= 400:
            raise refusal(what, status, json.dumps(answer))
        return msgspec.json.decode(msgspec.json.encode(answer))


class VirtualStreams:
    """`ApiStreams.watch` on a cluster in memory."""

    def __init__(self, cluster: VirtualCluster, network: Network) -> None:
        self._cluster = cluster
        self._network = network

    async def watch(self, path: str, query: dict[str, str], lasts_s: float) -> AsyncGenerator[dict[str, Any]]:
        if path.endswith("/events"):
            await anyio.sleep(lasts_s)
            return
        async for change in self._cluster.changes(int(query["resourceVersion"]), lasts_s):
            if self._network.dead:
                raise refusal("watching", 0, "this worker was killed")
            yield change


class _Answer:
    def __init__(self, body: Any) -> None:
        self._body = body

    async def json(self) -> Any:
        return self._body

    async def read(self) -> bytes:
        head = {
            "signal": None,
            "timed_out": False,
            "infra_error": "",
            "duration_s": 0.0,
            "session_alive": True,
        }
        head |= {"cancelled": "", "parts": [0, 0, 0, 0], "totals": [0, 0], **self._body}
        return json.dumps(head).encode() + b"\n"


class VirtualLauncherClient(LauncherClient):
    """The real client of a launcher, whose requests go to one in memory."""

    def __init__(self, cluster: VirtualCluster, network: Network, name: str, epoch: int | None) -> None:
        self._margin_s = 5.0
        self._where = name
        self.explain = None
        self._epoch = epoch
        self._cluster = cluster
        self._network = network
        self._name = name
        self._closed = anyio.Event()
        self._carried: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        self._closed.set()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, work_s: float | None = 0.0, **options: Any
    ) -> AsyncGenerator[Any]:
        if self._closed.is_set():
            raise SandboxLostError(f"{self._where} was stopped or detached by this client ({path})")
        data = options.get("data") or b""
        data = data if isinstance(data, bytes) else data.getvalue() if hasattr(data, "getvalue") else b"{}"
        body: dict[str, Any] = json.loads(data.partition(b"\n")[0] or b"{}")
        if "command" in body:
            body["seconds"] = body["command"][1]
        total_s = None if work_s is None else work_s + self._margin_s
        try:
            with anyio.fail_after(total_s):
                status, answer = await self._ask(path, body)
        except (TimeoutError, ConnectionError) as problem:
            raise await self._lost(f"{self._where} does not answer ({path}): {problem}") from problem
        if status >= 400:
            raise _error(json.dumps(answer).encode(), status, self._where)
        yield _Answer(answer)

    async def _ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        network = self._network
        await network.travel()
        fate = network.fate()
        if fate == "lost":
            await anyio.sleep_forever()
        if fate == "late":
            self._carry(path, body, 30.0 * network.chance.random())
            await anyio.sleep_forever()
        if fate == "twice":
            self._carry(path, body, 5.0 * network.chance.random())
        answer = self._carry(path, body, 0.0)
        if fate == "mute":
            await anyio.sleep_forever()
        # Carried on without us when this is cancelled: a connection that is cut may be noticed late.
        await asyncio.wait([answer])
        await network.travel()
        return answer.result()

    def _carry(self, path: str, body: dict[str, Any], after_s: float) -> "asyncio.Task[tuple[int, Any]]":
        async def carry() -> tuple[int, Any]:
            if after_s:
                await anyio.sleep(after_s)
            launcher = self._cluster.launchers.get(self._name)
            if launcher is None:
                raise ConnectionRefusedError("no route")
            return await launcher.answer(path, self._epoch, body)

        task = asyncio.get_running_loop().create_task(carry())
        self._carried.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._carried.discard(task)
        if not task.cancelled():
            task.exception()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines of thousands of failing requests."""
    import logging

    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
