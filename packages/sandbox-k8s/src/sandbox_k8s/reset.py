"""A used sandbox that becomes as good as new, or is stopped: never anything in between."""

import logging

import anyio

from .errors import ResetRefusedError
from .many import stop_all
from .sandbox import Sandbox
from .stats import ClientStats

_log = logging.getLogger("sandbox_k8s")
_WORK_S = 600.0


async def reset(taken: Sandbox, stats: ClientStats) -> Sandbox:
    """See `SandboxClient.reset`; whatever goes wrong, the sandbox is stopped.

    Args:
        taken: With an epoch that nobody has used yet.
        stats: Counts.

    Raises:
        ResetRefusedError: It is not clean, or was never marked.
    """
    try:
        answer = await taken.launcher.call("/sbx/reset", {}, work_s=_WORK_S)
        if answer["differences"]:
            raise ResetRefusedError(
                f"sandbox {taken.id} is not what it was when it was clean; it was stopped",
                differences=tuple(answer["differences"]),
            )
    except BaseException as problem:
        stats.resets_refused += 1
        _log.info("sandbox %s is stopped instead of reset: %s", taken.id, problem)
        with anyio.CancelScope(shield=True):
            await stop_all([taken])
        raise
    stats.resets += 1
    return taken
