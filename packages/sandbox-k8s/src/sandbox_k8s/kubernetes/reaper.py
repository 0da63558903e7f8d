"""The reaper of a run: deletes pods that ended, or whose owner has not been heard of for too long."""

import logging

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.stats import ReapedSandbox

from . import records
from .api import ConflictError, PodApi
from .config import KubernetesConfig
from .records import PodRecord

_log = logging.getLogger("sandbox_k8s")
CLOCK_SKEW_NS = 5_000_000_000
"""How far the clocks of workers and reapers may be apart."""


async def reap(
    api: PodApi, config: KubernetesConfig, now_ns: int, *, dry_run: bool
) -> tuple[ReapedSandbox, ...]:
    """Delete what is over; a pod that was renewed meanwhile stays, since its version is another one then."""
    reaped: list[ReapedSandbox] = []
    for pod in (await api.list(records.selector(config.run))).items:
        try:
            held = records.read_record(pod, config.cluster)
        except ConfigError as problem:
            _log.warning("%s; left alone", problem)
            continue
        why = _why(held, now_ns)
        if not why or "deletionTimestamp" in pod["metadata"]:
            continue
        metadata = pod["metadata"]
        if not dry_run:
            try:
                await api.delete(
                    metadata["name"], uid=metadata["uid"], resource_version=metadata["resourceVersion"]
                )
            except ConflictError:
                continue
        reaped.append(ReapedSandbox(sandbox_id=held.handle.sandbox_id, why=why))
    return tuple(reaped)


def _why(held: PodRecord, now_ns: int) -> str:
    if held.ended:
        return "its launcher ended"
    over_ns = now_ns - held.expires_ns - CLOCK_SKEW_NS
    return f"nobody renewed it, {over_ns // 10**9} s too long" if over_ns > 0 else ""
