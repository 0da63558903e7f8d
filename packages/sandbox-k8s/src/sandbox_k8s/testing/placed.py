"""A pod that waits for a node, and then lives on it."""

import asyncio
from collections.abc import Callable

from .courses import without_node
from .kubelet import Kubelet, Runner
from .process_pod import ProcessPod
from .status_launcher import StatusLauncher
from .status_pod import StatusPod
from .store import Object


class Placed:
    """The runner of a pod that nobody doomed.

    Args:
        make: Makes the runner for the time on the node.
        release: Called when the pod is gone.

    Attributes:
        inner: The pod on its node; None while it has none.
    """

    def __init__(
        self,
        kubelet: Kubelet,
        pod: Object,
        make: Callable[[], Runner],
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self.inner: Runner | None = None
        self._kubelet = kubelet
        self._pod = pod
        self._make = make
        self._release = release

    def end(self) -> None:
        """Somebody asked for the pod's deletion; without a node the pod is gone at once."""
        if self.inner is not None:
            self.inner.end()

    async def run(self) -> None:
        """Live, until the pod is gone."""
        try:
            while True:
                node, cause = self._kubelet.nodes.place(self._pod)
                if node:
                    break
                await self._wait(cause)
            self.inner = self._make()
            await self.inner.run()
        finally:
            self._release()

    async def _wait(self, cause: str) -> None:
        """Say why there is no node, until nodes change."""
        course = without_node(self._kubelet.courses[cause])
        telling = asyncio.create_task(StatusPod(self._kubelet, self._pod, course, "").run())
        try:
            await self._kubelet.nodes_change()
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


def process_of(runner: Runner | None) -> ProcessPod | None:
    """The pod with a process that this runs; None if it runs another kind, or none yet."""
    inner = runner.inner if isinstance(runner, Placed) else runner
    return inner if isinstance(inner, ProcessPod) else None


def launcher_of(runner: Runner | None) -> StatusLauncher | None:
    """What answers for a pod without a process; None when nothing does."""
    inner = runner.inner if isinstance(runner, Placed) else runner
    return inner.launcher if isinstance(inner, StatusPod) else None
