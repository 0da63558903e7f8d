"""Who owns a pod's sandbox: epochs won by conditional changes of annotations, and what only owners may do."""

from collections.abc import Callable, Mapping
from typing import Any

import anyio

from sandbox_k8s.backend import RecordTime
from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import ConfigError, FencedError, SandboxLostError, SandboxNotFoundError
from sandbox_k8s.handle import PodPlace, SandboxHandle

from . import records
from .api import ConflictError, PodApi, PodMissingError
from .classify import classify
from .config import KubernetesConfig
from .manifest import pod_name
from .records import PodRecord
from .watch import PodWatch

_TRIES = 20
_GONE_S = 20.0


class Owners:
    """Changes of ownership and their conditions.

    Every change names the version of the pod that it is about. The kubelet changes pods too, so a conflict
    alone means nothing: the pod is read again, and only another epoch there means another owner.

    A higher epoch in the record is somebody who is on the way to the launcher, and may never get there. The
    launcher alone says who the owner is: one that it still takes for the owner keeps the record alive under
    the other's number, but never shortens it, and never deletes the pod.
    """

    def __init__(self, api: PodApi, watch: PodWatch, config: KubernetesConfig, clock: Clock) -> None:
        self._api = api
        self._watch = watch
        self._config = config
        self._clock = clock
        self._expires_ns: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._claims: dict[str, tuple[str, int]] = {}
        """Under which name a sandbox of ours was last claimed anew, got through or not; and the epoch before
        this and the claims of ours that led to it: with others in between it is no longer ours."""

    def hold(self, held: PodRecord) -> None:
        """Remember until when a sandbox of ours is recorded as alive."""
        self._expires_ns[held.handle.sandbox_id] = held.expires_ns
        self._leaving.discard(held.handle.sandbox_id)

    def let_go(self, handle: SandboxHandle) -> None:
        """Forget it."""
        self._expires_ns.pop(handle.sandbox_id, None)
        self._leaving.discard(handle.sandbox_id)
        self._claims.pop(handle.sandbox_id, None)

    def record(self, handle: SandboxHandle) -> RecordTime:
        """How much is left of what is recorded of a sandbox; nothing of one that is not held."""
        left_s = (self._expires_ns.get(handle.sandbox_id, 0) - self._clock.now_ns()) / 1e9
        return RecordTime(max(0.0, left_s), records.lasts_s(self._config.record_s, handle.lease_s))

    async def read(self, place: PodPlace, sandbox_id: str) -> tuple[dict[str, Any], PodRecord]:
        """A sandbox's pod as it is now.

        Raises:
            SandboxNotFoundError: It is gone, was replaced or restarted, or has ended; with what is known of
                the reason.
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
        now = records.place_of(pod, place.cluster)
        if now.restart_count > place.restart_count:
            raise SandboxNotFoundError(
                f"sandbox {sandbox_id}: its container was restarted, so its shells and processes are gone"
            )
        return pod, held

    async def win(self, place: PodPlace, sandbox_id: str) -> tuple[dict[str, Any], PodRecord]:
        """Use up the next epoch number; who does is about to own the sandbox.

        Raises:
            FencedError: Another worker was quicker.
            SandboxNotFoundError: It has ended, or never came up.
        """
        _, held = await self.read(place, sandbox_id)
        if held.starting:
            raise SandboxNotFoundError(f"sandbox {sandbox_id} is still being started by its first owner")
        epoch, claim = held.handle.epoch + 1, self._clock.new_id()
        if sandbox_id in self._expires_ns:
            last, after = self._claims.get(sandbox_id, ("", 0))
            after = after if held.owner == last else held.handle.epoch
            self._claims[sandbox_id] = claim, after  # before it is sent: the answer may never come
        for _ in range(_TRIES):
            changes = {
                records.EPOCH: str(epoch),
                records.OWNER: claim,
                records.STATE: "running",
                # Never sooner: if we do not get through to the launcher, it waits on for its next owner.
                records.EXPIRES: str(max(held.expires_ns, self._later_ns(held.handle.lease_s))),
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
            FencedError: A later owner has detached it.
        """
        if not self.record(handle).due:
            return
        expires_ns = self._later_ns(handle.lease_s)

        def later(held: PodRecord) -> dict[str, str]:
            if held.state == "running":
                return {records.EXPIRES: str(max(held.expires_ns, expires_ns))}
            if held.handle.epoch > handle.epoch:
                raise _fenced(handle, held.handle.epoch)
            if handle.sandbox_id in self._leaving or handle.sandbox_id not in self._expires_ns:
                return {}  # this worker is just detaching it, or has, and has said how long it waits
            return {records.STATE: "running", records.EXPIRES: str(expires_ns)}

        await self._change(handle, later, self._known(handle))
        if handle.sandbox_id in self._expires_ns:
            self._expires_ns[handle.sandbox_id] = expires_ns

    async def leave(self, handle: SandboxHandle, expires_ns: int) -> None:
        """Record that it waits for its next owner; a later owner's record is only made to last as long.

        If that fails, it may have been recorded all the same: the next renewal takes it back.
        """

        def waits(held: PodRecord) -> dict[str, str]:
            if held.handle.epoch == handle.epoch:
                return {records.STATE: "detached", records.EXPIRES: str(expires_ns)}
            if held.state == "running" and held.expires_ns < expires_ns:
                return {records.EXPIRES: str(expires_ns)}
            return {}

        self._leaving.add(handle.sandbox_id)
        try:
            await self._change(handle, waits)
        except BaseException:
            self._leaving.discard(handle.sandbox_id)
            if handle.sandbox_id in self._expires_ns:
                self._expires_ns[handle.sandbox_id] = 0
            raise

    async def undo(self, name: str, request: str, known: dict[str, Any] | None) -> None:
        """Delete the pod that a create of ours made, if it did, unless somebody has taken it over by now.

        Args:
            name: Of the pod.
            request: The value of `records.REQUEST` that was created.
            known: The pod as it was seen last, which saves a request.

        Raises:
            ClusterError: It is still there.
        """
        tries = 0
        while True:
            pod = known or await self._api.find(name)
            known = None
            said = {} if pod is None else records.annotations_of(pod)
            if pod is None or said.get(records.REQUEST) != request or said.get(records.OWNER) != request:
                return
            metadata = pod["metadata"]
            try:
                await self._api.delete(
                    name, uid=metadata["uid"], resource_version=metadata["resourceVersion"]
                )
                return
            except ConflictError:
                tries += 1
                if tries == _TRIES:
                    raise

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

    async def _change(
        self,
        handle: SandboxHandle,
        decide: Callable[[PodRecord], Mapping[str, str]],
        known: dict[str, Any] | None = None,
    ) -> None:
        """Change the record as ``decide`` says of the newest one; nothing is done to a pod that is gone.

        Args:
            handle: Whose.
            decide: The changes; none is a change, too.
            known: The pod as it was seen last, which saves a request when it is still so.
        """
        for _ in range(_TRIES):
            pod, was_known = known or await self._find(handle), known is not None
            known = None
            if pod is None:
                return
            changes = decide(records.read_record(pod, self._config.cluster))
            if not changes and was_known:
                continue
            if not changes:
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
        """The pod now, when nobody else claims it; None when it is gone.

        Raises:
            FencedError: Another worker owns it, or is about to.
        """
        pod = await self._find(handle)
        if pod is None:
            return None
        try:
            epoch = records.read_record(pod, self._config.cluster).handle.epoch
        except ConfigError:
            return pod  # somebody spoiled its record; it is still the very pod that this client made or took
        claim, after = self._claims.get(handle.sandbox_id, ("", 0))
        ours = after == handle.epoch and records.annotations_of(pod).get(records.OWNER) == claim
        if epoch != handle.epoch and not ours:
            raise _fenced(handle, epoch)
        return pod

    async def _find(self, handle: SandboxHandle) -> dict[str, Any] | None:
        """The pod now; None when it is gone."""
        pod = await self._api.find(pod_name(handle.sandbox_id))
        return pod if pod is not None and _is_of(handle, pod) else None

    def _known(self, handle: SandboxHandle) -> dict[str, Any] | None:
        """What the watch knows, if it is of this epoch: asking mostly tells no more."""
        followed = self._watch.find(pod_name(handle.sandbox_id))
        pod = None if followed is None or followed.gone else followed.pod
        if pod is None or not _is_of(handle, pod):
            return None
        if records.annotations_of(pod).get(records.EPOCH) != str(handle.epoch):
            return None
        return pod

    async def _gone(self, name: str) -> None:
        followed = self._watch.follow(name)
        while not followed.gone:
            await followed.changed.wait()

    def _later_ns(self, lease_s: float) -> int:
        return self._clock.now_ns() + int(records.lasts_s(self._config.record_s, lease_s) * 1e9)


def _is_of(handle: SandboxHandle, pod: Mapping[str, Any]) -> bool:
    """Whether it is the very pod, and not a later one of that name."""
    return isinstance(handle.place, PodPlace) and pod["metadata"]["uid"] == handle.place.uid


def _fenced(handle: SandboxHandle, epoch: int) -> FencedError:
    return FencedError(f"sandbox {handle.sandbox_id} belongs to epoch {epoch}, you are {handle.epoch}")
