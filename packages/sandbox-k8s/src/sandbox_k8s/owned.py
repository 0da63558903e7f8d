"""The sandboxes that a client owns, and their heartbeats."""

import logging
from collections.abc import Iterator

import anyio
import anyio.abc
import msgspec

from .backend import Backend
from .errors import FencedError, SandboxError
from .sandbox import Sandbox
from .stats import ClientStats

_log = logging.getLogger("sandbox_k8s")
_BEATS_PER_LEASE = 3


class OwnedSandbox(msgspec.Struct, kw_only=True, eq=False):
    """A sandbox that this client renews and will stop."""

    sandbox: Sandbox
    heartbeat: anyio.CancelScope


class OwnedSandboxes:
    """Whose leases are renewed, in ``tasks``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, backend: Backend, stats: ClientStats) -> None:
        self._tasks = tasks
        self._backend = backend
        self._stats = stats
        self._held: dict[str, OwnedSandbox] = {}

    def __iter__(self) -> Iterator[OwnedSandbox]:
        return iter(list(self._held.values()))

    def add(self, sandbox: Sandbox) -> Sandbox:
        """Own a sandbox and begin to renew it."""
        owned = OwnedSandbox(sandbox=sandbox, heartbeat=anyio.CancelScope())
        self._held[sandbox.id] = owned
        self._tasks.start_soon(self._renew, owned)
        return sandbox

    def find(self, sandbox: Sandbox) -> OwnedSandbox | None:
        """The entry of this very object; None when it was stopped, detached or replaced."""
        owned = self._held.get(sandbox.id)
        return owned if owned is not None and owned.sandbox is sandbox else None

    async def forget(self, owned: OwnedSandbox) -> None:
        """Stop renewing a sandbox and close its connections."""
        if self._held.get(owned.sandbox.id) is owned:  # and not attached anew by this very client
            del self._held[owned.sandbox.id]
            self._backend.released(owned.sandbox.handle)
        owned.heartbeat.cancel()
        await owned.sandbox.launcher.close()

    async def _renew(self, owned: OwnedSandbox) -> None:
        with owned.heartbeat:
            while True:
                await anyio.sleep(owned.sandbox.handle.lease_s / _BEATS_PER_LEASE)
                try:
                    await owned.sandbox.renew()
                    await self._backend.renewed(owned.sandbox.handle)
                except FencedError:
                    return  # the next command of this worker says so
                except SandboxError as problem:
                    if owned.heartbeat.cancel_called:
                        return  # it was being forgotten while this beat woke up
                    self._stats.renewal_failures += 1
                    _log.warning("heartbeat of sandbox %s: %s", owned.sandbox.id, problem)
