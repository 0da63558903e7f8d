"""Bringing images to nodes before sandboxes need them, with pods that end at once.

No DaemonSet and no privileges: a pod per node and batch of images, one container per image, so that one
image that cannot be had does not keep the others away. Containers run the loader of the tools tree, which is
there whatever the image has.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import ClusterError

from . import records
from .api import PodApi, Request
from .classify import classify
from .config import KubernetesConfig
from .diagnosis import Diagnosis, Evidence, diagnose, overdue
from .failure import FailureName
from .manifest import prefetch_manifest
from .watch import FollowedPod, PodWatch

_log = logging.getLogger("sandbox_k8s")
_IMAGES_PER_POD = 8
_PODS_AT_ONCE = 16
_CLEAN_UP_S = 60.0
_NOT_FOUND, _FORBIDDEN = 404, 403
# The kubelet comes to these with the image at hand: `prefetch` is about images, not about what they run.
_AFTER_PULL = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "PreCreateHookError",
    "RunContainerError",
    "CrashLoopBackOff",
)
_UNKNOWN_END = "ContainerStatusUnknown"


class PrefetchedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image on a node.

    Attributes:
        diagnosis: Why it is not there; None when it is.
    """

    node: str
    image: str
    diagnosis: Diagnosis | None = None


Progress = Callable[[PrefetchedImage, int, int], object]


