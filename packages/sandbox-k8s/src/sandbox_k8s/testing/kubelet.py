"""The simulated scheduler, kubelet and node controller: what happens to pods after they were created."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from . import deletion
from .courses import ALIASES, Course
from .nodes import Nodes
from .patches import strategic
from .states import condition
from .store import Change, Object, Store, labels_of

FAULT_LABEL = "sim.fault"
KIND_LABEL = "sim.kind"
NODE_GRACE_S = 20.0
"""Until a silent node is given up, as on the recorded cluster (by default 50 s elsewhere)."""


class Runner(Protocol):
    """One pod on its node."""

    async def run(self) -> None:
        """Live, until the pod is gone."""
        ...

    def end(self) -> None:
        """Somebody asked for the pod's deletion, or for an earlier one."""
        ...


class Kubelet:
    """Runs a task for each pod.

    Args:
        speed: How many recorded seconds pass in one.
        start: Makes the runner of a pod that has a node and no recorded cause to fail.

    Attributes:
        doomed: Causes for pods to come, by pod name; ``"*"`` is for whichever comes next.
    """

    def __init__(
        self,
        store: Store,
        nodes: Nodes,
        courses: Mapping[str, Course],
        speed: float,
        start: "Callable[[Kubelet, Object], Runner]",
    ) -> None:
        self.store = store
        self.nodes = nodes
        self.courses = courses
        self.speed = speed
        self.doomed: dict[str, list[str]] = {}
        self._start = start
        self._runners: dict[str, Runner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nodes_changed = asyncio.Event()
        self._unsaid: dict[str, Object] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[None]] = set()
        self.failures: list[BaseException] = []
        store.on_change.append(self._see)

    def runner(self, uid: str) -> Runner | None:
        """The runner of a pod."""
        return self._runners.get(uid)

    def cause_of(self, pod: Object) -> str:
        """The recorded cause that a pod is to suffer; empty for none.

        Raises:
            KeyError: The label names no recorded cause.
        """
        name = pod["metadata"]["name"]
        for key in (name, "*"):
            if self.doomed.get(key):
                return self.doomed[key].pop(0)
        label = labels_of(pod).get(FAULT_LABEL, "")
        return ALIASES.get(label, label)

    def current(self, pod: Object) -> Object | None:
        """The pod as it is now; None when it is gone, or another has its name."""
        metadata = pod["metadata"]
        found = self.store.get("pods", metadata["namespace"], metadata["name"])
        return found if found is not None and found["metadata"]["uid"] == metadata["uid"] else None

    def set_status(self, pod: Object, status: Object) -> Object | None:
        """Report a status; None when the pod is gone."""
        found = self.current(pod)
        return None if found is None else self.store.replace("pods", found, {**found, "status": status})

    def report(self, pod: Object, status: Object) -> Object | None:
        """Report a status from the pod's node; when that is lost, once it is found again."""
        if self._is_lost(pod):
            self._unsaid[pod["metadata"]["uid"]] = status
            return pod
        return self.set_status(pod, status)

    def bind(self, pod: Object, node: str) -> Object | None:
        """Give a pod to a node, and say so in an event."""
        found = self.current(pod)
        if found is None:
            return None
        status = {**found["status"], "conditions": [condition("PodScheduled", True, self.store.now())]}
        bound = {**found, "spec": {**found["spec"], "nodeName": node}, "status": status}
        bound = self.store.replace("pods", found, bound)
        metadata = bound["metadata"]
        where = f"{metadata['namespace']}/{metadata['name']}"
        self.event(bound, "Scheduled", f"Successfully assigned {where} to {node}", scheduler=True)
        return bound

    def event(
        self, pod: Object, reason: str, message: str, *, warning: bool = False, scheduler: bool = False
    ) -> None:
        """An event about a pod, in the form of the kubelet's or of the scheduler's."""
        metadata = pod["metadata"]
        about = {"kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"]}
        about |= {"uid": metadata["uid"], "apiVersion": "v1"}
        component = "default-scheduler" if scheduler else "kubelet"
        now = self.store.now()
        event: Object = {
            "metadata": {
                "name": f"{metadata['name']}.{self.store.clock.new_id()[:16]}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": about,
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "source": {"component": component},
            "reportingComponent": component,
        }
        if scheduler:
            event |= {
                "eventTime": self.store.now(precise=True),
                "firstTimestamp": None,
                "lastTimestamp": None,
            }
        else:
            event |= {"eventTime": None, "firstTimestamp": now, "lastTimestamp": now, "count": 1}
            about["fieldPath"] = f"spec.containers{{{pod['spec']['containers'][0]['name']}}}"
        self.store.create("events", event)

    def gone(self, pod: Object) -> None:
        """The pod's processes have ended: take it away."""
        found = self.current(pod)
        if found is not None:
            deletion.finish(self.store, "pods", found)

    async def nodes_change(self) -> None:
        """Wait until a node changes."""
        await self._nodes_changed.wait()

    def lose_node(self, name: str) -> None:
        """The node's kubelet falls silent; its processes live on."""
        self.nodes.lost.add(name)
        self._spawn(self._give_up(name))

    def find_node(self, name: str) -> None:
        """The node's kubelet is back, with the same containers."""
        self.nodes.lost.discard(name)
        self.nodes.report_found(name)
        for pod in self._pods_on(name):
            unsaid = self._unsaid.pop(pod["metadata"]["uid"], None)
            if unsaid is None:
                self._set_ready(pod, True)
            else:
                self.set_status(pod, unsaid)
            runner = self._runners.get(pod["metadata"]["uid"])
            if runner is not None and "deletionTimestamp" in pod["metadata"]:
                runner.end()

    async def close(self) -> None:
        """End all pods' processes."""
        self.store.on_change.remove(self._see)
        for task in self._running:
            self._cancel(task)
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _give_up(self, name: str) -> None:
        await asyncio.sleep(NODE_GRACE_S / self.speed)
        if name not in self.nodes.lost:
            return
        for pod in self._pods_on(name):
            self._set_ready(pod, False)
            self.event(pod, "NodeNotReady", "Node is not ready", warning=True)
        self.nodes.report_lost(name)

    def _set_ready(self, pod: Object, ready: bool) -> None:
        if pod["status"]["phase"] == "Running":
            change = {"conditions": [condition("Ready", ready, self.store.now())]}
            self.set_status(pod, strategic(pod["status"], change))

    def _pods_on(self, node: str) -> list[Object]:
        return [one for one in self.store.all("pods") if one["spec"].get("nodeName") == node]

    def _see(self, change: Change) -> None:
        if change.plural == "nodes":
            self._nodes_changed.set()
            self._nodes_changed = asyncio.Event()
        if change.plural != "pods":
            return
        uid: str = change.last["metadata"]["uid"]
        if change.old is None:
            self._runners[uid] = runner = self._start(self, change.last)
            self._tasks[uid] = self._spawn(runner.run())
        elif change.new is None:
            self._runners.pop(uid, None)
            task = self._tasks.pop(uid, None)
            if task is not None and task is not asyncio.current_task():
                self._cancel(task)
            self._end_namespace(change.last["metadata"]["namespace"])
        elif _grace_of(change.new) != _grace_of(change.old) and not self._is_lost(change.new):
            self._runners[uid].end()

    def _is_lost(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self.nodes.lost

    def _end_namespace(self, name: str) -> None:
        namespace = self.store.get("namespaces", "", name)
        if namespace and "deletionTimestamp" in namespace["metadata"] and not self.store.all("pods", name):
            for event in self.store.all("events", name):
                self.store.remove("events", event)
            self.store.remove("namespaces", namespace)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._report)
        return task

    def _cancel(self, task: asyncio.Task[None]) -> None:
        # Once, since what a task does at its end must not be cut. Task.cancelling() would not do: it also
        # counts the cancel of a time-out that has just run out, and the task goes on after that.
        if task not in self._cancelled:
            self._cancelled.add(task)
            task.cancel()

    def _report(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._cancelled.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self.failures.append(problem)


def _grace_of(pod: Object) -> int | None:
    return pod["metadata"].get("deletionGracePeriodSeconds")


def now_of(store: Store) -> datetime:
    """The cluster's clock."""
    return datetime.fromtimestamp(store.clock.now_ns() / 1e9 + store.skew_s, UTC)
