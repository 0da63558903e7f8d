"""Rules about where a pod is: no node, a node that refuses it, volumes and network, a node that is lost."""

from . import texts
from .diagnosis import Diagnosis, Evidence, diagnose
from .failure import FailureName
from .signs import Signs, condition_evidence, event_evidence, tidy


def unscheduled(signs: Signs) -> Diagnosis | None:
    """A pod that no node takes. Its status and its event come in either order."""
    scheduled = signs.pod.condition("PodScheduled")
    if signs.pod.spec.node_name or (scheduled is not None and scheduled.status == "True"):
        return None
    event = signs.newest("FailedScheduling")
    seen: list[Evidence] = []
    said: list[str] = []
    if scheduled is not None and scheduled.reason not in (None, "SchedulingGated"):
        seen.append(condition_evidence(scheduled))
        said.append(tidy(scheduled.message))
    elif event is None or signs.newest("Scheduled") is not None:
        return None
    if event is not None:
        seen.append(event_evidence(event))
        said.append(tidy(event.message))
    text = said[0]
    failure = texts.of_schedule(text)
    guess = failure is None
    # Since 1.36 the text names no taint, and a lost node is one: only the node itself tells them apart.
    if failure == "unschedulable_placement" and "untolerated taint(s)" in text:
        if signs.node is None:
            guess = True
        elif signs.node.is_lost or signs.node.spec.unschedulable:
            failure = "unschedulable_nodes_down"
    return diagnose(failure or "unschedulable", text.partition(". ")[0], *seen, *_of_node(signs), guess=guess)


def _of_node(signs: Signs) -> list[Evidence]:
    """What a node says against pods."""
    node = signs.node
    if node is None:
        return []
    name = node.metadata.name
    seen = [condition_evidence(node.ready, name)] if node.is_lost and node.ready is not None else []
    taints = ", ".join(f"{one.key}:{one.effect}" for one in node.spec.taints or ())
    return [*seen, Evidence(f"node {name}", f"taints {taints}")] if taints else seen


def unmounted(signs: Signs) -> Diagnosis | None:
    """Volumes that cannot be mounted: no status ever says so, only events."""
    if signs.has_sandbox:
        return None
    events = list(signs.find("FailedMount", "FailedAttachVolume", "FailedMapVolume"))
    if not events:
        return None
    known: list[FailureName | None] = [texts.of_volume(one.message or "") for one in events]
    # After 2 min a kubelet adds "timed out" to what it said was missing.
    number = known.index("volume_missing") if "volume_missing" in known else 0
    event, failure = events[number], known[number]
    return diagnose(
        failure or "volume_failed", tidy(event.message), event_evidence(event), guess=failure is None
    )


def unconnected(signs: Signs) -> Diagnosis | None:
    """A pod whose network or pause container cannot be made."""
    event = None if signs.has_sandbox else signs.newest("FailedCreatePodSandBox", "FailedCreatePodContainer")
    if event is None:
        return None
    return diagnose("pod_sandbox", tidy(event.message), event_evidence(event))


def node_lost(signs: Signs) -> Diagnosis | None:
    """A node that does not answer: the pod loses Ready, and its containers stay as they were."""
    if signs.node is not None and not signs.node.is_lost:
        return None
    name = signs.pod.spec.node_name
    ready = signs.pod.condition("Ready")
    taken = (
        ready is not None
        and ready.status == "False"
        and ready.reason is None
        and signs.pod.is_true("ContainersReady")
    )
    if not name or not (taken or signs.node is not None):
        return None
    seen = [condition_evidence(ready)] if ready is not None and taken else []
    if signs.node is not None and signs.node.ready is not None:
        seen.insert(0, condition_evidence(signs.node.ready, signs.node.metadata.name))
    event = signs.newest("NodeNotReady")
    seen += [event_evidence(event)] if event is not None else []
    return diagnose("node_lost", f"node {name} does not report", *seen)


def rejected(reason: str) -> tuple[FailureName, bool] | None:
    """The class of a pod's reason that a kubelet gives when it refuses the pod, and whether it is a guess."""
    known = ("NodeAffinity", "NodePorts", "TopologyAffinityError", "UnexpectedAdmissionError", "AppArmor")
    if reason in known or reason in ("OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfephemeral-storage"):
        return "kubelet_rejected", False
    if reason.startswith("OutOf") or reason.endswith(("AdmissionError", "AffinityError", "NotSupported")):
        return "kubelet_rejected", True
    return None
