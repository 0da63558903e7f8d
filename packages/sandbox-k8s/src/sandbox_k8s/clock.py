"""The only place where the client reads a clock or makes an id; a test passes its own object."""

import os
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time and identity."""

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never steps back."""
        ...

    def new_id(self) -> str:
        """32 random hex characters."""
        ...


class SystemClock:
    """The machine's clock and the system's randomness."""

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        return time.time_ns()  # noqa: TID251  (this is the object that the rule speaks of)

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never steps back."""
        return time.monotonic()  # noqa: TID251  (this is the object that the rule speaks of)

    def new_id(self) -> str:
        """32 random hex characters."""
        return os.urandom(16).hex()
