"""Rules about containers: why one does not start, and why one has ended."""

import re

from sandbox_k8s.tools.layout import LOADER

from . import texts
from .diagnosis import Diagnosis, Evidence, diagnose
from .failure import FailureName
from .pod_state import ContainerStatus, Terminated, Waiting
from .signs import Signs, container_evidence, event_evidence, gist

_BENIGN = ("ContainerCreating", "PodInitializing")
_PULL_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
)
# The kubelet repeats these as events of their own; the cause is in another one.
_NO_CAUSE = tuple(f"Error: {reason}" for reason in _PULL_REASONS)
_NEAREST_PULL: dict[str, FailureName] = {
    "ErrImageNeverPull": "image_not_present",
    "InvalidImageName": "image_name_invalid",
}
_PULL_PARTS = ("Image", "Registry", "Signature")  # of reasons that are not listed
# Parts of waiting reasons, with the nearest class where the text is not known.
_NEAREST: tuple[tuple[str, FailureName], ...] = (
    ("Config", "container_config"),
    ("Create", "container_create"),
    ("Sandbox", "pod_sandbox"),
    ("Run", "start_failed"),
    ("Start", "start_failed"),
    ("CrashLoop", "process_crashed"),
)
# The kubelet has no container to report of: it never came to one, or the node lost it. Says exit code 137.
_UNKNOWN = "ContainerStatusUnknown"
_NEVER_STARTED = ("StartError", "ContainerCannotRun")
_KILLED_BY_PROBE = re.compile(r"failed (liveness|startup) probe")
_LOADER = re.compile(rf'exec: "(/[^"]*)/{re.escape(LOADER)}".*(no such file|permission denied)')
_SIGKILL, _SIGTERM = 137, 143
_RESOLUTION_S = 1.0  # of the API's time stamps
# A process that dies within a second may show two.
_AT_START_S = 2 * _RESOLUTION_S


def ended(signs: Signs) -> Diagnosis | None:
    """A container that ended, or was restarted: its processes are gone, whatever its pod says now."""
    for status in () if signs.has_run else signs.pod.init_containers:
        end = status.state.terminated or status.last_state.terminated
        if end is not None and end.exit_code != 0:
            retries = signs.pod.spec.restart_policy != "Never"
            return _explain(signs, status, end, init=True, retries=retries)
    for status in signs.pod.containers:
        end = status.state.terminated or status.last_state.terminated
        if end is not None:
            return _explain(signs, status, end)
        if status.restart_count > 0:
            why = f"container {status.name} was restarted, and why is not said"
            return diagnose("process_crashed", why, container_evidence(status), guess=True, final=True)
    return None


def _explain(
    signs: Signs, status: ContainerStatus, end: Terminated, *, init: bool = False, retries: bool = False
) -> Diagnosis | None:
    """Why a container ended; None when its end only follows from the pod's deletion."""
    last = status.state.terminated is None
    seen = [container_evidence(status, last=last)]
    if end.reason in _NEVER_STARTED:
        seen += map(event_evidence, signs.about(status.name, "Failed"))
    failure, guess = _of_end(end)
    if failure is None:
        if _follows_deletion(signs, end):
            return None
        probed = None if init else _probe_kill(signs, end)
        if probed is not None:
            return diagnose("liveness_failed", f"container {status.name}: {_how(end)}", *probed, *seen)
        failure, guess = _of_exit(end)
        if init and failure != "node_lost":
            failure = "init_failed"
    kind = "init container" if init else "container"
    why = f"{kind} {status.name}: {_how(end)}"
    if status.restart_count and not init:
        why += f"; restarted (restart {status.restart_count}), so what ran in it is gone"
    # Of an init container only the exit can turn out better at the next try.
    final = not (retries and failure == "init_failed")
    return diagnose(failure, why, *seen, guess=guess, final=final)


def _of_end(end: Terminated) -> tuple[FailureName | None, bool]:
    """A cause that the end itself names; the flag says that it is a guess."""
    message = end.message or ""
    if end.reason == "OOMKilled":
        short = end.ran_s is not None and end.ran_s <= _AT_START_S
        return ("oom_at_start" if short else "oom_at_run"), False
    if end.reason in _NEVER_STARTED:
        known = texts.of_start(message)
        return known or "start_failed", known is None
    if end.exit_code != 0 and "exec format error" in message.lower():
        return "image_architecture", False
    return None, False


