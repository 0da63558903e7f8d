"""A used sandbox that becomes as good as new, or is stopped: never anything in between."""

import logging
from collections.abc import Awaitable, Callable

import anyio

from .errors import ResetRefusedError
from .many import stop_all
from .sandbox import Sandbox
from .stats import ClientStats

_log = logging.getLogger("sandbox_k8s")
_WORK_S = 600.0


async def reset(used: Sandbox, take: Callable[[], Awaitable[Sandbox]], stats: ClientStats) -> Sandbox:
    """See `SandboxClient.reset`; whatever goes wrong once it was taken over, the sandbox is stopped.

    Args:
        used: As its user knows it.
        take: Wins its next epoch, which nobody has used yet.
        stats: Counts.

    Raises:
        ResetRefusedError: It is not clean, and was stopped. Or it was never marked: a mistake of the caller,
            for which nothing was done to it.
    """
    await _must_be_marked(used)
    held = used
    try:
        held = await take()
        answer = await held.launcher.call("/sbx/reset", {}, work_s=_WORK_S)
        if answer["differences"]:
            raise ResetRefusedError(
                f"sandbox {held.id} is not what it was when it was clean, and is not used again",
                differences=tuple(answer["differences"]),
            )
    except BaseException as problem:
        stats.resets_refused += 1
        _log.info("sandbox %s is stopped instead of reset: %s", held.id, problem)
        stopped = 0
        with anyio.CancelScope(shield=True):
            stopped = await stop_all([held])
        if isinstance(problem, ResetRefusedError):
            problem.stopped = stopped == 1
        raise
    stats.resets += 1
    return held


async def _must_be_marked(used: Sandbox) -> None:
    if not (await used.info())["marked"]:
        raise ResetRefusedError(
            f"sandbox {used.id} was never marked as clean: call mark_clean() while it is fresh; nothing was "
            "done to it"
        )