class Prefetch:
    """One round of prefetching.

    Args:
        make_annotations: Those of a pod that the reaper may take when it is over: the request's id goes in.
        progress: Told of each image of each node, with how many are done, and of how many.
    """

    def __init__(
        self,
        api: PodApi,
        watch: PodWatch,
        config: KubernetesConfig,
        clock: Clock,
        make_annotations: Callable[[str], dict[str, str]],
        progress: Progress | None,
    ) -> None:
        self._api = api
        self._watch = watch
        self._config = config
        self._clock = clock
        self._annotations = make_annotations
        self._progress = progress
        self._results: dict[tuple[str, str], PrefetchedImage] = {}
        self._total = 0
        self._told: set[tuple[str, FailureName | None]] = set()

    async def run(
        self, images: Sequence[str], nodes: Sequence[str] | Mapping[str, str] | None
    ) -> tuple[PrefetchedImage, ...]:
        """Bring all images to all nodes; see `SandboxClient.prefetch`."""
        images = list(dict.fromkeys(images))
        ready, unready = await self._nodes(nodes)
        self._total = len(images) * (len(ready) + len(unready))
        for node, why in unready.items():
            for image in images:
                self._done(node, image, why)
        limiter = anyio.CapacityLimiter(_PODS_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for first in range(0, len(images), _IMAGES_PER_POD):
                for node in ready:
                    tasks.start_soon(self._bring, node, images[first : first + _IMAGES_PER_POD], limiter)
        return tuple(self._results[node, image] for node in (*ready, *unready) for image in images)

    async def _nodes(
        self, wanted: Sequence[str] | Mapping[str, str] | None
    ) -> tuple[list[str], dict[str, Diagnosis]]:
        """Names of the nodes, and those that take no pods with the reason."""
        if wanted is not None and not isinstance(wanted, Mapping):
            return await self._named(list(dict.fromkeys(wanted)))
        labels = {"kubernetes.io/arch": self._config.architecture, **self._config.node_selector}
        labels |= wanted or {}
        query = {"labelSelector": ",".join(f"{name}={value}" for name, value in labels.items())}
        listing = await self._api.ask(Request("GET", "api/v1/nodes", query), "listing nodes")
        ready: list[str] = []
        unready: dict[str, Diagnosis] = {}
        for node in listing["items"]:
            name: str = node["metadata"]["name"]
            why = _why_not(node, self._config.tolerations)
            if why is None:
                ready.append(name)
            else:
                unready[name] = why
        return ready, unready

    async def _named(self, names: Sequence[str]) -> tuple[list[str], dict[str, Diagnosis]]:
        """The nodes of these names: one that is not there would be waited for until the time is up."""
        known: list[str] = []
        missing: dict[str, Diagnosis] = {}
        for number, name in enumerate(names):
            try:
                await self._api.ask(Request("GET", f"api/v1/nodes/{name}"), f"reading node {name}")
            except ClusterError as problem:
                if problem.code == _FORBIDDEN:  # a Role of one namespace does not allow it
                    _log.info("whether the nodes are there is not known: %s", problem)
                    return [*known, *names[number:]], missing
                if problem.code != _NOT_FOUND:
                    raise
                missing[name] = diagnose("unschedulable_placement", f"there is no node {name!r}", final=True)
                continue
            known.append(name)
        return known, missing

    async def _bring(self, node: str, images: Sequence[str], limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            request = self._clock.new_id()
            containers = {f"image-{number}": image for number, image in enumerate(images)}
            pod = prefetch_manifest(
                self._config, containers, node=node, request=request, annotations=self._annotations(request)
            )
            followed = self._watch.follow(pod["metadata"]["name"])
            try:
                followed.created(await self._api.create(pod, records.REQUEST))
                await self._until_there(followed, node, containers)
            except ClusterError as problem:
                for image in images:
                    if (node, image) not in self._results:
                        self._done(node, image, problem.diagnosis)
            finally:
                await self._remove(followed, request)

    async def _until_there(self, followed: FollowedPod, node: str, containers: Mapping[str, str]) -> None:
        """Return when each image is there, or will not be."""
        left = dict(containers)
        deadline_s = anyio.current_time() + self._config.start_timeout_s
        give_up_s: dict[str, float] = {}
        while left:
            changed = followed.changed
            if followed.refused is not None:
                raise followed.refused
            now_s = anyio.current_time()
            for name, image in list(left.items()):
                found = of_container(followed, name)
                if found is not None and found.state == "failing":
                    self._tell_failing(node, image, found)
                    give_up_s.setdefault(name, min(deadline_s, now_s + self._config.failing_timeout_s))
                else:
                    give_up_s.pop(name, None)
                if found is not None and now_s >= give_up_s.get(name, deadline_s):
                    found = overdue(found)
                if found is None or found.state == "failed":
                    self._done(node, image, found)
                    del left[name]
            wake_s = min((give_up_s.get(name, deadline_s) for name in left), default=now_s)
            with anyio.move_on_at(wake_s):
                await changed.wait()

    def _tell_failing(self, node: str, image: str, found: Diagnosis) -> None:
        """Log what is waited for, once for all nodes: it may take minutes until it is given up."""
        if (image, found.failure) in self._told:
            return
        self._told.add((image, found.failure))
        text = "image %s on node %s is failing, and is given up after %.0f s of it: %s: %s"
        _log.warning(text, image, node, self._config.failing_timeout_s, found.failure, found.why)

    async def _remove(self, followed: FollowedPod, request: str) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLEAN_UP_S):
            self._watch.unfollow(followed.name)
            try:
                pod = followed.pod or await self._api.find(followed.name)
                if pod is not None and records.annotations_of(pod).get(records.REQUEST) == request:
                    await self._api.delete(followed.name, uid=pod["metadata"]["uid"], grace_s=0)
            except ClusterError as problem:
                _log.warning("pod %s is left to the reaper: %s", followed.name, problem)

    def _done(self, node: str, image: str, diagnosis: Diagnosis | None) -> None:
        result = PrefetchedImage(node=node, image=image, diagnosis=diagnosis)
        self._results[node, image] = result
        if self._progress is not None:
            self._progress(result, len(self._results), self._total)


def of_container(followed: FollowedPod, name: str) -> Diagnosis | None:
    """How one container's image is doing; None when the node has it."""
    pod = followed.pod
    if pod is None:
        return Diagnosis(state="starting", waits_for="node", why="it was not seen yet")
    status: Mapping[str, Any] = pod.get("status", {})
    own = [one for one in status.get("containerStatuses") or () if one["name"] == name]
    if any(one.get("imageID") or _came_to_run(one["state"]) for one in own):
        return None
    events = [one for one in followed.events if _concerns(one, name)]
    its_own = f"spec.containers{{{name}}}"  # not an init container's, which brings the tools
    if any(one["reason"] == "Pulled" and one["involvedObject"].get("fieldPath") == its_own for one in events):
        return None
    containers = [one for one in pod["spec"]["containers"] if one["name"] == name]
    view = {
        **pod,
        "spec": {**pod["spec"], "containers": containers},
        "status": {**status, "containerStatuses": own},
    }
    return classify(view, events, deleted=followed.gone)


def _came_to_run(state: Mapping[str, Any]) -> bool:
    """Whether a container got as far as one gets with its image alone, even if nothing in it could start."""
    if "waiting" in state:
        return state["waiting"].get("reason") in _AFTER_PULL
    return "running" in state or ("terminated" in state and state["terminated"].get("reason") != _UNKNOWN_END)


def _concerns(event: Mapping[str, Any], container: str) -> bool:
    """Whether an event is about that container, or about none."""
    field: str = event["involvedObject"].get("fieldPath") or ""
    return not field.startswith("spec.containers{") or field == f"spec.containers{{{container}}}"


def _why_not(node: Mapping[str, Any], tolerations: Iterable[Mapping[str, Any]]) -> Diagnosis | None:
    """Why a node takes no pods; None when it does."""
    name = node["metadata"]["name"]
    conditions: list[dict[str, Any]] = node["status"].get("conditions") or []
    ready = next((one for one in conditions if one["type"] == "Ready"), {"status": "Unknown"})
    if ready["status"] != "True":
        said = Evidence(f"node {name}", f"Ready is {ready['status']}: {ready.get('message', '')}")
        return diagnose("unschedulable_nodes_down", f"node {name} is not ready", said, final=True)
    taints: list[dict[str, Any]] = node["spec"].get("taints") or []
    for taint in taints:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(one, taint) for one in tolerations):
            said = Evidence(f"node {name}", f"taint {taint['key']}:{taint['effect']}")
            down = str(taint["key"]).startswith("node.kubernetes.io/")
            failure = "unschedulable_nodes_down" if down else "unschedulable_placement"
            return diagnose(failure, f"node {name} takes no such pods", said, final=True)
    if node["spec"].get("unschedulable"):
        return diagnose("unschedulable_nodes_down", f"node {name} is cordoned", final=True)
    return None


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")
