"""Who owns a pod's sandbox: epochs won by conditional changes of annotations, and what only owners may do."""

from collections.abc import Mapping
from typing import Any

import anyio

from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import FencedError, SandboxLostError, SandboxNotFoundError
from sandbox_k8s.handle import PodPlace, SandboxHandle

from . import records
from .api import ConflictError, PodApi, PodMissingError
from .classify import classify
from .config import KubernetesConfig
from .manifest import pod_name
from .records import PodRecord
from .watch import PodWatch

_TRIES = 20
_RENEW_BEFORE = 2 / 3
_GONE_S = 20.0


class Owners:
    """Changes of ownership and their conditions.

    Every change names the version of the pod that it is about. The kubelet changes pods too, so a conflict
    alone means nothing: the pod is read again, and only another epoch there means another owner.
    """

    def __init__(self, api: PodApi, watch: PodWatch, config: KubernetesConfig, clock: Clock) -> None:
        self._api = api
        self._watch = watch
        self._config = config
        self._clock = clock
        self._expires_ns: dict[str, int] = {}

    def hold(self, held: PodRecord) -> None:
        """Remember until when a sandbox of ours is recorded as alive."""
        self._expires_ns[held.handle.sandbox_id] = held.expires_ns

    def let_go(self, handle: SandboxHandle) -> None:
        """Forget it."""
        self._expires_ns.pop(handle.sandbox_id, None)

    async def read(self, place: PodPlace, sandbox_id: str) -> tuple[dict[str, Any], PodRecord]:
        """A sandbox's pod as it is now.

        Raises:
            SandboxNotFoundError: It is gone, was replaced, or has ended; with what is known of the reason.
        """
        try:
            pod = await self._api.get(place.pod)
        except PodMissingError as problem:
            raise SandboxNotFoundError(f"sandbox {sandbox_id}: there is no pod {place.pod}") from problem
        if pod["metadata"]["uid"] != place.uid:
            raise SandboxNotFoundError(f"sandbox {sandbox_id}: pod {place.pod} is another one of that name")
        held = records.read_record(pod, place.cluster)
        if held.ended:
            found = classify(pod)
            raise SandboxNotFoundError(
                f"sandbox {sandbox_id} has ended: {found.why}", evidence=found.evidence_text
            )
        return pod, held

    async def win(self, place: PodPlace, sandbox_id: str) -> tuple[dict[str, Any], PodRecord]:
        """Use up the next epoch number; who does is about to own the sandbox.

        Raises:
            FencedError: Another worker was quicker.
            SandboxNotFoundError: It has ended.
        """
        _, held = await self.read(place, sandbox_id)
        epoch = held.handle.epoch + 1
        for _ in range(_TRIES):
            changes = {
                records.EPOCH: str(epoch),
                records.OWNER: self._clock.new_id(),
                records.STATE: "running",
                records.EXPIRES: str(self._later_ns()),
            }
            try:
                won = await self._api.annotate(place.pod, changes, held.resource_version)
                return won, records.read_record(won, place.cluster)
            except ConflictError:
                _, held = await self.read(place, sandbox_id)
            if held.handle.epoch >= epoch:
                break
        raise FencedError(f"sandbox {sandbox_id} is being attached by another worker at this moment")

    async def renew(self, handle: SandboxHandle) -> None:
        """Push the time on after which a reaper may come, when a third of it is over.

        Raises:
            FencedError: Another worker owns it.
        """
        left_s = (self._expires_ns.get(handle.sandbox_id, 0) - self._clock.now_ns()) / 1e9
        if left_s > self._config.record_s * _RENEW_BEFORE:
            return
        expires_ns = self._later_ns()
        await self._change(handle, {records.EXPIRES: str(expires_ns)})
        if handle.sandbox_id in self._expires_ns:
            self._expires_ns[handle.sandbox_id] = expires_ns

    async def leave(self, handle: SandboxHandle, expires_ns: int) -> None:
        """Record that it waits for its next owner; another owner's record is left alone."""
        try:
            await self._change(handle, {records.STATE: "detached", records.EXPIRES: str(expires_ns)})
        except FencedError:
            return

    async def delete(self, handle: SandboxHandle) -> None:
        """Delete a sandbox's pod and wait until it is gone.

        Raises:
            FencedError: Another worker owns it.
            SandboxLostError: Its node does not confirm its end.
        """
        name = pod_name(handle.sandbox_id)
        known = self._known(handle)
        for _ in range(_TRIES):
            pod = known or await self._owned(handle)
            if pod is None:
                return
            known = None
            metadata = pod["metadata"]
            try:
                await self._api.delete(
                    name, uid=metadata["uid"], resource_version=metadata["resourceVersion"]
                )
                break
            except ConflictError:
                continue
        else:
            raise SandboxLostError(f"pod {name} changes faster than it can be deleted")
        with anyio.move_on_after(_GONE_S) as waiting:
            await self._gone(name)
        if waiting.cancelled_caught and await self._owned(handle) is not None:
            raise SandboxLostError(
                f"pod {name} is being deleted, but its node did not confirm its end within {_GONE_S:.0f} s"
            )

    async def _change(self, handle: SandboxHandle, changes: Mapping[str, str]) -> None:
        for _ in range(_TRIES):
            pod = await self._owned(handle)
            if pod is None:
                return
            try:
                await self._api.annotate(pod["metadata"]["name"], changes, pod["metadata"]["resourceVersion"])
                return
            except ConflictError:
                continue
            except PodMissingError:
                return
        raise SandboxLostError(f"pod {pod_name(handle.sandbox_id)} changes faster than it can be changed")

    async def _owned(self, handle: SandboxHandle) -> dict[str, Any] | None:
        """The pod now, when the caller owns it; None when it is gone.

        Raises:
            FencedError: Another worker owns it.
        """
        pod = await self._api.find(pod_name(handle.sandbox_id))
        uid = handle.place.uid if isinstance(handle.place, PodPlace) else ""
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        epoch = int(records.annotations_of(pod)[records.EPOCH])
        if epoch != handle.epoch:
            raise FencedError(f"sandbox {handle.sandbox_id} belongs to epoch {epoch}, you are {handle.epoch}")
        return pod

    def _known(self, handle: SandboxHandle) -> dict[str, Any] | None:
        """What the watch knows, if it is of this epoch: asking mostly tells no more."""
        followed = self._watch.find(pod_name(handle.sandbox_id))
        pod = None if followed is None or followed.gone else followed.pod
        if pod is None or records.annotations_of(pod)[records.EPOCH] != str(handle.epoch):
            return None
        return pod

    async def _gone(self, name: str) -> None:
        followed = self._watch.follow(name)
        while not followed.gone:
            await followed.changed.wait()

    def _later_ns(self) -> int:
        return self._clock.now_ns() + int(self._config.record_s * 1e9)
