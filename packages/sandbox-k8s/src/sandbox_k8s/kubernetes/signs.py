"""All that is known of one pod at one moment, and the questions that the rules ask of it."""

import re
from collections.abc import Iterable, Iterator

import msgspec

from .diagnosis import Evidence
from .pod_state import Condition, ContainerStatus, Event, Node, Pod

# Who passed a message on: the kubelet, the runtime, its shim, its client for registries.
_PASSED_ON = re.compile(
    r'.*(ErrImagePull: |failed to pull (and unpack )?image "[^"]*": |failed to resolve image: '
    r'|failed to do request: (Head|Get) "[^"]*": |unable to start container process: '
    r"|failed to generate spec: )",
    re.IGNORECASE,
)


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, what happened to it, and its node.

    Attributes:
        events: Of this pod alone (by uid), oldest first, each once. They can be late or missing.
        node: The pod's node; None when it was not read.
        gone: The watch said DELETED, or it is missing.
        missing: The API server, asked for it, has it no more.
    """

    pod: Pod
    events: tuple[Event, ...] = ()
    node: Node | None = None
    gone: bool = False
    missing: bool = False

    def find(self, *reasons: str) -> Iterator[Event]:
        """Events of these reasons, newest first."""
        return (one for one in reversed(self.events) if one.reason in reasons)

    def newest(self, *reasons: str, containing: str = "") -> Event | None:
        """The newest event of these reasons whose message has that in it."""
        return next((one for one in self.find(*reasons) if containing in (one.message or "")), None)

    def about(self, container: str, *reasons: str) -> Iterator[Event]:
        """Events of these reasons about that container, newest first."""
        return (one for one in self.find(*reasons) if one.container == container)

    @property
    def is_being_deleted(self) -> bool:
        """Whether the deletion is decided, by whomever."""
        return self.missing or self.pod.metadata.deletion_timestamp is not None

    @property
    def has_sandbox(self) -> bool:
        """Whether volumes and network are there, so that events about them are old."""
        later = self.newest("Pulling", "Pulled", "Created", "Started")
        return self.pod.is_true("PodReadyToStartContainers") or self.has_run or later is not None

    @property
    def has_run(self) -> bool:
        """Whether a main container runs or has run, so that the init containers are done."""
        return any(
            one.state.running or one.state.terminated or one.restart_count for one in self.pod.containers
        )


def gather(
    pod: Pod, events: Iterable[Event], node: Node | None, *, gone: bool, missing: bool = False
) -> Signs:
    """Put the signs in order: no event of an earlier pod of the same name, each once, oldest first.

    An event that is updated in place comes several times; the one with the highest count is kept.
    """
    newest: dict[str, Event] = {}
    for number, event in enumerate(events):
        if not _is_about(event, pod):
            continue
        key = event.metadata.uid or event.metadata.name or f"#{number}"
        known = newest.get(key)
        if known is None or _version(event) > _version(known):
            newest[key] = event
    ordered = tuple(sorted(newest.values(), key=lambda one: one.order))
    return Signs(pod=pod, events=ordered, node=node, gone=gone, missing=missing)


def _is_about(event: Event, pod: Pod) -> bool:
    about, of = event.involved_object, pod.metadata
    if about.kind not in ("", "Pod"):
        return False
    return about.uid == of.uid if about.uid and of.uid else about.name == of.name


def _version(event: Event) -> tuple[int, float, str]:
    return event.count or 0, event.order[0], event.message or ""


def event_evidence(event: Event) -> Evidence:
    """An event as evidence."""
    times = f" x{event.count}" if (event.count or 0) > 1 else ""
    about = f" ({event.container})" if event.container else ""
    return Evidence(f"event {event.reason}{times}{about}", tidy(event.message))


def condition_evidence(condition: Condition, of: str = "") -> Evidence:
    """A condition of the pod, or of the node `of`, as evidence."""
    said = ", ".join(filter(None, (condition.status, condition.reason)))
    where = f"node {of}, condition" if of else "condition"
    return Evidence(f"{where} {condition.type}", f"{said}: {tidy(condition.message)}".removesuffix(": "))


def container_evidence(status: ContainerStatus, *, last: bool = False) -> Evidence:
    """A container's state, or with `last` the one before its restart, as evidence."""
    state = status.last_state if last else status.state
    source = f"container {status.name}" + (f", before restart {status.restart_count}" if last else "")
    if state.waiting is not None:
        said, message = f"waiting, {state.waiting.reason}", state.waiting.message
    elif state.terminated is not None:
        end = state.terminated
        said, message = f"terminated, {end.reason or 'no reason'}, exit code {end.exit_code}", end.message
    else:
        said, message = "running" if state.running is not None else "no state", None
    return Evidence(source, f"{said}: {tidy(message)}".removesuffix(": "))


def tidy(message: str | None) -> str:
    """A message on one line."""
    return " ".join((message or "").split())


def gist(message: str | None) -> str:
    """A message without the list of those who passed it on."""
    return _PASSED_ON.sub("", tidy(message)).removeprefix("Error: ")