def _of_exit(end: Terminated) -> tuple[FailureName, bool]:
    """The class of a plain exit. A kill without a reason is a guess: its author may just not be known yet."""
    if end.reason == _UNKNOWN:
        return "node_lost", True
    unknown = end.reason not in (None, "Error", "Completed")
    if end.exit_code == 0:
        return "process_ended", unknown
    if end.exit_code in (_SIGKILL, _SIGTERM) or end.signal in (9, 15):
        return "process_killed", True
    return "process_crashed", unknown


def _follows_deletion(signs: Signs, end: Terminated) -> bool:
    """Whether the pod's deletion, and not the process itself, is why it ended."""
    metadata = signs.pod.metadata
    if metadata.deletion_timestamp is None:
        return False
    if not metadata.deletion_grace_period_seconds or end.finished_at is None:
        return True
    died_before = (metadata.deletion_timestamp - end.finished_at).total_seconds()
    return died_before <= metadata.deletion_grace_period_seconds + _RESOLUTION_S


def _how(end: Terminated) -> str:
    if end.reason in _NEVER_STARTED:
        return f"its process was never started: {gist(end.message)}{_tree_hint(end.message)}"
    reason = "" if end.reason in (None, "Error", "Completed") else f"{end.reason}, "
    signal = f" (signal {end.exit_code - 128})" if end.exit_code > 128 else ""
    ran = f" after {end.ran_s:.0f} s" if end.ran_s else ""
    return f"{reason}exit code {end.exit_code}{signal}{ran}"


def _probe_kill(signs: Signs, end: Terminated | None = None) -> tuple[Evidence, ...] | None:
    """The events of a container (its run with that end) killed for its liveness probe; None without any."""
    if signs.is_being_deleted:
        return None
    killing = next((one for one in signs.find("Killing") if one.is_about_main), None)
    probe = signs.newest("Unhealthy", containing="Liveness probe")
    if killing is None or (probe is None and not _KILLED_BY_PROBE.search(killing.message or "")):
        return None
    when = killing.last_timestamp
    if end is not None and end.started_at is not None and when is not None and when < end.started_at:
        return None  # an earlier run
    return tuple(event_evidence(one) for one in (killing, probe) if one is not None)


def killed_by_probe(signs: Signs) -> Diagnosis | None:
    """A running container that is about to be killed for its liveness probe."""
    seen = _probe_kill(signs)
    return None if seen is None else diagnose("liveness_failed", "the container is being killed", *seen)


def being_killed(signs: Signs) -> Diagnosis | None:
    """A container that is being stopped before the pod says why: its deletion is probably on the way."""
    killing = next((one for one in signs.find("Killing") if one.is_about_main), None)
    if killing is None or signs.is_being_deleted:
        return None
    why = f"container {killing.container} is being stopped, and the pod does not say why yet"
    return diagnose("deleted", why, event_evidence(killing), guess=True, final=False)


def waiting(signs: Signs) -> Diagnosis | None:
    """A container that cannot start, by its waiting reason, or by events that come up to 1 s before it."""
    for status in (*signs.pod.init_containers, *signs.pod.containers):
        reason = status.state.waiting
        found = None if reason is None else _of_waiting(signs, status, reason)
        if found is not None:
            return found
    if not signs.pod.containers:  # the events of a pod whose first status is still on the way
        for name, image in signs.pod.images.items():
            found = _of_events(signs, name, image)
            if found is not None:
                return found
    return None


def _of_waiting(signs: Signs, status: ContainerStatus, state: Waiting) -> Diagnosis | None:
    reason, message = state.reason, state.message or ""
    image = signs.pod.images.get(status.name) or status.image
    seen = container_evidence(status)
    if reason is None or reason in _BENIGN:
        return _of_events(signs, status.name, image)
    if reason in _PULL_REASONS or any(part in reason for part in _PULL_PARTS):
        return _of_pull(signs, status.name, image, message, seen, nearest=_NEAREST_PULL.get(reason))
    known: FailureName | None = None
    if reason == "CreateContainerConfigError":
        known = texts.of_config(message)
    elif reason == "CreateContainerError":
        known = texts.of_create(message)
    elif reason == "RunContainerError":
        known = texts.of_start(message)
    why = f"container {status.name}: {gist(message) or reason}{_tree_hint(message)}"
    return diagnose(known or _nearest(reason), why, seen, guess=known is None)


