"""A pod, its events and its node as small types: the fields of the API's JSON that tell how a pod is doing.

Every field may be missing: a pod has no container statuses before it has a node, and the kubelet and the
scheduler fill different fields of an event. Unknown fields are ignored, so a newer API server does no harm.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar

import msgspec

from sandbox_k8s.errors import ConfigError


class _Read(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of what is read from the API's JSON."""


class Metadata(_Read, frozen=True):
    """Who an object is, and whether it is being deleted.

    Attributes:
        resource_version: Opaque by contract; only ever compared for equality here.
        deletion_timestamp: When the grace ends, not when the deletion was asked for.
        deletion_grace_period_seconds: None without a deletion; 0 once the kubelet is done with the pod.
    """

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None


class Waiting(_Read, frozen=True):
    """A container that does not run yet or not again."""

    reason: str | None = None
    message: str | None = None


class Running(_Read, frozen=True):
    """A container whose process runs, as far as its kubelet last knew."""

    started_at: datetime | None = None


class Terminated(_Read, frozen=True):
    """A container's process that has ended.

    Attributes:
        started_at: 1970 when the process never started (reason ``StartError``).
    """

    exit_code: int = 0
    signal: int | None = None
    reason: str | None = None
    message: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def ran_s(self) -> float | None:
        """How long it ran, whole seconds; None when that is not said."""
        if self.started_at is None or self.finished_at is None or self.started_at.year <= 1970:
            return None
        return (self.finished_at - self.started_at).total_seconds()


class ContainerState(_Read, frozen=True):
    """One of the three, or none."""

    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Read, frozen=True):
    """A container as its kubelet last reported it."""

    name: str = ""
    image: str = ""
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    ready: bool = False
    restart_count: int = 0


class Condition(_Read, frozen=True):
    """A condition of a pod or of a node."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str | None = None
    message: str | None = None
    last_transition_time: datetime | None = None


class Container(_Read, frozen=True):
    """What was asked for."""

    name: str = ""
    image: str | None = None


class ImageSource(_Read, frozen=True):
    """The image of an image volume."""

    reference: str = ""


class Volume(_Read, frozen=True):
    """A volume; what others than image volumes hold is left out."""

    name: str = ""
    image: ImageSource | None = None


class PodSpec(_Read, frozen=True):
    """The little of a pod's specification that matters for its fate."""

    node_name: str | None = None
    restart_policy: str = "Always"
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] | None = None
    volumes: tuple[Volume, ...] | None = None


class PodStatus(_Read, frozen=True):
    """How a pod is doing. ``phase`` is the slowest of its signals."""

    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    conditions: tuple[Condition, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    nominated_node_name: str | None = None


class Pod(_Read, frozen=True):
    """A pod of the core API, version 1."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, None when the pod has none yet."""
        return _find(self.status.conditions, kind)

    def is_true(self, kind: str) -> bool:
        """Whether the condition of that type is there and True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    @property
    def containers(self) -> tuple[ContainerStatus, ...]:
        """Statuses of the main containers."""
        return self.status.container_statuses or ()

    @property
    def init_containers(self) -> tuple[ContainerStatus, ...]:
        """Statuses of the init containers."""
        return self.status.init_container_statuses or ()

    @property
    def images(self) -> dict[str, str]:
        """Image by the name of the container, as the specification has it."""
        return {
            one.name: one.image or "" for one in (*(self.spec.init_containers or ()), *self.spec.containers)
        }

    @property
    def image_volumes(self) -> dict[str, str]:
        """Image by the name of the image volume."""
        return {one.name: one.image.reference for one in self.spec.volumes or () if one.image is not None}


class Taint(_Read, frozen=True):
    """What keeps pods off a node."""

    key: str
    effect: str = ""


class NodeSpec(_Read, frozen=True):
    """Whether pods may come."""

    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


class NodeStatus(_Read, frozen=True):
    """What the node reports, or the node controller for it."""

    conditions: tuple[Condition, ...] | None = None


class Node(_Read, frozen=True):
    """A node of the core API, version 1."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def ready(self) -> Condition | None:
        """The Ready condition, None before the first report."""
        return _find(self.status.conditions, "Ready")

    @property
    def is_lost(self) -> bool:
        """Whether the node controller has given it up for now: Ready is not True."""
        return self.ready is not None and self.ready.status != "True"


class InvolvedObject(_Read, frozen=True):
    """What an event is about."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    field_path: str | None = None


class Event(_Read, frozen=True):
    """An event of the core API, version 1: ``count`` grows in place, or a repeat is a new object."""

    metadata: Metadata = Metadata()
    involved_object: InvolvedObject = InvolvedObject()
    type: str = "Normal"
    reason: str | None = None
    message: str | None = None
    count: int | None = None
    first_timestamp: datetime | None = None
    last_timestamp: datetime | None = None
    event_time: datetime | None = None

    @property
    def container(self) -> str:
        """The container that it is about; empty when it is about the whole pod."""
        path = self.involved_object.field_path or ""
        return path.partition("{")[2].rstrip("}") if "ontainers{" in path else ""

    @property
    def is_about_main(self) -> bool:
        """Whether it is about a main container, not an init container."""
        return (self.involved_object.field_path or "").startswith("spec.containers{")

    @property
    def order(self) -> tuple[float, str]:
        """For sorting: the kubelet sets the one time, the scheduler another; ties go by name."""
        of_kubelet = self.last_timestamp or self.first_timestamp
        when = self.event_time or of_kubelet or self.metadata.creation_timestamp
        return (when.timestamp() if when else 0.0, self.metadata.name)


_Kind = TypeVar("_Kind", bound=_Read)


def _find(conditions: tuple[Condition, ...] | None, kind: str) -> Condition | None:
    return next((one for one in conditions or () if one.type == kind), None)


def read_pod(data: Mapping[str, Any]) -> Pod:
    """Read a pod's JSON.

    Raises:
        ConfigError: It is something else; the message names the field.
    """
    return _read(data, Pod, "Pod")


def read_node(data: Mapping[str, Any]) -> Node:
    """Read a node's JSON; raises `ConfigError` like `read_pod`."""
    return _read(data, Node, "Node")


def read_event(data: Mapping[str, Any]) -> Event:
    """Read an event's JSON; raises `ConfigError` like `read_pod`."""
    return _read(data, Event, "Event")


def _read(data: Mapping[str, Any], kind: type[_Kind], name: str) -> _Kind:
    said: object = data.get("kind", name)
    if said != name:
        raise ConfigError(f"not a {name}: kind is {said!r}")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as problem:
        raise ConfigError(f"not a {name} of the Kubernetes API (v1): {problem}") from problem
