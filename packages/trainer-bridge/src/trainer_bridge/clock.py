"""`Clock`: the one place of this package that reads clocks and mints ids."""

from __future__ import annotations

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """What senders and receivers need of the outside world; pass another one to simulate time."""

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary instant; never goes back."""
        ...

    def new_id(self) -> str:
        """32 lower-case hex characters that no one else has."""
        ...


class SystemClock:
    """The machine's clocks and its source of randomness."""

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        return time.time_ns()  # noqa: TID251 - this file is where the wall clock is read

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary instant; never goes back."""
        return time.monotonic()  # noqa: TID251 - this file is where the monotonic clock is read

    def new_id(self) -> str:
        """32 lower-case hex characters that no one else has."""
        return secrets.token_hex(16)
