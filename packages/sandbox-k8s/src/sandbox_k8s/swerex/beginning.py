"""A start or an attach under way, which somebody else may end."""

from collections.abc import Awaitable, Callable

import anyio

from sandbox_k8s.client import SandboxClient
from sandbox_k8s.errors import SandboxStartError
from sandbox_k8s.many import stop_all
from sandbox_k8s.sandbox import Sandbox
from sandbox_k8s.sync import SyncSandboxClient

Obtain = Callable[[SandboxClient], Awaitable[Sandbox]]


class Beginning:
    """How a deployment gets its sandbox. `end` may be called at any time, from any thread.

    Args:
        obtain: Called in the client's own thread.
        attached: Whether the sandbox is somebody else's, to be detached again and not stopped when the
            deployment does not get it.
    """

    def __init__(self, obtain: Obtain, *, attached: bool) -> None:
        self._obtain = obtain
        self._attached = attached
        self._client: SyncSandboxClient | None = None
        self._scope: anyio.CancelScope | None = None
        self._ended = False

    async def run(self, client: SyncSandboxClient) -> Sandbox:
        """Get the sandbox. Cancelled, failed or ended, nothing is left of it.

        Raises:
            SandboxStartError: `end` was called.
            SandboxError: It failed.
        """
        self._client = client
        return await client.thread.call_from(self._obtained, self._give_back)

    async def undo(self, client: SyncSandboxClient, sandbox: Sandbox) -> None:
        """Give back what `run` got, to the end, also when the caller is cancelled meanwhile."""

        async def to_the_end() -> None:
            with anyio.CancelScope(shield=True):
                await self._give_back(sandbox)

        await client.thread.call_from(to_the_end)

    def end(self) -> None:
        """Have `run` fail; without effect when it is over."""
        self._ended = True
        if self._client is not None:
            self._client.thread.post(self._cancel)

    async def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _obtained(self) -> Sandbox:
        assert self._client is not None
        with anyio.CancelScope() as self._scope:
            if self._ended:
                self._scope.cancel()
            return await self._obtain(self._client.client)
        raise SandboxStartError("the deployment was stopped while its sandbox was starting")

    async def _give_back(self, sandbox: Sandbox) -> None:
        if self._attached:
            await sandbox.detach()
        else:
            await stop_all([sandbox])
