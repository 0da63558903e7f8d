"""The sandboxes that a client owns, their heartbeats, and the renewals of their records."""

import logging
import math
from collections.abc import Iterator
from operator import itemgetter

import anyio
import anyio.abc
import msgspec

from .backend import Backend
from .due import DueTimes
from .errors import FencedError, SandboxError
from .sandbox import Sandbox
from .stats import ClientStats
from .supervise import supervised

_log = logging.getLogger("sandbox_k8s")
_BEATS_PER_LEASE = 3
_LOOKS_PER_RECORD = 12
_RECORDS_AT_ONCE = 8


class OwnedSandbox(msgspec.Struct, kw_only=True, eq=False):
    """A sandbox that this client renews and will stop.

    Attributes:
        answered_s: When the last heartbeat that was answered began, on the loop's clock.
        missed: Heartbeats since then that were not.
        beating: A heartbeat that is under way.
        changing: Held while a request about the lease is under way, so that a heartbeat never arrives after
            the detach that it was sent before.
        length_lost: Whether a detach failed half-way: the launcher may have the detached lease, and the next
            heartbeat gives it its own back.
        recording: A renewal of its record that is under way.
        recorded_s: When the last one was over, on the loop's clock.
        late: Less than a third was left of its record when it was last looked at.
        fenced: Its record says that another worker owns it.
        over: It is renewed no more.
        stopping: This client is ending it: its launcher is gone before its pod is.
    """

    sandbox: Sandbox
    changing: anyio.Lock
    answered_s: float
    missed: int = 0
    beating: anyio.CancelScope | None = None
    length_lost: bool = False
    recording: anyio.CancelScope | None = None
    recorded_s: float = -math.inf
    late: bool = False
    fenced: bool = False
    over: bool = False
    stopping: bool = False

    @property
    def beat_every_s(self) -> float:
        """Between one heartbeat and the next."""
        return self.sandbox.handle.lease_s / _BEATS_PER_LEASE

    @property
    def is_renewed(self) -> bool:
        """Whether its record is still to be renewed."""
        return not (self.fenced or self.over)

    def end_renewals(self) -> None:
        """Renew it no more, in the middle of a renewal too."""
        self.over = True
        if self.beating is not None:
            self.beating.cancel()
        if self.recording is not None:
            self.recording.cancel()


