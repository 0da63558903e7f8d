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
    """A sandbox that this client renews and will stop.

    Attributes:
        heartbeat: Ends its renewals.
        changing: Held while a request about the lease is under way, so that a heartbeat never arrives after
            the detach that it was sent before.
        length_lost: Whether a detach failed half-way: the launcher may have the detached lease, and the next
            heartbeat gives it its own back.
        recording: A renewal of its record that is under way.
        fenced: Its record says that another worker owns it.
    """

    sandbox: Sandbox
    heartbeat: anyio.CancelScope
    changing: anyio.Lock
    length_lost: bool = False
    recording: anyio.CancelScope | None = None
    fenced: bool = False

    def end_renewals(self) -> None:
        """Renew it no more, in the middle of a renewal too."""
        self.heartbeat.cancel()
        if self.recording is not None:
            self.recording.cancel()


class OwnedSandboxes:
    """Whose leases are renewed, in ``tasks``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, backend: Backend, stats: ClientStats) -> None:
        self._tasks = tasks
        self._backend = backend
        self._stats = stats
        self._held: dict[str, OwnedSandbox] = {}
        self._replaced: list[Sandbox] = []
        self._keeps_records = False

    def __iter__(self) -> Iterator[OwnedSandbox]:
        return iter(list(self._held.values()))

    def add(self, sandbox: Sandbox) -> Sandbox:
        """Own a sandbox and begin to renew it."""
        owned = OwnedSandbox(sandbox=sandbox, heartbeat=anyio.CancelScope(), changing=anyio.Lock())
        before = self._held.get(sandbox.id)
        if before is not None:
            before.end_renewals()
            self._replaced.append(before.sandbox)  # its connections tell whoever still uses it of the fence
        self._held[sandbox.id] = owned
        self._tasks.start_soon(self._keep_lease, owned)
        if not self._keeps_records:
            self._keeps_records = True
            self._tasks.start_soon(self._keep_records)
        return sandbox

    async def close(self) -> None:
        """Close the connections of sandboxes that this client attached anew."""
        for sandbox in self._replaced:
            await sandbox.launcher.close()

    def find(self, sandbox: Sandbox) -> OwnedSandbox | None:
        """The entry of this very object; None when it was stopped, detached or replaced."""
        owned = self._held.get(sandbox.id)
        return owned if owned is not None and owned.sandbox is sandbox else None

    async def forget(self, owned: OwnedSandbox) -> None:
        """Stop renewing a sandbox and close its connections."""
        owned.end_renewals()
        # Closed first: a caller that is cut off here finds it in the list again and closes it then.
        with anyio.CancelScope(shield=True):
            await owned.sandbox.launcher.close()
        if self._held.get(owned.sandbox.id) is owned:  # and not attached anew by this very client
            del self._held[owned.sandbox.id]
            self._backend.released(owned.sandbox.handle)

    async def _keep_lease(self, owned: OwnedSandbox) -> None:
        every_s = owned.sandbox.handle.lease_s / _BEATS_PER_LEASE
        with owned.heartbeat:
            while True:
                await anyio.sleep(every_s)
                try:
                    with anyio.fail_after(every_s):  # a silent connection must not cost the next beats too
                        await self._beat(owned)
                except FencedError:
                    owned.end_renewals()  # the next command of this worker says so
                except (SandboxError, TimeoutError) as problem:
                    self._count(owned, problem)

    async def _beat(self, owned: OwnedSandbox) -> None:
        async with owned.changing:
            handle = owned.sandbox.handle
            wanted = {"lease_s": handle.lease_s} if owned.length_lost else {}
            await owned.sandbox.launcher.call("/sbx/lease", wanted)
            owned.length_lost = False

    async def _keep_records(self) -> None:
        """Renew the records of all of them, apart from the leases.

        An API server that is down must not keep the launchers from hearing of us. One task for all: each more
        per sandbox is thousands of objects, and the time of a garbage collection.
        """
        while self._held:
            shortest_s = min(owned.sandbox.handle.lease_s for owned in self)
            await anyio.sleep(shortest_s / _BEATS_PER_LEASE)
            for owned in self:
                if not (owned.fenced or owned.heartbeat.cancel_called):
                    await self._keep_record(owned)
        self._keeps_records = False

    async def _keep_record(self, owned: OwnedSandbox) -> None:
        with anyio.CancelScope() as owned.recording:
            try:
                await self._backend.renewed(owned.sandbox.handle)
            except FencedError:
                owned.fenced = True  # and the launcher tells the other beat
            except SandboxError as problem:
                self._count(owned, problem)
        owned.recording = None

    def _count(self, owned: OwnedSandbox, problem: Exception) -> None:
        if owned.heartbeat.cancel_called:
            return  # it was being forgotten while this beat woke up
        self._stats.renewal_failures += 1
        what = "no answer in time" if isinstance(problem, TimeoutError) else problem
        _log.warning("heartbeat of sandbox %s: %s", owned.sandbox.id, what)
