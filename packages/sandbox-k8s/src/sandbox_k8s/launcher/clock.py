"""The launcher's only clock: monotonic seconds, which a step of the wall clock cannot move."""

import time


def monotonic_s() -> float:
    """Seconds since an arbitrary start."""
    return time.monotonic()  # noqa: TID251  (threads of the launcher have no event loop to ask)
