"""What every later command inherits from this process: limits and priorities, which commands can set."""

import ctypes
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# sched_getattr and ioprio_get, for which the C library has no names.
_CALLS = {"x86_64": (315, 252), "aarch64": (274, 31)}
_SCHED_ATTR_BYTES = 56
_IOPRIO_WHO_PROCESS = 1
_FILES = ("oom_score_adj", "coredump_filter", "autogroup", "timerslack_ns")


class UnknownMachineError(Exception):
    """How to ask on such a machine is not known."""


@dataclass(frozen=True)
class Inherited:
    """Limits and priorities.

    Attributes:
        whole: Those of the process, by name.
        threads: By what the kernel schedules a thread, each once: their number is no difference.
    """

    whole: Mapping[str, object]
    threads: frozenset[tuple[str, str, int, str]]

    def other_than(self, now: "Inherited") -> list[str]:
        """Names of what is not the same."""
        names = [name for name in self.whole if now.whole[name] != self.whole[name]]
        return names if now.threads == self.threads else [*names, "scheduling"]


def look() -> Inherited:
    """Limits and priorities of now.

    Raises:
        UnknownMachineError: On other machines than x86-64 and ARM64.
    """
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {name: resource.getrlimit(vars(resource)[name]) for name in names}
    files = {name: _text(f"/proc/self/{name}") for name in _FILES}
    threads = (_of_thread(int(name)) for name in os.listdir("/proc/self/task"))  # noqa: PTH208
    return Inherited({**limits, **files}, frozenset(one for one in threads if one is not None))


def _of_thread(thread: int) -> tuple[str, str, int, str] | None:
    """Scheduling, processors, I/O priority and control groups; None for a thread that has ended."""
    scheduling, io_priority = _numbers()
    kernel = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(_SCHED_ATTR_BYTES)
    try:
        processors = ",".join(map(str, sorted(os.sched_getaffinity(thread))))
    except ProcessLookupError:
        return None
    failed = kernel.syscall(scheduling, thread, attributes, _SCHED_ATTR_BYTES, 0)
    priority = kernel.syscall(io_priority, _IOPRIO_WHO_PROCESS, thread)
    groups = _text(f"/proc/self/task/{thread}/cgroup")
    if not Path(f"/proc/self/task/{thread}").exists():
        return None
    return f"{failed} {attributes.raw.hex()}", processors, priority, groups


def _numbers() -> tuple[int, int]:
    try:
        return _CALLS[platform.machine()]
    except KeyError:
        raise UnknownMachineError(
            f"what commands inherit from the launcher cannot be read on {platform.machine()}"
        ) from None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as problem:
        return f"unreadable: {problem.strerror}"  # a kernel without it: it must stay so
