"""The watchdog: a sandbox that nobody renews ends itself."""

import threading
from collections.abc import Callable

from .clock import monotonic_s


class Lease:
    """A deadline that every request and heartbeat moves on.

    Args:
        lease_s: How long it lasts from the last renewal; None means for ever.
        renewed: Told the seconds left, at each renewal (at most once a second) and each change.
    """

    def __init__(self, lease_s: float | None, renewed: Callable[[float | None], None]) -> None:
        self._lease_s = lease_s
        self._renewed = renewed
        self._changed = threading.Condition()
        self._deadline = self._after(0.0)
        self._told = 0.0

    def renew(self, busy_s: float = 0.0) -> None:
        """Start the lease anew; ``busy_s`` is added, for a command with a time-out of its own."""
        with self._changed:
            after = self._after(busy_s)
            if self._deadline is None or after is None or after > self._deadline:
                self._deadline = after
                self._tell(force=busy_s > 0)
                self._changed.notify()

    def change(self, lease_s: float | None) -> None:
        """Give the lease another length, counted from now; it may become shorter."""
        with self._changed:
            self._lease_s = lease_s
            self._deadline = self._after(0.0)
            self._tell(force=True)
            self._changed.notify()

    def left_s(self) -> float | None:
        """Seconds until the end; None when there is none."""
        with self._changed:
            return None if self._deadline is None else self._deadline - monotonic_s()

    def wait_for_end(self) -> None:
        """Return when the lease has run out."""
        with self._changed:
            while self._deadline is None or self._deadline > monotonic_s():
                self._changed.wait(None if self._deadline is None else self._deadline - monotonic_s())

    def _after(self, busy_s: float) -> float | None:
        return None if self._lease_s is None else monotonic_s() + self._lease_s + busy_s

    def _tell(self, *, force: bool) -> None:
        now = monotonic_s()
        if force or now - self._told >= 1.0:
            self._told = now
            self._renewed(None if self._deadline is None else self._deadline - now)
