"""What a pod's labels and annotations say about its sandbox: written at create, read by anybody."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.handle import PodPlace, SandboxHandle

PREFIX = "sandbox-k8s/"
MANAGED_BY = "app.kubernetes.io/managed-by"
RUN, SANDBOX, NETWORK = f"{PREFIX}run", f"{PREFIX}sandbox", f"{PREFIX}network"
REQUEST, OWNER, RECORD = f"{PREFIX}request", f"{PREFIX}owner", f"{PREFIX}record"
EPOCH, STATE, EXPIRES = f"{PREFIX}epoch", f"{PREFIX}state", f"{PREFIX}expires-ns"
PREFETCH = f"{PREFIX}prefetch"
CONTAINER = "sandbox"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes: the part of the handle that the pod itself does not show."""

    key_id: str
    workdir: str
    lease_s: float
    detached_lease_s: float
    created_ns: int
    labels: dict[str, str] = {}


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as its pod tells it.

    Attributes:
        resource_version: Of the pod, for conditional changes.
        owner: Random text of whoever won the epoch, so that a winner whose answer was lost finds out.
        expires_ns: When a reaper may remove it, Unix nanoseconds.
        ended: Its containers have ended, or it is being deleted.
    """

    handle: SandboxHandle
    resource_version: str
    owner: str
    state: Literal["running", "detached"]
    expires_ns: int
    ended: bool
    starting: bool


def selector(run: str | None) -> str:
    """The label selector of a run's pods; None is every run."""
    return f"{MANAGED_BY}=sandbox-k8s,{RUN}" + ("" if run is None else f"={run}")


def lasts_s(record_s: float, lease_s: float) -> float:
    """How far ahead of now a record says that its sandbox is alive.

    Heartbeats come three times per lease, so one that is long needs more than ``KubernetesConfig.record_s``.
    """
    return max(record_s, 2 * lease_s)


def annotations(record: Record, *, request: str, epoch: int, expires_ns: int) -> dict[str, str]:
    """The annotations of a new pod."""
    return {
        REQUEST: request,
        OWNER: request,
        EPOCH: str(epoch),
        STATE: "running",
        EXPIRES: str(expires_ns),
        RECORD: msgspec.json.encode(record).decode(),
    }


def read_record(pod: Mapping[str, Any], cluster: str) -> PodRecord:
    """Read a pod's record.

    Raises:
        ConfigError: It is no pod of ours, or of a newer release.
    """
    metadata: Mapping[str, Any] = pod["metadata"]
    try:
        said = annotations_of(pod)
        record = msgspec.json.decode(said[RECORD], type=Record)
        epoch, expires_ns = int(said[EPOCH]), int(said[EXPIRES])
        state = said[STATE]
        sandbox_id: str = metadata["labels"][SANDBOX]
    except (KeyError, ValueError, msgspec.MsgspecError) as problem:
        raise ConfigError(
            f"pod {metadata.get('namespace')}/{metadata.get('name')} carries no record of a sandbox: "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    if state not in ("running", "detached"):
        raise ConfigError(
            f"the sandbox of pod {metadata.get('namespace')}/{metadata.get('name')} is in state {state!r}, "
            "which this release does not know"
        )
    status: Mapping[str, Any] = pod.get("status", {})
    handle = SandboxHandle(
        place=place_of(pod, cluster),
        sandbox_id=sandbox_id,
        epoch=epoch,
        **{name: getattr(record, name) for name in Record.__struct_fields__},
    )
    return PodRecord(
        handle=handle,
        resource_version=metadata["resourceVersion"],
        owner=said[OWNER],
        state=state,
        expires_ns=expires_ns,
        ended=has_ended(pod),
        starting=status.get("phase") == "Pending",
    )


def is_sandbox(pod: Mapping[str, Any]) -> bool:
    """Whether a pod of a run is a sandbox; the others bring images to nodes."""
    return PREFETCH not in (pod["metadata"].get("labels") or {})


def annotations_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """A pod's annotations; a pod without any has no such field."""
    return pod["metadata"].get("annotations") or {}


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether its launcher has ended or its deletion was asked for; phase is the slowest sign of that."""
    status: Mapping[str, Any] = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"] or status.get("phase") in ("Succeeded", "Failed"):
        return True
    # Of a pod that brings images to a node each container ends by itself.
    return is_sandbox(pod) and "terminated" in container_of(pod).get("state", {})


def container_of(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the container with the launcher, whatever else an admission webhook put beside it."""
    found: list[Mapping[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    nothing: Mapping[str, Any] = {}
    return next((one for one in found if one.get("name") == CONTAINER), nothing)


def place_of(pod: Mapping[str, Any], cluster: str) -> PodPlace:
    """Where the sandbox of a pod is."""
    metadata: Mapping[str, Any] = pod["metadata"]
    container = container_of(pod)
    return PodPlace(
        cluster=cluster,
        namespace=metadata["namespace"],
        pod=metadata["name"],
        uid=metadata["uid"],
        restart_count=container.get("restartCount", 0),
        image_digest=container.get("imageID", "").rpartition("@")[2],
    )
