"""The sandboxes that a client owns: their heartbeats, and the keepers it must collect."""

import logging
from collections.abc import Iterator

import anyio
import anyio.abc
import msgspec

from .errors import FencedError, SandboxError
from .local import KeeperProcess
from .sandbox import Sandbox
from .stats import ClientStats

_log = logging.getLogger("sandbox_k8s")
_BEATS_PER_LEASE = 3


class OwnedSandbox(msgspec.Struct, kw_only=True, eq=False):
    """A sandbox that this client renews and will stop.

    Attributes:
        keeper: None when another process started it.
    """

    sandbox: Sandbox
    heartbeat: anyio.CancelScope
    keeper: KeeperProcess | None


class OwnedSandboxes:
    """Whose leases are renewed, in ``tasks``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, stats: ClientStats) -> None:
        self._tasks = tasks
        self._stats = stats
        self._held: dict[str, OwnedSandbox] = {}
        self._left_running: list[KeeperProcess] = []

    def __iter__(self) -> Iterator[OwnedSandbox]:
        return iter(list(self._held.values()))

    def add(self, sandbox: Sandbox, keeper: KeeperProcess | None) -> Sandbox:
        """Own a sandbox and begin to renew it."""
        owned = OwnedSandbox(sandbox=sandbox, heartbeat=anyio.CancelScope(), keeper=keeper)
        self._held[sandbox.id] = owned
        self._tasks.start_soon(self._renew, owned)
        return sandbox

    def find(self, sandbox: Sandbox) -> OwnedSandbox | None:
        """The entry of this very object; None when it was stopped, detached or replaced."""
        owned = self._held.get(sandbox.id)
        return owned if owned is not None and owned.sandbox is sandbox else None

    async def forget(self, owned: OwnedSandbox) -> None:
        """Stop renewing a sandbox and close its connections; a running keeper is collected later."""
        if self._held.get(owned.sandbox.id) is owned:
            del self._held[owned.sandbox.id]
        owned.heartbeat.cancel()
        if owned.keeper is not None and not owned.keeper.collect():
            self._left_running.append(owned.keeper)
        await owned.sandbox.launcher.close()

    def collect_keepers(self) -> None:
        """Collect the keepers of detached sandboxes that have ended, so that they are no zombies of ours."""
        self._left_running = [keeper for keeper in self._left_running if not keeper.collect()]

    async def _renew(self, owned: OwnedSandbox) -> None:
        with owned.heartbeat:
            while True:
                await anyio.sleep(owned.sandbox.handle.lease_s / _BEATS_PER_LEASE)
                self.collect_keepers()
                try:
                    await owned.sandbox.renew()
                except FencedError:
                    return  # the next command of this worker says so
                except SandboxError as problem:
                    if owned.heartbeat.cancel_called:
                        return  # it was being forgotten while this beat woke up
                    self._stats.renewal_failures += 1
                    _log.warning("heartbeat of sandbox %s: %s", owned.sandbox.id, problem)
