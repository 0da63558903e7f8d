"""Courses: what happened to a pod on a real cluster, step by step, to be told again of other pods.

``courses.json`` holds one course per cause, made from recordings by `course_of`. Nothing in it is invented;
names, addresses and times are those of the pod that it is told of.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from importlib import resources
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from .store import Object

Step: TypeAlias = dict[str, Any]
ALIASES: Mapping[str, str] = {
    "crash": "crash-loop-always",
    "drain": "drained",
    "evicted": "ephemeral-storage-container",
    "image": "image-not-found",
    "oom": "oom-mid-run",
    "slow": "slow-pull",
}
"""Short names of causes."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_NEVER = "1970-"
_CONTAINER_ID = re.compile("containerd://[0-9a-f]{64}")
_CONTAINER = re.compile(r"\bmain\b")


class Course(NamedTuple):
    """What happened to one pod.

    Attributes:
        pod: What its steps call the pod: ``name``, ``namespace``, ``uid``, ``image``, ``created``.
        steps: Each with ``after_s`` since the create and any of ``status``, ``nodeName``, ``deletion`` (the
            grace of a delete that somebody asked for), ``events``, ``node`` and ``gone``.
    """

    pod: Mapping[str, str]
    steps: list[Step]


def load() -> dict[str, Course]:
    """All courses by cause."""
    text = resources.files(__name__.rpartition(".")[0]).joinpath("courses.json").read_text("utf-8")
    return {cause: Course(**words) for cause, words in json.loads(text).items()}


def course_of(recording: Mapping[str, Any]) -> Course | None:
    """The course that a recording shows; None for one of a pod that was refused at once."""
    if not recording.get("stages"):
        return None
    first: Object = recording["stages"][0]["pod"]
    metadata = first["metadata"]
    pod = {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
        "image": first["spec"]["containers"][0]["image"],
        "created": metadata["creationTimestamp"],
    }
    steps: list[Step] = []
    known: dict[str, Any] = {}
    for stage in recording["stages"]:
        step = _step(stage, known)
        if len(step) > 1:
            steps.append(step)
    return Course(pod, steps)


def _step(stage: Mapping[str, Any], known: dict[str, Any]) -> Step:
    """What is new in a stage."""
    seen: Object = stage["pod"]
    step: Step = {"after_s": stage["after_s"]}
    parts = {"status": seen["status"], "node": _node_of(stage)}
    if "deletionTimestamp" in seen["metadata"]:
        parts["deletion"] = True
    for name, value in parts.items():
        if value is not None and known.get(name) != value:
            known[name] = step[name] = value
    events = [one for one in stage["events"] if known.get(one["metadata"]["uid"]) != one]
    known |= {one["metadata"]["uid"]: one for one in events}
    if events:
        step["events"] = [_event_of(one) for one in events]
    if stage.get("gone"):
        step["gone"] = True
    return step


def _event_of(event: Object) -> Object:
    metadata = {name: event["metadata"][name] for name in ("name", "uid")}
    return {**event, "metadata": metadata}


def _node_of(stage: Mapping[str, Any]) -> Object | None:
    node = stage.get("node")
    if node is None:
        return None
    conditions = [one for one in node["status"]["conditions"] if one["type"] == "Ready"]
    for one in conditions:
        one.pop("lastHeartbeatTime", None)
    taints = node["spec"].get("taints", [])
    return {"spec": {"taints": taints} if taints else {}, "status": {"conditions": conditions}}


def without_node(course: Course) -> Course:
    """The part of a course that says that there is no node; what came of it then is left out."""
    steps = list(takewhile(lambda step: is_without_node(step) or "status" not in step, course.steps))
    return Course(course.pod, [one for one in steps if "deletion" not in one and "gone" not in one])


def is_without_node(step: Step) -> bool:
    """Whether a step says that the pod has no node."""
    conditions: list[Object] = step.get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == ("PodScheduled", "False") for one in conditions)


class Teller:
    """Tells a course of another pod.

    Args:
        course: The course.
        pod: The pod, as it was created.
        node: The name of its node.
        address: The pod's.
        now: When the course begins, by the cluster's clock.
        speed: How many recorded seconds pass in one.
    """

    def __init__(
        self, course: Course, pod: Object, *, node: str, address: str, now: datetime, speed: float
    ) -> None:
        self._containers = pod["spec"]["containers"]
        self._address = address
        self._recorded = _read_time(course.pod["created"])
        self._now = now
        self._speed = speed
        metadata = pod["metadata"]
        container = self._containers[0]
        self._words = {
            course.pod["uid"]: metadata["uid"],
            f"{course.pod['namespace']}/{course.pod['name']}": f"{metadata['namespace']}/{metadata['name']}",
            f"{course.pod['name']}_{course.pod['namespace']}": f"{metadata['name']}_{metadata['namespace']}",
            course.pod["image"]: container["image"],
            "node-1": node,
        }
        self._container = container["name"]
        self._name, self._uid = metadata["name"], metadata["uid"]
        self._namespace = metadata["namespace"]

    def status(self, step: Step) -> Object:
        """The status of a step."""
        told = self._told(step["status"])
        statuses = told.get("containerStatuses")
        if statuses:
            told["containerStatuses"] = [{**statuses[0], "name": one["name"]} for one in self._containers]
        if "startTime" in told:
            told["hostIP"], told["hostIPs"] = "192.0.2.2", [{"ip": "192.0.2.2"}]
        if any("running" in one.get("state", {}) for one in statuses or ()):
            told["podIP"], told["podIPs"] = self._address, [{"ip": self._address}]
        return told

    def event(self, event: Object) -> Object:
        """An event of a step, with a name of its own."""
        told = self._told(event)
        suffix = told["metadata"]["name"].rpartition(".")[2]
        told["metadata"] = {"name": f"{self._name}.{suffix}", "namespace": self._namespace}
        told["involvedObject"] |= {"name": self._name, "namespace": self._namespace}
        told["source"] = {"component": told["reportingComponent"]}
        return told

    def node(self, step: Step) -> Object:
        """What a step says of the node."""
        return self._told(step["node"])

    def _told(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._told(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [self._told(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        if _TIME.fullmatch(text) and not text.startswith(_NEVER):
            moved = self._now + (_read_time(text) - self._recorded) / self._speed
            return moved.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if "." in text else "%Y-%m-%dT%H:%M:%SZ")
        for old, new in self._words.items():
            text = text.replace(old, new)
        text = _CONTAINER_ID.sub(self._container_id, text)
        return _CONTAINER.sub(lambda _: self._container, text)

    def _container_id(self, recorded: re.Match[str]) -> str:
        return "containerd://" + sha256((self._uid + recorded[0]).encode()).hexdigest()


def _read_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)
