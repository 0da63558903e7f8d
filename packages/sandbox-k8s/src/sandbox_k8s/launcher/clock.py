"""The launcher's only clock: monotonic seconds, which no step of the wall clock moves; dates to read."""

import time


def monotonic_s() -> float:
    """Seconds since an arbitrary start."""
    return time.monotonic()  # noqa: TID251  (threads of the launcher have no event loop to ask)


def date() -> str:
    """The wall clock for a reader, in UTC to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
