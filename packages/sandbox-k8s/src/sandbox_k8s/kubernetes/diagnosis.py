"""What a pod's signs mean: a state, and where something is wrong its failure class, evidence and advice."""

from typing import Literal

import msgspec

from sandbox_k8s.errors import Fault

from .failure import Failure, FailureName
from .failures import FAILURES

State = Literal["starting", "ready", "failing", "failed", "stopping", "unknown"]
"""How a pod is doing.

``starting``: nothing is wrong as far as can be seen. ``ready``: it runs and is ready. ``failing``: something
is wrong, but Kubernetes keeps trying and the pod may become ready yet; how long to wait is up to the caller.
``failed``: this pod will not become (or stay) usable. ``stopping``: it ends because the caller asked.
``unknown``: the signs do not tell; ask the API server for the pod by name and uid.
"""

WaitsFor = Literal["node", "image", "start", "readiness"]
"""A node that takes the pod; its image; the node's preparations and the start; the readiness probe."""

_TOO_LATE: dict[WaitsFor, FailureName] = {
    "node": "start_timeout",
    "image": "image_pull_slow",
    "start": "start_timeout",
    "readiness": "readiness_failed",
}


class Evidence(msgspec.Struct, frozen=True):
    """One thing that was seen.

    Attributes:
        source: Where: ``container main``, ``event FailedMount x4``, ``condition PodScheduled``, ``node n1``.
        text: What it says, in the words of Kubernetes.
    """

    source: str
    text: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of what the API says of one pod, or of a refusal to create it.

    Attributes:
        state: See `State`.
        failure: The class, when the state is failing or failed; None otherwise.
        why: One line for people: what is waited for, or what happened to which container or volume.
        evidence: What was seen, the most telling first. Empty while nothing is wrong.
        guess: The text or the combination is not one that is known; the class is the nearest.
        waits_for: What a starting pod waits for, None otherwise.
        retry_after_s: What the API server asked to wait, None when it did not.
    """

    state: State
    why: str
    failure: FailureName | None = None
    evidence: tuple[Evidence, ...] = ()
    guess: bool = False
    waits_for: WaitsFor | None = None
    retry_after_s: float | None = None

    @property
    def details(self) -> Failure | None:
        """The entry of the list, None when nothing is wrong."""
        return None if self.failure is None else FAILURES[self.failure]

    @property
    def fault(self) -> Fault | None:
        """Whose fault, None when nothing is wrong."""
        return None if self.failure is None else FAILURES[self.failure].fault

    @property
    def retryable(self) -> bool:
        """Whether a new sandbox can succeed with nothing changed; False when nothing is wrong."""
        return self.failure is not None and FAILURES[self.failure].retryable

    @property
    def evidence_text(self) -> str:
        """The evidence as lines, for `SandboxError.evidence`."""
        return "\n".join(f"{one.source}: {one.text}" for one in self.evidence)


def diagnose(
    failure: FailureName,
    why: str,
    *evidence: Evidence,
    guess: bool = False,
    final: bool | None = None,
) -> Diagnosis:
    """A diagnosis of that failure: failing where the class heals, else failed; `final` overrides."""
    ended = not FAILURES[failure].heals if final is None else final
    return Diagnosis(
        state="failed" if ended else "failing", failure=failure, why=why, evidence=evidence, guess=guess
    )


def overdue(diagnosis: Diagnosis) -> Diagnosis:
    """The same when the caller waits no longer: what was starting or failing has failed.

    Args:
        diagnosis: The last one before the deadline.
    """
    if diagnosis.state == "failing":
        return msgspec.structs.replace(diagnosis, state="failed")
    if diagnosis.state not in ("starting", "unknown"):
        return diagnosis
    failure = "start_timeout" if diagnosis.waits_for is None else _TOO_LATE[diagnosis.waits_for]
    return msgspec.structs.replace(diagnosis, state="failed", failure=failure, waits_for=None)
