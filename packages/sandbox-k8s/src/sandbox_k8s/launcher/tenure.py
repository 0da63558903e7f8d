"""Who may do what at the moment: the rules of `ownership`, where they meet threads and connections."""

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from .clock import date, monotonic_s
from .execute import FENCED, Wake
from .ownership import AloneError, Operation, Ownership

_OLDER_END_S = 15.0
_ALONE_END_S = 5.0
_TELL_EVERY_S = 1.0


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        epoch: The owner that the caller says it is; None for one that knows no epochs.
        request_id: Its name for the request, for the log.
        connection: Where it waits; shut when its request must end. None for one that is not cut.
        cut: In which direction: `socket.SHUT_RD` or `socket.SHUT_RDWR`.
    """

    epoch: int | None = None
    request_id: str | None = None
    connection: socket.socket | None = None
    cut: int = socket.SHUT_RD


NOBODY = Caller()


class Tenure:
    """The owner, the lease, and what is under way for whom. All methods may be called from any thread.

    Args:
        ownership: The rules, which nobody else calls any more.
        told: Told the seconds left of the lease, at each renewal (at most once a second) and each change.
        keep: Told each new epoch before it is in force, for an owner to stay fenced over a restart.
    """

    def __init__(
        self, ownership: Ownership, *, told: Callable[[float | None], None], keep: Callable[[int], None]
    ) -> None:
        self._ownership = ownership
        self._told = told
        self._keep = keep
        self._told_s = 0.0
        self._changed = threading.Condition()
        self._wakes: dict[Operation, Wake] = {}
        self._callers: dict[Operation, Caller] = {}

    @property
    def epoch(self) -> int:
        """The owner's epoch; 0 before there was one."""
        return self._ownership.epoch

    def fence(self, epoch: int) -> int:
        """Make ``epoch`` the owner; returns once nothing of older owners runs any more.

        Raises:
            FencedError, LeaseOverError: See `Ownership.fence`.
            StillRunningError: What an older owner left does not end: nobody owns this until another fence
                succeeds.
        """
        with self._changed:
            if epoch > self.epoch:
                self._keep(epoch)
            number, older = self._ownership.fence(epoch, monotonic_s())
            self._tell(force=True)
            for operation in older:
                self._cut(operation)
            # Whoever waits longer than its client does would answer nobody.
            self._changed.wait_for(
                lambda: not any(self._ownership.runs(one) for one in older), timeout=_OLDER_END_S
            )
            self._ownership.fenced(number, epoch, monotonic_s())
        return epoch

    def _cut(self, operation: Operation) -> None:
        self._wakes[operation].cancel(FENCED)
        caller = self._callers[operation]
        if caller.connection is not None:
            with suppress(OSError):  # it is closed already
                caller.connection.shutdown(caller.cut)

    @contextmanager
    def operation(self, what: str, caller: Caller = NOBODY, *, busy_s: float | None = 0.0) -> Generator[Wake]:
        """Something under way on behalf of a caller. No fence is answered before it has ended.

        Whatever a caller brings is read before: what begins when the caller was looked at must not wait for
        the network, unless the connection can be cut. Waits a while for a mark or a reset to end: its client
        may have gone away from it, and knows nothing of what it left.

        Args:
            what: For the log: ``command``, ``session``, ``read`` or ``write``.
            caller: Who asks.
            busy_s: How long it may take, None for ever; holds the lease for callers that know no heartbeats.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: The caller may not, or was replaced meanwhile.
            AloneError: A mark or a reset does not end.
        """
        wake = Wake()  # first: without descriptors nothing begins, which then would never end
        try:
            with self._changed:
                self._ownership.check(caller.epoch, monotonic_s())  # who is refused anyway does not wait
                self._changed.wait_for(lambda: not self._ownership.held_alone, timeout=_ALONE_END_S)
                operation = self._ownership.begin(
                    what, caller.epoch, monotonic_s(), busy_s=busy_s, request_id=caller.request_id
                )
                self._wakes[operation] = wake
                self._callers[operation] = caller
                self._tell(force=busy_s != 0.0)
        except BaseException:
            wake.close()
            raise
        try:
            yield wake
        finally:
            with self._changed:
                del self._wakes[operation], self._callers[operation]
                wake.close()
                self._changed.notify_all()
                try:
                    self._ownership.end(operation, monotonic_s())
                finally:
                    self._tell(force=busy_s is None)

    def alone(self, wake: Wake, *, cut: bool) -> None:
        """Let nothing of anybody else begin until the operation of that wake has ended.

        Args:
            wake: Of the operation that wants to be alone.
            cut: Whether what is under way is ended. Otherwise its caller goes away.

        Raises:
            AloneError: Something is under way, and is not to be cut or does not end.
            CutOffError: A new owner came.
        """
        with self._changed:
            wake.go_on()  # another one that wants to be alone may have cut this one
            own = next(one for one, its in self._wakes.items() if its is wake)
            others = self._ownership.alone(own)
            if cut:
                for one in others:
                    self._cut(one)
                self._changed.wait_for(
                    lambda: wake.cancelled or not any(self._ownership.runs(one) for one in others),
                    timeout=_OLDER_END_S,
                )
            wake.go_on()
            if running := sum(self._ownership.runs(one) for one in others):
                raise AloneError(f"{running} requests of others are under way")

    def keep_epoch(self, wake: Wake) -> bytes:
        """Write the epoch once more, for a file that a command may have spoiled; what it must hold now.

        Raises:
            CutOffError: A new owner came, whose epoch is kept already.
        """
        with self._changed:
            wake.go_on()
            self._keep(self.epoch)
            return str(self.epoch).encode()

    def check(self, epoch: int | None) -> None:
        """Refuse whoever is not the owner; callers that know no epochs may stay.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not.
        """
        with self._changed:
            self._ownership.check(epoch, monotonic_s())

    def heard(self, epoch: int | None) -> None:
        """A request came, or goes on: see `Ownership.heard`."""
        with self._changed:
            self._ownership.heard(epoch, monotonic_s())
            self._tell(force=False)

    def renew(self, epoch: int | None) -> None:
        """A heartbeat.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not the owner's.
        """
        with self._changed:
            self._ownership.must_own(epoch, monotonic_s())

    def change_lease(self, epoch: int | None, length_s: float | None) -> None:
        """Give the lease another length, counted from now.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not the owner who asks.
        """
        with self._changed:
            self._ownership.change_lease(epoch, length_s, monotonic_s())
            self._tell(force=True)
            self._changed.notify_all()

    def left_s(self) -> float | None:
        """Seconds until the lease is over; None when it never is."""
        with self._changed:
            return self._ownership.left_s(monotonic_s())

    def wait_for_end(self) -> str:
        """Return when the lease has run out: with a sentence that says whose, and since when."""
        with self._changed:
            while not self._ownership.over(monotonic_s()):
                self._changed.wait(self._ownership.left_s(monotonic_s()))
            silent_s = monotonic_s() - self._ownership.lease.renewed_s
            owner = f"its owner, epoch {self.epoch}," if self.epoch else "anybody"
            return f"the lease ran out at {date()}: nothing was heard of {owner} for {silent_s:.0f} s"

    def log(self, after: int = 0) -> list[dict[str, Any]]:
        """The lines of the log above a number; see `log.Entry`."""
        with self._changed:
            return self._ownership.log.after(after)

    def _tell(self, *, force: bool) -> None:
        now_s = monotonic_s()
        if force or now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._told(self._ownership.left_s(now_s))
