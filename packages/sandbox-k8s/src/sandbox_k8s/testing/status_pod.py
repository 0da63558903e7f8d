"""Pods without a process: they go the way of a recording."""

import asyncio

from . import deletion, states
from .courses import Course, Step, Teller, is_without_node
from .kubelet import Kubelet, now_of
from .status_launcher import StatusLauncher
from .store import Object

_SIGKILL = 137
_END_S, _GONE_S = 0.2, 0.4
"""From the end of the grace to the last status, and from there until the pod is gone; as recorded."""


class StatusPod:
    """Tells a course, or runs for ever; then ends as a program that ignores SIGTERM.

    Args:
        course: What happens to the pod.
        address: What it shows as its address.

    Attributes:
        launcher: Answers through the pod proxy; None before the pod was ready, and when its command starts no
            launcher.
    """

    def __init__(self, kubelet: Kubelet, pod: Object, course: Course, address: str) -> None:
        self._kubelet = kubelet
        self._pod = pod
        self._course = course
        self._address = address
        self._ending = asyncio.Event()
        self._told_deletion = False
        self.launcher: StatusLauncher | None = None

    def end(self) -> None:
        """Somebody asked for its deletion."""
        if not self._told_deletion:
            self._ending.set()

    async def run(self) -> None:
        """Live, until the pod is gone."""
        course = self._course
        told = await self._tell(course)
        if told:
            return
        await self._ending.wait()
        if any("deletion" in step for step in course.steps) and not any(
            "gone" in step for step in course.steps
        ):
            return  # seen: a pod whose pull stalls stays Terminating
        await self._terminate()

    async def _tell(self, course: Course) -> bool:
        """Go the course's way until somebody deletes the pod; True when the course itself ended it."""
        kubelet = self._kubelet
        begun = now_of(kubelet.store)
        begun_s = asyncio.get_running_loop().time()
        own_node = any("node" in step for step in course.steps)
        node = await self._place(course, own=own_node)
        if node is None:
            return False
        teller = Teller(course, self._pod, node=node, address=self._address, now=begun, speed=kubelet.speed)
        for step in course.steps:
            if await self._ended_before(begun_s + step["after_s"] / kubelet.speed):
                return False
            if self._apply(step, teller, node):
                return True
        return False

    async def _place(self, course: Course, *, own: bool) -> str | None:
        """The pod's node; an empty name for a course of a pod that finds none; None when it was deleted."""
        if is_without_node(course.steps[0]):
            return ""
        kubelet = self._kubelet
        if own:
            name = f"node-of-{self._pod['metadata']['name']}"
            kubelet.nodes.add(name)
        else:
            name, _ = kubelet.nodes.place(self._pod)
        return None if kubelet.bind(self._pod, name) is None else name

    def _apply(self, step: Step, teller: Teller, node: str) -> bool:
        """What one step says, its events first as the kubelet sends them. True when the pod is gone."""
        kubelet = self._kubelet
        for event in step.get("events", ()):
            if event["reason"] != "Scheduled":
                self._send(teller.event(event))
        if "node" in step and node:
            kubelet.nodes.tell(node, teller.node(step))
        found = kubelet.current(self._pod)
        if "status" in step and found is not None:
            found = kubelet.report(found, _over(found["status"], teller.status(step)))
            if self.launcher is None and found is not None and states.is_ready(found):
                self.launcher = StatusLauncher.of(found)
        if "deletion" in step and found is not None:
            self._told_deletion = True
            deletion.begin(kubelet.store, "pods", found, None)
        if "gone" in step:
            kubelet.gone(self._pod)
        return "gone" in step

    def _send(self, event: Object) -> None:
        """A new event, or a repetition that raises the count of one."""
        store = self._kubelet.store
        metadata = event["metadata"]
        old = store.get("events", metadata["namespace"], metadata["name"])
        if old is None:
            store.create("events", event)
        else:
            store.replace("events", old, {**event, "metadata": old["metadata"]})

    async def _ended_before(self, at_s: float) -> bool:
        try:
            async with asyncio.timeout_at(at_s):
                await self._ending.wait()
        except TimeoutError:
            return False
        return True

    def _last_status(self, found: Object) -> Object:
        phase = found["status"]["phase"]
        if phase == "Pending":
            return states.ended_before_it_ran(found)
        if phase == "Running":
            return states.ended(found, self._kubelet.store.now(), _SIGKILL, last=True)
        return found["status"]

    async def _terminate(self) -> None:
        kubelet = self._kubelet
        found = kubelet.current(self._pod)
        if found is None:
            return
        kubelet.event(found, "Killing", f"Stopping container {found['spec']['containers'][0]['name']}")
        while True:
            grace_s: int = found["metadata"]["deletionGracePeriodSeconds"]
            self._ending.clear()
            loop = asyncio.get_running_loop()
            if not await self._ended_before(loop.time() + (grace_s + _END_S) / kubelet.speed):
                break
            found = kubelet.current(self._pod)
            if found is None:
                return
        found = kubelet.current(self._pod)
        if found is not None:
            kubelet.report(found, self._last_status(found))
        await asyncio.sleep(_GONE_S / kubelet.speed)
        kubelet.gone(self._pod)


def _over(old: Object, told: Object) -> Object:
    """What is told, over what is there: conditions of others stay, as a kubelet leaves them."""
    kinds = {one["type"] for one in told["conditions"]}
    others = [one for one in old.get("conditions", []) if one["type"] not in kinds]
    return {**old, **told, "conditions": [*others, *told["conditions"]]}
