"""Starting many sandboxes: results in order, one failure loses nothing, and callers hear how far it is."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import msgspec

from .errors import SandboxError
from .sandbox import Sandbox
from .spec import SandboxSpec

if TYPE_CHECKING:
    from .client import SandboxClient

_log = logging.getLogger("sandbox_k8s")
_STOPS_PER_TURN = 16


class StartProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far `SandboxClient.start_many` is.

    Attributes:
        total: Starts that were asked for.
        started: Sandboxes that came up.
        failed: Starts that failed.
        index: Which one has just ended, as in the specs.
        problem: Why it failed; None when it came up.
    """

    total: int
    started: int
    failed: int
    index: int
    problem: SandboxError | None

    @property
    def left(self) -> int:
        """Starts that wait or are under way."""
        return self.total - self.started - self.failed


async def start_many(
    client: "SandboxClient",
    specs: Sequence[SandboxSpec],
    progress: Callable[[StartProgress], object] | None,
) -> list[Sandbox | SandboxError]:
    """See `SandboxClient.start_many`."""
    results: dict[int, Sandbox | SandboxError] = {}

    def ended(index: int, result: Sandbox | SandboxError) -> None:
        results[index] = result
        if progress is None:
            return
        started = sum(isinstance(one, Sandbox) for one in results.values())
        progress(
            StartProgress(
                total=len(specs),
                started=started,
                failed=len(results) - started,
                index=index,
                problem=result if isinstance(result, SandboxError) else None,
            )
        )

    async def work(todo: Iterator[tuple[int, SandboxSpec]]) -> None:
        for index, spec in todo:
            try:
                ended(index, await client.start(spec))
            except SandboxError as problem:
                ended(index, problem)

    todo = enumerate(specs)
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(min(len(specs), client.config.start_concurrency_max)):
                tasks.start_soon(work, todo)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await stop_all([one for one in results.values() if isinstance(one, Sandbox)])
        raise
    return [results[index] for index in range(len(specs))]


async def stop_all(sandboxes: Sequence[Sandbox]) -> int:
    """Stop sandboxes together; one that cannot be stopped is logged, and ends by its lease.

    Returns:
        How many were stopped.
    """
    stopped = 0

    async def stop(sandbox: Sandbox) -> None:
        nonlocal stopped
        try:
            await sandbox.stop()
        except SandboxError as problem:
            _log.warning("stopping sandbox %s: %s", sandbox.id, problem)
        else:
            stopped += 1

    async with anyio.create_task_group() as stopping:
        for number, sandbox in enumerate(sandboxes, 1):
            stopping.start_soon(stop, sandbox)
            if number % _STOPS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()  # a thousand at once would hold up the loop
    return stopped