def _tree_hint(message: str | None) -> str:
    """What it means that a launcher's tree does not run: the runtime names a file that users do not know."""
    found = _LOADER.search(message or "")
    if found is None:
        return ""
    if found[2] == "permission denied":
        return (
            f"; what is at {found[1]} may not be executed: some container runtimes mount image volumes "
            "noexec, then take Injection(kind='init_copy'); or the tree lost its modes"
        )
    return (
        f"; there is no tree of `sandbox-k8s build-tools` at {found[1]}: the tools image is another one, "
        "or the image is not baked (see Injection)"
    )


def _nearest(reason: str) -> FailureName:
    for part, failure in _NEAREST:
        if part in reason:
            return failure
    return "container_create"


def _of_pull(
    signs: Signs, name: str, image: str, text: str, *seen: Evidence, nearest: FailureName | None = None
) -> Diagnosis:
    """A failed pull. Some kubelets say only that they back off: then the cause is in an event.

    What a container waits for is its own image or that of an image volume: the text names it.
    """
    whose, image = _pulled_for(signs, name, image, text)
    events = [one for one in signs.about(name, "Failed", "InspectFailed") if one.message not in _NO_CAUSE]
    events += [one for one in signs.about("", "Failed") if f'image "{image}"' in (one.message or "")]
    known = texts.of_pull(text, image)
    for event in events:
        known = known or texts.of_pull(event.message or "", image)
    known = known or nearest
    shown = tuple(one for one in map(event_evidence, events[:2]) if one not in seen)
    why = f'{whose}, image "{image}": {gist(text)}'
    return diagnose(known or "image_pull_failed", why, *seen, *shown, guess=known is None)


def _pulled_for(signs: Signs, name: str, image: str, text: str) -> tuple[str, str]:
    """Who needs the image that a text is about, and the image."""
    named = texts.image_named_in(text)
    if not named or texts.is_same_image(named, image):
        return f"container {name}", image
    for volume, reference in signs.pod.image_volumes.items():
        if texts.is_same_image(named, reference):
            return f"image volume {volume}", reference
    return f"container {name} or a volume of it", named


def _of_volume_events(signs: Signs, name: str) -> Diagnosis | None:
    """A failed pull of an image volume: its events are about the whole pod."""
    for event in signs.about("", "Failed"):
        message = event.message or ""
        if any(texts.is_same_image(one, texts.image_named_in(message)) for one in _volumes_to_come(signs)):
            return _of_pull(signs, name, "", message, event_evidence(event))
    return None


def _volumes_to_come(signs: Signs) -> list[str]:
    """Images of image volumes that no event says to be there."""
    there = [one.message or "" for one in signs.about("", "Pulled")]
    images = signs.pod.image_volumes.values()
    return [one for one in images if not any(f'image "{one}"' in said for said in there)]


def _of_events(signs: Signs, name: str, image: str) -> Diagnosis | None:
    """What the events say of a container whose status does not say anything yet."""
    of_volume = _of_volume_events(signs, name)
    if of_volume is not None:
        return of_volume
    pulled = next(signs.about(name, "Pulled"), None)
    for event in signs.about(name, "Failed", "InspectFailed", "ErrImageNeverPull"):
        message = event.message or ""
        of_pull = event.reason != "Failed" or message.startswith("Failed to pull image")
        if message in _NO_CAUSE or (of_pull and pulled is not None):
            continue
        if of_pull:
            return _of_pull(signs, name, image, message, event_evidence(event))
        known = texts.of_config(message) or texts.of_create(message)
        why = f"container {name}: {gist(message)}{_tree_hint(message)}"
        return diagnose(known or "container_create", why, event_evidence(event), guess=known is None)
    return None
