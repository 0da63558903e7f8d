"""Waiting for a pod: for room in the quota, until it is ready, never will be, or why it is lost."""

from collections.abc import Callable
from typing import Any

import anyio

from sandbox_k8s.errors import ClusterError, SandboxStartError

from . import records
from .api import PodApi
from .classify import classify
from .config import KubernetesConfig
from .diagnosis import Diagnosis, overdue
from .watch import FollowedPod

_REPORT_S = 3.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


async def create_within_quota(api: PodApi, pod: dict[str, Any], config: KubernetesConfig) -> dict[str, Any]:
    """Create a pod. Room in the namespace's quota is waited for as room on a node is: `failing_timeout_s`.

    Raises:
        ClusterError: It was refused, or there was no room for all that time.
    """
    pause_s = _FIRST_PAUSE_S
    give_up_s = anyio.current_time() + min(config.failing_timeout_s, config.start_timeout_s)
    while True:
        try:
            return await api.create(pod, records.REQUEST)
        except ClusterError as problem:
            left_s = give_up_s - anyio.current_time()
            full = problem.diagnosis is not None and problem.diagnosis.failure == "quota_exceeded"
            if not full or left_s <= 0:
                raise
        await anyio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def until_ready(
    followed: FollowedPod, config: KubernetesConfig, suffers: Callable[[Diagnosis], None]
) -> None:
    """Return when the pod is ready.

    Args:
        followed: The pod.
        config: How long to wait.
        suffers: Told when the pod begins to fail, though it may come up yet.

    Raises:
        SandboxStartError: It never will be, or took too long; with the diagnosis.
        ClusterError: Nobody will know, since this client may not watch pods, and not just for a moment.
    """
    deadline_s = anyio.current_time() + config.start_timeout_s
    give_up_s = deadline_s
    while True:
        changed = followed.changed
        if followed.refused is not None:
            raise followed.refused
        found = _look(followed)
        if found.state == "ready":
            return
        if found.state in ("failed", "stopping"):
            raise start_error(followed, found)
        if found.state != "failing":
            give_up_s = deadline_s
        elif give_up_s == deadline_s:
            suffers(found)
            give_up_s = min(deadline_s, anyio.current_time() + config.failing_timeout_s)
        with anyio.move_on_at(give_up_s) as waiting:
            await changed.wait()
        if waiting.cancelled_caught:
            raise start_error(followed, overdue(_look(followed)))


async def until_failed(followed: FollowedPod) -> SandboxStartError:
    """The error for a pod that was ready, once it fails after all: a launcher that ends at once."""
    while True:
        changed = followed.changed
        found = _look(followed)
        if found.state in ("failed", "stopping"):
            return start_error(followed, found)
        await changed.wait()


def start_error(followed: FollowedPod, found: Diagnosis) -> SandboxStartError:
    """The error for a pod that does not come up."""
    return SandboxStartError(
        f"pod {followed.name} did not come up: {found.failure}: {found.why}",
        evidence=found.evidence_text,
        diagnosis=found,
    )


async def why_lost(followed: FollowedPod) -> Diagnosis | None:
    """Why a pod's launcher is silent; None when its pod shows nothing wrong within a few seconds.

    A cut connection comes first, the kubelet's report up to a second or two later.
    """
    with anyio.move_on_after(_REPORT_S):
        while True:
            changed = followed.changed
            found = _look(followed)
            if found.state not in ("ready", "starting", "unknown"):
                return found
            await changed.wait()
    return None


def _look(followed: FollowedPod) -> Diagnosis:
    if followed.pod is None:
        return Diagnosis(state="starting", waits_for="node", why="it was not seen yet")
    return classify(followed.pod, followed.events, missing=followed.gone)
