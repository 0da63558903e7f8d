"""Who owns the sandbox, what runs for whom, and when the lease is over: the rules, without any I/O.

The launcher calls this under one lock and tells it the time; the tests call the same object in virtual time.

- An owner is an epoch, and a fence makes one. A lower one is refused for ever, also after the container was
  started again; a higher one that never fenced is refused as well: it owns nothing here.
- Only the owner moves the lease. A zombie's or a guest's requests do not keep a sandbox alive. Before there
  was any owner, as for SWE-ReX's own client, everybody's requests do, and their commands hold it while they
  run.
- Once the lease is over everything is refused, even if the launcher was stopped or frozen when it ran out.
"""

import math

from .lease import Lease
from .log import Log


class FencedError(Exception):
    """The request comes from an owner that has been replaced."""


class NotOwnerError(Exception):
    """The request comes from somebody who never became the owner here."""


class LeaseOverError(Exception):
    """The lease has run out; the sandbox is ending."""


class StillRunningError(Exception):
    """A fence is in force and not answered: something of an older owner does not end."""


class AloneError(Exception):
    """The sandbox is being marked or reset, which nobody else may disturb, or others are under way."""


class Operation:
    """Something that runs on behalf of somebody.

    Attributes:
        number: Of its line in the log.
        epoch: The caller's; None for one that knows no epochs.
        held: The epoch that it runs under.
        until_s: Until when it holds the lease by itself; infinite for as long as it runs.
    """

    def __init__(self, number: int, epoch: int | None, held: int, until_s: float) -> None:
        self.number = number
        self.epoch = epoch
        self.held = held
        self.until_s = until_s


