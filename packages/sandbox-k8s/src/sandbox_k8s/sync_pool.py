"""The blocking face of a warm pool."""

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from .pool import WarmPool
from .sandbox import Sandbox
from .sync_sandbox import SyncSandbox

if TYPE_CHECKING:
    from .sync import SyncSandboxClient


class SyncWarmPool:
    """Keeps sandboxes of one spec ready: ``with client.warm_pool(spec, size=8) as pool:``. See `WarmPool`.

    Any number of threads may take. A pool that is open when its client is closed ends with it.
    """

    def __init__(self, client: "SyncSandboxClient", pool: WarmPool) -> None:
        self.client = client
        self.pool = pool

    def __enter__(self) -> Self:
        self.client.thread.call(self._begin, self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.client.opened:
            self.client.thread.call(self._end)

    @property
    def ready(self) -> int:
        """Sandboxes that can be taken at once."""
        return self.pool.ready

    def take(self) -> SyncSandbox:
        """See `WarmPool.take`; a sandbox that Ctrl-C kept from its caller is stopped."""
        return SyncSandbox(self.client, self.client.thread.call(self.pool.take, Sandbox.stop))

    async def _begin(self) -> None:
        self._leave, self._left = anyio.Event(), anyio.Event()
        opened = anyio.Event()
        self.client.thread.post(partial(self._live, opened))
        try:
            await opened.wait()
        except BaseException:
            self._leave.set()
            raise

    async def _live(self, opened: anyio.Event) -> None:
        """Hold the pool in a task of its own: whoever opens a task group has to close it."""
        try:
            async with self.pool:
                opened.set()
                await self._leave.wait()
        finally:
            self._left.set()

    async def _end(self, begun: None = None) -> None:
        self._leave.set()
        await self._left.wait()
