"""The reaper of a run: deletes pods that ended, or whose owner has not been heard of for too long."""

import logging
from collections.abc import Mapping
from typing import Any

import anyio.to_thread

from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import ClusterError, ConfigError
from sandbox_k8s.stats import ReapedSandbox

from . import records
from .access import ApiAccess
from .api import ConflictError, PodApi
from .config import KubernetesConfig

_log = logging.getLogger("sandbox_k8s")
CLOCK_SKEW_NS = 5_000_000_000
"""How far the clocks of workers and reapers may be apart."""


async def sweep(
    config: KubernetesConfig, clock: Clock, *, every_run: bool = False, dry_run: bool = False
) -> tuple[ReapedSandbox, ...]:
    """Reap once, without a client: no run key is read or made, and two verbs are enough.

    Args:
        config: Which cluster, namespace and run.
        clock: For wall time and pauses.
        every_run: All runs of the namespace instead.
        dry_run: Only say what would be removed.

    Raises:
        ClusterError: The API server refused or stayed silent.
        ConfigError: There is no usable configuration.
    """
    api = PodApi(await anyio.to_thread.run_sync(ApiAccess, config), config, clock)
    try:
        return await reap(api, config, clock.now_ns(), every_run=every_run, dry_run=dry_run)
    finally:
        api.close()


async def reap(
    api: PodApi, config: KubernetesConfig, now_ns: int, *, dry_run: bool, every_run: bool = False
) -> tuple[ReapedSandbox, ...]:
    """Delete what is over; a pod that was renewed meanwhile stays, since its version is another one then.

    Raises:
        ClusterError: The pods could not be listed, or some could not be deleted; the others were.
    """
    reaped: list[ReapedSandbox] = []
    failed: ClusterError | None = None
    for pod in (await api.list(records.selector(None if every_run else config.run))).items:
        metadata = pod["metadata"]
        why = "" if "deletionTimestamp" in metadata else _why(pod, config.cluster, now_ns)
        if not why:
            continue
        try:
            if not dry_run:
                await api.delete(
                    metadata["name"], uid=metadata["uid"], resource_version=metadata["resourceVersion"]
                )
            sandbox_id = metadata["labels"].get(records.SANDBOX, metadata["name"])
            reaped.append(ReapedSandbox(sandbox_id=sandbox_id, why=why))
        except ConflictError:
            continue
        except ClusterError as problem:
            _log.warning("%s; the sweep goes on", problem)
            failed = problem
    if failed is not None:
        raise failed
    return tuple(reaped)


def _why(pod: Mapping[str, Any], cluster: str, now_ns: int) -> str:
    if records.has_ended(pod):
        return "its launcher ended"
    try:
        held = records.read_record(pod, cluster)
    except ConfigError as problem:
        _log.warning("%s; left alone until it ends", problem)
        return ""
    over_ns = now_ns - held.expires_ns - CLOCK_SKEW_NS
    return f"nobody renewed it, {over_ns // 10**9} s too long" if over_ns > 0 else ""