class Ownership:
    """The owner, the lease and what is under way. Not safe for threads by itself.

    Args:
        lease_s: Seconds that nobody needs to be heard of; None means for ever.
        now_s: Monotonic seconds, as in every other call.
        epoch: The last owner of an earlier container of this sandbox; 0 for none.
    """

    def __init__(self, lease_s: float | None, now_s: float, *, epoch: int = 0) -> None:
        self.epoch = epoch
        self.log = Log()
        self.lease = Lease(lease_s, now_s)
        self.ended = False
        self._running: set[Operation] = set()
        self._alone: Operation | None = None

    def fence(self, epoch: int, now_s: float) -> tuple[int, list[Operation]]:
        """Make ``epoch`` the owner.

        Returns:
            The number of the line in the log, and the operations of older owners. Those must end before the
            fence is answered: see `fenced`.

        Raises:
            FencedError: A higher epoch is in force.
            LeaseOverError: There is nothing left to own.
        """
        self._alive(now_s)
        self._not_older(epoch, now_s)
        self.epoch = epoch
        self.lease.renew(now_s)
        number = self.log.add(now_s, "fence", epoch, epoch)
        return number, [one for one in self._running if one.held < epoch]

    def fenced(self, number: int, epoch: int, now_s: float) -> None:
        """The fence is about to be answered, if nothing of older owners runs any more.

        Raises:
            FencedError: A higher epoch came meanwhile.
            StillRunningError: Something does; another fence may succeed later.
        """
        self._not_older(epoch, now_s)
        if older := [one for one in self._running if one.held < epoch]:
            raise StillRunningError(
                f"{len(older)} requests of earlier owners do not end, the first is line "
                f"{min(one.number for one in older)} of the log; epoch {epoch} is in force: attach again, "
                "which takes a higher one"
            )
        self.log.add(now_s, "fenced", epoch, self.epoch, of=number)

    def begin(
        self,
        what: str,
        epoch: int | None,
        now_s: float,
        *,
        busy_s: float | None = 0.0,
        request_id: str | None = None,
    ) -> Operation:
        """Something begins, if the caller may.

        Args:
            what: See `log.Entry`.
            epoch: The caller's.
            now_s: Monotonic seconds.
            busy_s: How long a caller without heartbeats may be silent meanwhile; None is until the end.
            request_id: For the log.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: The caller may not.
            AloneError: Something runs that runs `alone`.
        """
        self.heard(epoch, now_s)
        self.check(epoch, now_s)
        if self._alone is not None:
            raise AloneError(
                f"the sandbox is being marked or reset, line {self._alone.number} of the log: try again later"
            )
        number = self.log.add(now_s, what, epoch, self.epoch, request_id=request_id)
        holds = self.epoch == 0 and self.lease.length_s is not None
        held_s = math.inf if busy_s is None else busy_s + (self.lease.length_s or 0.0)
        until_s = now_s + held_s if holds else now_s
        operation = Operation(number, epoch, self.epoch, until_s)
        self._running.add(operation)
        return operation

    @property
    def held_alone(self) -> bool:
        """Whether something is under way beside which nothing may begin."""
        return self._alone is not None

    def alone(self, operation: Operation) -> list[Operation]:
        """Let nothing else begin before this one has ended; what is under way already, of anybody."""
        self._alone = operation
        return [one for one in self._running if one is not operation]

    def end(self, operation: Operation, now_s: float) -> None:
        """It has ended, well or not.

        Raises:
            FencedError: The owner was replaced while it ran.
        """
        if operation.epoch is None:
            self.heard(None, now_s)  # while it still holds the lease
        self._running.discard(operation)
        if self._alone is operation:
            self._alone = None
        self.log.add(now_s, "end", operation.epoch, self.epoch, of=operation.number)
        if operation.epoch is not None and self.epoch > operation.held:
            raise FencedError(
                f"epoch {operation.epoch} was replaced by epoch {self.epoch} while its request ran"
            )

    def runs(self, operation: Operation) -> bool:
        """Whether it has not ended yet."""
        return operation in self._running

    def check(self, epoch: int | None, now_s: float) -> None:
        """Refuse whoever is not the owner; callers that know no epochs may stay.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not.
        """
        self._alive(now_s)
        if epoch is None:
            return
        self._not_older(epoch, now_s)
        if epoch > self.epoch:
            self._refuse(epoch, now_s)
            raise NotOwnerError(
                f"epoch {epoch} never became the owner of this launcher, {self.epoch} did: its fence was "
                "lost, or the container was started again"
            )

    def heard(self, epoch: int | None, now_s: float) -> None:
        """A request came: it moves the lease on if it is the owner's, or if there never was one."""
        if not self.over(now_s) and (epoch or 0) == self.epoch:
            self.lease.renew(now_s)

    def change_lease(self, epoch: int | None, length_s: float | None, now_s: float) -> None:
        """Give the lease another length.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: Only the owner may.
        """
        self.must_own(epoch, now_s)
        self.lease.change(length_s, now_s)
        self.log.add(now_s, "lease", epoch, self.epoch)

    def must_own(self, epoch: int | None, now_s: float) -> None:
        """Refuse also those that know no epochs, once there is an owner.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not the owner's request.
        """
        self.check(epoch, now_s)
        if epoch is None and self.epoch > 0:
            self._refuse(epoch, now_s)
            raise NotOwnerError(f"only the owner, epoch {self.epoch}, may do that")

    def deadline_s(self) -> float | None:
        """When the lease is over; None when never, or not before some command has ended."""
        ends_s = self.lease.deadline_s
        if ends_s is None:
            return None
        ends_s = max((ends_s, *(one.until_s for one in self._running if one.held == self.epoch)))
        return None if ends_s == math.inf else ends_s

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the end; None when there is none."""
        ends_s = self.deadline_s()
        return None if ends_s is None else ends_s - now_s

    def over(self, now_s: float) -> bool:
        """Whether the lease has run out; once it has, it stays so."""
        left_s = self.left_s(now_s)
        if not self.ended and left_s is not None and left_s <= 0:
            self.ended = True
            self.log.add(now_s, "over", None, self.epoch)
        return self.ended

    def _alive(self, now_s: float) -> None:
        if self.over(now_s):
            raise LeaseOverError(f"the lease of epoch {self.epoch} ran out; the sandbox is ending")

    def _not_older(self, epoch: int, now_s: float) -> None:
        if epoch < self.epoch:
            self._refuse(epoch, now_s)
            raise FencedError(f"epoch {epoch} is behind the owner's epoch {self.epoch}")

    def _refuse(self, epoch: int | None, now_s: float) -> None:
        self.log.refused(now_s, epoch, self.epoch)
