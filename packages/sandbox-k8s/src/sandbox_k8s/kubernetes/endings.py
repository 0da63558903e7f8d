"""Rules about the end of a whole pod: evicted, preempted, drained, past its deadline, deleted."""

from . import texts
from .diagnosis import Diagnosis, Evidence, diagnose
from .failure import FailureName
from .places import rejected
from .pod_state import Event
from .signs import Signs, condition_evidence, event_evidence, tidy

_DISRUPTIONS: dict[str, FailureName] = {
    "EvictionByEvictionAPI": "drained",
    "PreemptionByScheduler": "preempted",
    "PreemptionByKubeScheduler": "preempted",
    "DeletionByTaintManager": "node_lost",
    "DeletionByPodGC": "node_lost",
    "TerminationByKubelet": "evicted_node_pressure",
}
_REASONS: dict[str, FailureName] = {
    "DeadlineExceeded": "deadline_exceeded",
    "Preempting": "preempted",
    "NodeLost": "node_lost",
    "Shutdown": "node_shutdown",
    "NodeShutdown": "node_shutdown",
    "Terminated": "node_shutdown",
}


def disrupted(signs: Signs) -> Diagnosis | None:
    """A pod that the cluster takes away: by its reason, its condition DisruptionTarget, or an event.

    An eviction over the pod's own limit sets no condition; an eviction by a drain sets no reason.
    """
    return _by_reason(signs) or _by_condition(signs) or _by_event(signs)


def _by_reason(signs: Signs) -> Diagnosis | None:
    reason, message = signs.pod.status.reason, signs.pod.status.message or ""
    if not reason:
        return None
    why = tidy(message) or reason
    seen = Evidence("pod", f"{signs.pod.status.phase}, {reason}: {tidy(message)}".removesuffix(": "))
    if reason == "Evicted":
        return _evicted(message, why, seen)
    refused = rejected(reason)
    if refused is not None:
        return diagnose(refused[0], why, seen, guess=refused[1])
    if reason in _REASONS:
        return diagnose(_REASONS[reason], why, seen, final=True)
    return None


def _by_condition(signs: Signs) -> Diagnosis | None:
    condition = signs.pod.condition("DisruptionTarget")
    if condition is None or condition.status != "True":
        return None
    reason = condition.reason or ""
    seen = [condition_evidence(condition)]
    if reason == "TerminationByKubelet" and "shutdown" in (condition.message or "").lower():
        return diagnose("node_shutdown", tidy(condition.message), *seen)
    node = signs.node
    if node is not None and node.spec.unschedulable:
        seen.append(Evidence(f"node {node.metadata.name}", "cordoned (spec.unschedulable)"))
    if node is not None and node.is_lost and node.ready is not None:
        seen.append(condition_evidence(node.ready, node.metadata.name))
    if reason == "DeletionByTaintManager" and node is not None and not node.is_lost:
        seen.append(Evidence(f"node {node.metadata.name}", "answers again"))
    why = tidy(condition.message) or reason
    return diagnose(
        _DISRUPTIONS.get(reason, "drained"), why, *seen, guess=reason not in _DISRUPTIONS, final=True
    )


def _by_event(signs: Signs) -> Diagnosis | None:
    event = signs.newest("Evicted")
    if event is not None:
        return _evicted(event.message or "", tidy(event.message), event_evidence(event))
    event = signs.newest("DeadlineExceeded", "Preempted")
    if event is None:
        return None
    failure: FailureName = "preempted" if event.reason == "Preempted" else "deadline_exceeded"
    return diagnose(failure, tidy(event.message), event_evidence(event))


def _evicted(message: str, why: str, seen: Evidence) -> Diagnosis:
    failure = texts.of_eviction(message)
    return diagnose(failure or "evicted_node_pressure", why, seen, guess=failure is None)


def deleted(signs: Signs) -> Diagnosis | None:
    """A pod that somebody else deletes or has deleted."""
    if not signs.is_being_deleted:
        return None
    shown: tuple[Event, ...] = tuple(signs.find("Killing"))[:1]
    when = signs.pod.metadata.deletion_timestamp
    said = "no deletionTimestamp was seen" if when is None else f"deletionTimestamp {when:%Y-%m-%dT%H:%M:%SZ}"
    seen = Evidence("pod", said + (", gone" if signs.gone else ""))
    why = "it is gone" if signs.gone else "it is being deleted; who asked for it, the pod does not say"
    return diagnose("deleted", why, seen, *map(event_evidence, shown))


def unexplained(signs: Signs) -> Diagnosis | None:
    """A pod that ended, or that its kubelet has given up, without a reason that anything else shows."""
    phase = signs.pod.status.phase
    ready = signs.pod.condition("Ready")
    given_up = ready is not None and ready.status == "False" and ready.reason in ("PodFailed", "PodCompleted")
    reason = signs.pod.status.reason
    seen = Evidence("pod", ", ".join(filter(None, (phase, reason, tidy(signs.pod.status.message)))))
    if phase == "Succeeded":
        return diagnose("process_ended", "the pod has ended", seen)
    if phase == "Unknown":
        return diagnose("node_lost", "the state of the pod is not known", seen, guess=True)
    if phase != "Failed" and not given_up:
        return None
    shown = () if ready is None else (condition_evidence(ready),)
    return diagnose("pod_failed", "the pod has failed", seen, *shown, guess=True)
