"""Being the one that orphans fall to, and ending everything below oneself."""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable

from . import processes
from .clock import monotonic_s

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WITHIN_S = 10.0
_BETWEEN_ROUNDS_S = 0.01


def adopt() -> None:
    """Become the parent of every orphan below, as process 1 is anyway."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Keep processes without CAP_SYS_PTRACE from reading this one's memory, where keys pass through."""
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def below() -> set[int]:
    """Every process below this one."""
    return processes.descendants_of(os.getpid())


def kill_all(victims: Callable[[], set[int]] = below) -> None:
    """Kill and reap until there is no victim left; each round may bring new orphans.

    Raises:
        OSError: Some survive SIGKILL.
    """
    give_up = monotonic_s() + _KILL_WITHIN_S
    while monotonic_s() < give_up:
        processes.send(victims(), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not victims():
                return
        select.select([], [], [], _BETWEEN_ROUNDS_S)
    raise OSError(f"processes of the sandbox survive SIGKILL: {sorted(victims())}")
