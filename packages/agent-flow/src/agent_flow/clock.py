"""Wall clock and ids: the one object that touches them, passed in where they are needed.

Durations are read from the event loop (`anyio.current_time`), so that a loop with virtual time simulates
them.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid  # noqa: TID251


class Clock:
    """The system's clock and random ids. Tests pass a subclass with fixed values."""

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        return time.time_ns()  # noqa: TID251

    def new_id(self) -> str:
        """32 random hex characters."""
        return uuid.uuid4().hex

    def stamp(self) -> str:
        """Local wall clock as `YYYYmmdd-HHMMSS`, for folder names."""
        return dt.datetime.fromtimestamp(self.now_ns() / 1e9).astimezone().strftime("%Y%m%d-%H%M%S")
