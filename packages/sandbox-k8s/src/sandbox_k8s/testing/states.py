"""The status of a pod with a process, at each stage of its life; shaped as a real kubelet shapes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from .store import Object

_UNKNOWN = {
    "exitCode": 137,
    "reason": "ContainerStatusUnknown",
    "message": "The container could not be located when the pod was terminated",
}


def condition(kind: str, true: bool, now: str, reason: str = "", message: str = "") -> Object:
    """A condition of a pod."""
    made: Object = {
        "type": kind,
        "status": "True" if true else "False",
        "lastProbeTime": None,
        "lastTransitionTime": now,
    }
    if reason:
        made["reason"] = reason
    if message:
        made["message"] = message
    return made


def is_ready(pod: Object) -> bool:
    """Whether the pod's containers take requests."""
    conditions: list[Object] = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _conditions(
    pod: Object, now: str, *, sandbox: bool, ready: bool, reason: str, message: str = ""
) -> list[Object]:
    """All five; a condition that did not change keeps its time, one that others set stays."""
    wanted = [
        condition("PodReadyToStartContainers", sandbox, now),
        condition("Initialized", True, now),
        condition("Ready", ready, now, reason, message),
        condition("ContainersReady", ready, now, reason, message),
        condition("PodScheduled", True, now),
    ]
    before = {one["type"]: one for one in pod["status"].get("conditions", [])}
    result = [one for kind, one in before.items() if kind == "DisruptionTarget"]
    for one in wanted:
        old = before.get(one["type"])
        if old is not None and old["status"] == one["status"]:
            one["lastTransitionTime"] = old["lastTransitionTime"]
        result.append(one)
    return result


def creating(pod: Object, now: str) -> Object:
    """The kubelet has begun: everything waits."""
    containers: list[Object] = pod["spec"]["containers"]
    told = f"containers with unready status: [{' '.join(one['name'] for one in containers)}]"
    waiting: Object = {"waiting": {"reason": "ContainerCreating"}}
    return {
        **pod["status"],
        "phase": "Pending",
        "startTime": now,
        "hostIP": "192.0.2.2",
        "hostIPs": [{"ip": "192.0.2.2"}],
        "containerStatuses": [_container(one, waiting) for one in containers],
        "conditions": _conditions(
            pod, now, sandbox=False, ready=False, reason="ContainersNotReady", message=told
        ),
    }


def running(pod: Object, now: str, address: str, container_ids: Sequence[str]) -> Object:
    """All containers run."""
    containers = [
        _container(one, {"running": {"startedAt": now}}, container_id, ready=True)
        for one, container_id in zip(pod["spec"]["containers"], container_ids, strict=True)
    ]
    conditions = _conditions(pod, now, sandbox=True, ready=True, reason="")
    addresses = {"podIP": address, "podIPs": [{"ip": address}]}
    return {
        **pod["status"],
        **addresses,
        "phase": "Running",
        "conditions": conditions,
        "containerStatuses": containers,
    }


def ended(
    pod: Object, now: str, exit_code: int, *, reason: str = "", message: str = "", last: bool
) -> Object:
    """The containers have ended.

    Args:
        pod: As it is now.
        now: A time stamp.
        exit_code: Of all containers.
        reason: Of the container: OOMKilled and the like; by the exit code when it is empty.
        message: The container's termination message.
        last: Whether the phase tells it already: it does so about a second after the container's state.
    """
    status: Object = pod["status"]
    statuses: list[Object] = [
        _ended_container(one, now, exit_code, reason, message) for one in status.get("containerStatuses", [])
    ]
    result: Object = {**status, "containerStatuses": statuses}
    result["conditions"] = _conditions(
        pod, now, sandbox=not last, ready=False, reason="PodCompleted" if exit_code == 0 else "PodFailed"
    )
    if last:
        result["phase"] = "Succeeded" if exit_code == 0 else "Failed"
    return result


def ended_before_it_ran(pod: Object) -> Object:
    """A pod that was deleted while its containers waited for their images."""
    status: Object = pod["status"]
    lost: Object = {"terminated": {**_UNKNOWN, "startedAt": None, "finishedAt": None}}
    statuses: list[Object] = [{**one, "state": lost} for one in status.get("containerStatuses", [])]
    return {**status, "phase": "Failed", "containerStatuses": statuses}


def _ended_container(one: Object, now: str, exit_code: int, reason: str, message: str) -> Object:
    if "terminated" in one["state"]:
        return one
    state: Object = {
        "exitCode": exit_code,
        "reason": reason or ("Completed" if exit_code == 0 else "Error"),
        "startedAt": one["state"].get("running", {}).get("startedAt"),
        "finishedAt": now,
    }
    if message:
        state["message"] = message
    if "containerID" in one:
        state["containerID"] = one["containerID"]
    return {**one, "state": {"terminated": state}, "ready": False, "started": False}


def _container(
    container: Mapping[str, Any], state: Object, container_id: str = "", *, ready: bool = False
) -> Object:
    made: Object = {
        "name": container["name"],
        "state": state,
        "lastState": {},
        "ready": ready,
        "restartCount": 0,
        "image": container["image"],
        "imageID": "",
        "started": ready,
    }
    if container_id:
        made |= {"imageID": f"sha256:{container_id}", "containerID": f"containerd://{container_id}"}
    return made
