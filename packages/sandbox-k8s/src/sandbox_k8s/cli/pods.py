"""The sandboxes of a cluster as their pods show them, and one of them by its id."""

import difflib
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from sandbox_k8s.errors import ClusterError, ConfigError
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.api import PodApi, Request
from sandbox_k8s.kubernetes.classify import classify
from sandbox_k8s.kubernetes.diagnosis import Diagnosis
from sandbox_k8s.kubernetes.explain import in_words
from sandbox_k8s.kubernetes.records import PodRecord

from .where import Cluster

_log = logging.getLogger("sandbox_k8s")
_POD_PREFIX = "sbx-"
_NEAR = 5


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox of a cluster.

    Attributes:
        node: Empty before it has one.
        diagnosis: What its signs say.
    """

    record: PodRecord
    pod: dict[str, Any]
    run: str
    node: str
    image: str
    diagnosis: Diagnosis

    @property
    def state(self) -> str:
        """``starting``, ``running``, ``detached`` or ``dead``, as `SandboxClient.list` says it."""
        held = self.record
        return "dead" if held.ended else "starting" if held.starting else held.state


async def overview(api: PodApi, place: Cluster) -> list[PodView]:
    """All sandboxes of the place, by age; events are asked for when one of them is not ready."""
    pods = filter(records.is_sandbox, (await api.list(records.selector(place.run))).items)
    held: list[tuple[dict[str, Any], PodRecord]] = []
    for pod in pods:
        try:
            held.append((pod, records.read_record(pod, place.config.cluster)))
        except ConfigError as problem:
            _log.warning("%s; left out", problem)
    found = {pod["metadata"]["uid"]: seen(pod) for pod, _ in held}
    if any(one.state != "ready" for one in found.values()):
        events = await _events_by_pod(api, place)
        found |= {
            uid: seen(pod, events[uid])
            for pod, _ in held
            if found[uid := pod["metadata"]["uid"]].state != "ready"
        }
    views = [_view(pod, record, found[pod["metadata"]["uid"]]) for pod, record in held]
    return sorted(views, key=lambda view: view.record.handle.created_ns)


def seen(pod: dict[str, Any], events: Sequence[dict[str, Any]] = ()) -> Diagnosis:
    """What a pod's signs say; a deletion that nothing else explains is its owner's most likely."""
    found = classify(pod, events)
    if found.failure != "deleted":
        return found
    return Diagnosis(state="stopping", why="it is being deleted", evidence=found.evidence)


async def events_of(api: PodApi, namespace: str, pod: str | None) -> list[dict[str, Any]]:
    """Events about a pod, or about all pods of the namespace."""
    selector = "involvedObject.kind=Pod" + (f",involvedObject.name={pod}" if pod else "")
    read = Request("GET", f"api/v1/namespaces/{namespace}/events", {"fieldSelector": selector})
    return (await api.ask(read, "listing events"))["items"]


async def find_pod(api: PodApi, place: Cluster, wanted: str) -> dict[str, Any]:
    """The pod of a sandbox by its id, the beginning of it, or the pod's name.

    Raises:
        ConfigError: None or several of them begin so; the message names near ones.
    """
    name = wanted if wanted.startswith(_POD_PREFIX) else f"{_POD_PREFIX}{wanted}"
    exact = await api.find(name)
    if exact is not None:
        return exact
    listed = filter(records.is_sandbox, (await api.list(records.selector(place.run))).items)
    pods = {pod["metadata"]["name"]: pod for pod in listed}
    chosen = [pod for known, pod in pods.items() if known.startswith(name)]
    if len(chosen) == 1:
        return chosen[0]
    ids = sorted(known.removeprefix(_POD_PREFIX) for known in pods)
    raise ConfigError(f"{unknown_id(wanted, ids)}{place.of_run}; {place.at}")


def unknown_id(wanted: str, ids: list[str]) -> str:
    """Which sandboxes may have been meant."""
    beginning = [one for one in ids if one.startswith(wanted.removeprefix(_POD_PREFIX))]
    if beginning:
        return f"{len(beginning)} sandboxes begin with {wanted!r}: {', '.join(beginning[:_NEAR])}"
    near = (
        difflib.get_close_matches(wanted.removeprefix(_POD_PREFIX), ids, n=_NEAR, cutoff=0.5) or ids[:_NEAR]
    )
    there = f"there are {len(ids)}, for example {', '.join(near)}" if near else "there are none"
    return f"no sandbox begins with {wanted!r}; {there}"


async def _events_by_pod(api: PodApi, place: Cluster) -> dict[str, list[dict[str, Any]]]:
    by_uid: dict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        for event in await events_of(api, place.config.namespace, None):
            by_uid[event["involvedObject"].get("uid", "")].append(event)
    except ClusterError as problem:
        _log.warning("without events, which tell more and earlier: %s", in_words(problem))
    return by_uid


def _view(pod: dict[str, Any], record: PodRecord, diagnosis: Diagnosis) -> PodView:
    main = next(one for one in pod["spec"]["containers"] if one["name"] == records.CONTAINER)
    return PodView(
        record=record,
        pod=pod,
        run=pod["metadata"]["labels"][records.RUN],
        node=pod["spec"].get("nodeName", ""),
        image=main["image"],
        diagnosis=diagnosis,
    )
