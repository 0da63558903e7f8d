"""What the API server says of a pod, turned into a diagnosis: pure, early, and indifferent to order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import containers, endings, places
from .diagnosis import Diagnosis, Evidence, diagnose
from .pod_state import read_event, read_node, read_pod
from .signs import Signs, event_evidence, gather

# The first rule that has something to say wins. What ends the whole pod stands before what its containers
# show of it (an evicted pod's container just says "Error 137"), a container's own end before the pod's
# deletion, and what is lost before what is merely not there yet.
_RULES: tuple[Callable[[Signs], Diagnosis | None], ...] = (
    endings.disrupted,
    containers.ended,
    endings.deleted,
    places.node_lost,
    containers.killed_by_probe,
    containers.being_killed,
    containers.waiting,
    places.unmounted,
    places.unconnected,
    places.unscheduled,
    endings.unexplained,
)


def classify(
    pod: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]] = (),
    node: Mapping[str, Any] | None = None,
    *,
    deleted: bool = False,
    missing: bool = False,
    asked: bool = False,
) -> Diagnosis:
    """Say how a pod is doing, and if something is wrong what, whose fault it is and what to do.

    The same signs give the same answer in whatever order they came. Events make it earlier and better (a
    volume that cannot be mounted is in no status); without them it is later, or a guess, never another class.

    Args:
        pod: The newest JSON of the pod that is known, as a watch or a GET gives it.
        events: Events of its namespace or of the pod; those about other objects, or about an earlier pod of
            the same name, are left out.
        node: JSON of its node; for a pod without one, of a node meant for it. None when it was not read.
        deleted: The watch said DELETED with this object.
        missing: The API server was asked for the pod and has none, or another one of that name; this is its
            last state. It says more than ``deleted``: a pod that leaves a watch may live on.
        asked: The caller asked for its deletion, so its end is no failure.

    Raises:
        ConfigError: One of the objects is not of its kind.

    Notes:
        Out-of-memory kills of child processes show in no status: only the exit code of the command, or the
        counters of the cgroup, tell. A pod that is ready here may have restarted between two looks: compare
        the container's id and ``restartCount`` with the ones the sandbox was started with.
    """
    signs = gather(
        read_pod(pod),
        map(read_event, events),
        None if node is None else read_node(node),
        gone=deleted or missing,
        missing=missing,
    )
    if deleted and not signs.is_being_deleted:
        return Diagnosis(
            state="unknown",
            why="it left the watch: perhaps its labels changed; ask for it by name and uid",
            evidence=(Evidence("watch", "DELETED without a deletionTimestamp"),),
        )
    if asked and signs.is_being_deleted:
        return Diagnosis(state="stopping", why="gone, as asked" if signs.gone else "being deleted, as asked")
    for rule in _RULES:
        found = rule(signs)
        if found is not None:
            return found
    return _ready(signs) or _starting(signs)


def _ready(signs: Signs) -> Diagnosis | None:
    if signs.pod.status.phase != "Running" or not signs.pod.is_true("Ready"):
        return None
    return Diagnosis(state="ready", why=f"running and ready on node {signs.pod.spec.node_name or '?'}")


def _starting(signs: Signs) -> Diagnosis:
    """Nothing is wrong: say what is waited for."""
    pod = signs.pod
    if not pod.spec.node_name and not pod.is_true("PodScheduled"):
        scheduled = pod.condition("PodScheduled")
        gated = scheduled is not None and scheduled.reason == "SchedulingGated"
        why = "its scheduling gates are closed" if gated else "the scheduler has not seen it yet"
        return Diagnosis(state="starting", waits_for="node", why=why)
    if any(status.state.running for status in pod.containers) and pod.status.phase == "Running":
        return _unready(signs)
    return _pulling(signs) or Diagnosis(state="starting", waits_for="start", why=_preparing(signs))


def _preparing(signs: Signs) -> str:
    initializing = next((one for one in signs.pod.init_containers if one.state.running), None)
    if initializing is not None:
        return f"init container {initializing.name} runs"
    on = f"node {signs.pod.spec.node_name or '?'}"
    if not signs.has_sandbox:
        return f"{on} prepares its volumes and network"
    if signs.newest("Started") is not None:
        return f"{on} has started a container and not reported it yet"
    return f"{on} creates its containers"


def _unready(signs: Signs) -> Diagnosis:
    """It runs and is not ready: on the way up, or not any more."""
    probe = next((one for one in signs.find("Unhealthy") if "Liveness" not in (one.message or "")), None)
    if probe is None:
        back = signs.newest("NodeNotReady") is not None
        why = "its node was lost and reports again" if back else "it runs and is not reported ready yet"
        return Diagnosis(state="starting", waits_for="readiness", why=why)
    seen = event_evidence(probe)
    if _was_ready(signs):
        return diagnose("readiness_failed", "it was ready, and is not any more", seen)
    why = "it runs and does not pass its readiness probe yet"
    return Diagnosis(state="starting", waits_for="readiness", why=why, evidence=(seen,))


def _was_ready(signs: Signs) -> bool:
    """Whether Ready became False after the start, which it only can if it was True in between."""
    ready = signs.pod.condition("Ready")
    since = None if ready is None else ready.last_transition_time
    begun = [one.state.running.started_at for one in signs.pod.containers if one.state.running is not None]
    # Time stamps are whole seconds.
    return since is not None and any(one is not None and (since - one).total_seconds() > 1 for one in begun)


def _pulling(signs: Signs) -> Diagnosis | None:
    """An image that is being pulled, or waits for another pull: there is no progress to show."""
    for name, image in signs.pod.images.items():
        event = next(signs.about(name, "Pulling"), None)
        if event is not None and next(signs.about(name, "Pulled"), None) is None:
            why = f'node {signs.pod.spec.node_name or "?"} pulls image "{image}", or waits for another pull'
            return Diagnosis(state="starting", waits_for="image", why=why, evidence=(event_evidence(event),))
    return None