class OwnedSandboxes:
    """Whose leases are renewed, in ``tasks``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, backend: Backend, stats: ClientStats) -> None:
        self._tasks = tasks
        self._backend = backend
        self._stats = stats
        self._held: dict[str, OwnedSandbox] = {}
        self._beats = DueTimes()
        self._keeps_leases = False
        self._keeps_records = False
        self._due: list[OwnedSandbox] = []
        self._look_s = self._looked_s = math.inf
        self._newcomer = anyio.Event()

    def __iter__(self) -> Iterator[OwnedSandbox]:
        return iter(list(self._held.values()))

    def add(self, sandbox: Sandbox) -> Sandbox:
        """Own a sandbox and begin to renew it."""
        owned = OwnedSandbox(sandbox=sandbox, changing=anyio.Lock(), answered_s=anyio.current_time())
        before = self._held.get(sandbox.id)
        if before is not None:
            before.end_renewals()
            self._tasks.start_soon(self._close_replaced, before.sandbox, sandbox.handle.epoch)
        self._held[sandbox.id] = owned
        self._beats.put(sandbox.id, owned.answered_s + owned.beat_every_s)
        if not self._keeps_leases:
            self._keeps_leases = True
            self._tasks.start_soon(supervised, "renewing leases", self._keep_leases, self._stats)
        if not self._keeps_records:
            self._keeps_records = True
            self._tasks.start_soon(supervised, "renewing records", self._keep_records, self._stats)
        elif self._look_every_s(owned) < self._look_s:
            self._newcomer.set()
        return sandbox

    async def _close_replaced(self, sandbox: Sandbox, epoch: int) -> None:
        with anyio.CancelScope(shield=True):
            await sandbox.launcher.replaced(epoch)

    def find(self, sandbox: Sandbox) -> OwnedSandbox | None:
        """The entry of this very object; None when it was stopped, detached or replaced."""
        owned = self._held.get(sandbox.id)
        return owned if owned is not None and owned.sandbox is sandbox else None

    def successor(self, sandbox: Sandbox) -> Sandbox | None:
        """The object with a later epoch of the same sandbox; None when this client has no such."""
        owned = self._held.get(sandbox.id)
        return None if owned is None or owned.sandbox is sandbox else owned.sandbox

    async def forget(self, owned: OwnedSandbox) -> None:
        """Stop renewing a sandbox and close its connections."""
        owned.end_renewals()
        # Closed first: a caller that is cut off here finds it in the list again and closes it then.
        with anyio.CancelScope(shield=True):
            await owned.sandbox.launcher.close()
        if self._held.get(owned.sandbox.id) is owned:  # and not attached anew by this very client
            del self._held[owned.sandbox.id]
            self._beats.drop(owned.sandbox.id)
            self._backend.released(owned.sandbox.handle)

    async def _keep_leases(self) -> None:
        """Let each of them beat when it is due; none waits for the answer of another."""
        while True:
            owned = self._held.get(await self._beats.next())
            if owned is not None and not owned.over:
                self._tasks.start_soon(self._keep_lease, owned)

    async def _keep_lease(self, owned: OwnedSandbox) -> None:
        """Beat by the clock, however long answers take; what is not answered is said again at once."""
        every_s, begun_s, answered = owned.beat_every_s, anyio.current_time(), False
        with anyio.CancelScope() as owned.beating:
            if not owned.over:
                answered = await self._is_answered(owned, every_s / 2)
        owned.beating = None
        if owned.over:
            return
        now_s = anyio.current_time()
        if answered:
            owned.answered_s, owned.missed, due_s = begun_s, 0, begun_s + every_s
        elif owned.missed:
            owned.missed += 1
            may_live = now_s - owned.answered_s < owned.sandbox.handle.lease_s
            due_s = now_s + (every_s / 4 if may_live else every_s)
        else:
            owned.missed, due_s = 1, now_s
        self._beats.put(owned.sandbox.id, due_s)

    async def _is_answered(self, owned: OwnedSandbox, within_s: float) -> bool:
        try:
            with anyio.fail_after(within_s):  # a silent connection must not cost the next beats too
                await self._beat(owned)
        except FencedError:
            owned.end_renewals()  # the next command of this worker says so
        except Exception as problem:  # of whatever kind: it must not end the client
            self._count(owned, problem, again=owned.missed > 0)
            return False
        return True

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
            self._look_for_due()
            async with anyio.create_task_group() as tasks:
                for _ in range(min(_RECORDS_AT_ONCE, len(self._due))):
                    tasks.start_soon(self._renew_due)
            with anyio.move_on_after(self._look_s):
                await self._newcomer.wait()
        self._keeps_records = False

    async def _renew_due(self) -> None:
        while self._due:
            owned = self._due.pop()
            if owned.is_renewed and owned.recording is None:
                await self._keep_record(owned)
            if self._newcomer.is_set() or anyio.current_time() - self._looked_s > self._look_s:
                self._look_for_due()

    def _look_for_due(self) -> None:
        """Find those whose records are due, the one that ends first at the end of the list."""
        self._newcomer = anyio.Event()
        self._look_s, self._looked_s = math.inf, anyio.current_time()
        found: list[tuple[float, OwnedSandbox]] = []
        late = 0
        for owned in self._held.values():
            every_s, record = self._look_every_s(owned), self._backend.record(owned.sandbox.handle)
            self._look_s = min(self._look_s, every_s)
            was_late, owned.late = owned.late, record is not None and record.late
            late += owned.late and not was_late and owned.is_renewed
            if (record is None or record.due) and self._looked_s - owned.recorded_s >= every_s / 2:
                found.append((0.0 if record is None else record.left_s, owned))
        self._due = [owned for _, owned in sorted(found, key=itemgetter(0), reverse=True)]
        if late:
            self._stats.records_late += late
            _log.warning(
                "less than a third is left of the records of %d more sandboxes; when nothing is left, a "
                "reaper takes them. Is the API server slow, or does it refuse changes of pods?",
                late,
            )

    def _look_every_s(self, owned: OwnedSandbox) -> float:
        """How often to look whether its record is due, and how soon to try again."""
        record = self._backend.record(owned.sandbox.handle)
        if record is None:
            return owned.beat_every_s
        return record.lasts_s / _LOOKS_PER_RECORD

    async def _keep_record(self, owned: OwnedSandbox) -> None:
        within_s = 2 * self._look_every_s(owned)
        with anyio.move_on_after(within_s) as owned.recording:
            try:
                await self._backend.renewed(owned.sandbox.handle)
            except FencedError:
                owned.fenced = True  # and the launcher tells the other beat
            except Exception as problem:  # of whatever kind: it must not keep others from their renewals
                self._count(owned, problem)
        if owned.recording.cancelled_caught:
            self._count(owned, TimeoutError())
        owned.recording, owned.recorded_s = None, anyio.current_time()

    def _count(self, owned: OwnedSandbox, problem: Exception, *, again: bool = False) -> None:
        """Count and log what a renewal met; what follows the same trouble again, in less detail."""
        if owned.over or owned.stopping:
            return  # it was being forgotten while this beat woke up, or has ended as it was to
        self._stats.renewal_failures += 1
        level, trace = logging.DEBUG if again else logging.WARNING, None
        if not isinstance(problem, SandboxError | TimeoutError):
            self._stats.task_faults += 1
            trace = problem
        what = "no answer in time" if isinstance(problem, TimeoutError) else problem
        _log.log(level, "renewing sandbox %s: %s", owned.sandbox.id, what, exc_info=trace)
