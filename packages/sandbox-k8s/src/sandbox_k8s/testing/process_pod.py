"""Pods with a process: the pod's own command runs, in bubblewrap, and its status is what became of it."""

import asyncio
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox_k8s.tools.layout import IMAGE_TREE

from . import states
from .container import Container, start
from .kubelet import Kubelet
from .logs import Log
from .store import Object
from .tree import python_mount

_LAST_S = 1.1
"""From a container's end to the phase that tells it; as recorded."""
_MESSAGE_LINES = 80
_START_ERROR = 128
_NOT_STARTED = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
    "failed: unable to start container process: "
)


class ProcessPod:
    """A pod whose one container is a process.

    Args:
        root: A folder of this machine for the pod's volumes.
        images: Folders of this machine by image name: what an image holds beside this machine's programs;
            seen at ``/sandbox-k8s``, and as the content of an image volume. The empty name is for all others.
        address: The pod's own.

    Attributes:
        main: Its container, once started.
        log: What the container printed.
    """

    def __init__(
        self, kubelet: Kubelet, pod: Object, *, root: Path, images: Mapping[str, Path], address: str
    ) -> None:
        self.address = address
        self.main: Container | None = None
        self.log = Log(kubelet.store)
        self._kubelet = kubelet
        self._pod = pod
        self._root = root
        self._images = images
        self._reason = ""
        self._containers: list[asyncio.Task[Container]] = []
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Somebody asked for its deletion."""
        self._ending.set()

    def fail(self, reason: str) -> None:
        """Kill it as the kernel or the kubelet would.

        Args:
            reason: What its container says then, as ``OOMKilled``; ``Evicted`` is said by the pod.
        """
        self._reason = reason
        if self.main is not None:
            self.main.signal(signal.SIGKILL)

    async def run(self) -> None:
        """Live, until the pod is gone."""
        try:
            await self._live()
            await self._ending.wait()
            self._kubelet.gone(self._pod)
        finally:
            await asyncio.shield(self._end_all())
            shutil.rmtree(self._root, ignore_errors=True)

    async def _live(self) -> None:
        kubelet, store = self._kubelet, self._kubelet.store
        node, _ = kubelet.nodes.place(self._pod)
        pod = kubelet.bind(self._pod, node)
        pod = pod and kubelet.report(pod, states.creating(pod, store.now()))
        if pod is None:
            return
        problem = self._objection() or await self._initialise()
        if problem:
            kubelet.event(pod, "Failed", f"Error: {problem}", warning=True)
            self._report_end(_START_ERROR, problem, last=True)
            return
        image = pod["spec"]["containers"][0]["image"]
        present = f'Container image "{image}" already present on machine and can be accessed by the pod'
        kubelet.event(pod, "Pulled", present)
        kubelet.event(pod, "Created", "Container created")
        self.main = await self._start(pod["spec"]["containers"][0], self.log)
        if self.main.pid and not self.main.start_error and self.main.exit_code is None:
            kubelet.event(pod, "Started", "Container started")
            found = kubelet.current(pod)
            if found is not None:
                ids = [store.clock.new_id() * 2]
                kubelet.report(found, states.running(found, store.now(), self.address, ids))
        await self._until_end(self.main)

    async def _until_end(self, main: Container) -> None:
        waiting = asyncio.create_task(main.wait())
        stopping = asyncio.create_task(self._stop_when_asked(main))
        try:
            code = await waiting
        finally:
            stopping.cancel()
        if main.start_error:
            self._reason, code = "StartError", _START_ERROR
            self._report_end(code, _NOT_STARTED + main.start_error, last=False)
        else:
            self._report_end(code, self._message(code), last=False)
        if not self._ending.is_set():
            await asyncio.sleep(_LAST_S / self._kubelet.speed)
        self._report_end(code, "", last=True)

    async def _stop_when_asked(self, main: Container) -> None:
        """SIGTERM, then SIGKILL when the grace is over; also when the pod's time is."""
        limit = self._pod["spec"].get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(limit):
                await self._ending.wait()
        except TimeoutError:
            self._reason = "DeadlineExceeded"
            self._kubelet.event(
                self._pod, self._reason, "Pod was active on the node longer than the specified deadline"
            )
            grace_s: float = self._pod["spec"]["terminationGracePeriodSeconds"]
        else:
            found = self._kubelet.current(self._pod)
            grace_s = 0 if found is None else found["metadata"]["deletionGracePeriodSeconds"]
        self._kubelet.event(
            self._pod, "Killing", f"Stopping container {self._pod['spec']['containers'][0]['name']}"
        )
        main.signal(signal.SIGTERM)
        await asyncio.sleep(grace_s)
        main.signal(signal.SIGKILL)

    def _report_end(self, code: int, message: str, *, last: bool) -> None:
        found = self._kubelet.current(self._pod)
        if found is None:
            return
        of_pod = self._reason in ("Evicted", "DeadlineExceeded")
        reason = "" if of_pod else self._reason
        status = states.ended(
            found, self._kubelet.store.now(), code, reason=reason, message=message, last=last
        )
        if of_pod and last:
            status["reason"] = self._reason
        self._kubelet.report(found, status)

    def _message(self, code: int) -> str:
        said = (self._root / "termination-log").read_text("utf-8", "replace")
        fallback = self._pod["spec"]["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
        return self.log.tail(_MESSAGE_LINES) if not said and fallback and code != 0 else said

    def _objection(self) -> str:
        """What of this pod is not simulated; empty for nothing."""
        spec = self._pod["spec"]
        if len(spec["containers"]) > 1:
            return "sandbox_k8s.testing: a pod with a process has one container"
        if spec["restartPolicy"] != "Never":
            return "sandbox_k8s.testing: a pod with a process needs restartPolicy Never"
        if not spec["containers"][0].get("command"):
            return "no command specified"
        return ""

    async def _initialise(self) -> str:
        """Make the volumes and run the init containers; why that failed, or empty."""
        self._root.mkdir(parents=True)
        (self._root / "termination-log").touch()
        for volume in self._pod["spec"].get("volumes", ()):
            if "emptyDir" in volume:
                (self._root / f"volume-{volume['name']}").mkdir()
        for container in self._pod["spec"].get("initContainers", ()):
            log = Log(self._kubelet.store)
            code = await (await self._start(container, log)).wait()
            if code != 0:
                return f"init container {container['name']}: exit code {code}: {log.tail(5)}"
        return ""

    async def _start(self, container: Mapping[str, Any], log: Log) -> Container:
        mounts = self._mounts(container)
        name = self._pod["metadata"]["name"]
        starting = start(container, mounts, address=self.address, hostname=name, log=log)
        self._containers.append(task := asyncio.create_task(starting))
        return await asyncio.shield(task)

    async def _end_all(self) -> None:
        for task in self._containers:
            await (await task).kill()

    def _mounts(self, container: Mapping[str, Any]) -> list[tuple[Path, str, bool]]:
        mounts: list[tuple[Path, str, bool]] = []
        mounts.append(python_mount())
        main = container is self._pod["spec"]["containers"][0]
        if not main or container["image"] in self._images:
            mounts.append((self._image(container["image"]), IMAGE_TREE, False))
        volumes = {one["name"]: one for one in self._pod["spec"].get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            if "image" in volume:
                mounts.append((self._image(volume["image"]["reference"]), mount["mountPath"], False))
            elif "emptyDir" in volume:
                source = self._root / f"volume-{volume['name']}"
                mounts.append((source, mount["mountPath"], not mount.get("readOnly", False)))
        if main:
            mounts.append((self._root / "termination-log", "/dev/termination-log", True))
        return mounts

    def _image(self, name: str) -> Path:
        return self._images.get(name) or self._images[""]
