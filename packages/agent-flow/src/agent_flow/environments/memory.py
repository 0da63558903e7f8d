"""Whether the kernel killed a process of a container for its memory.

It kills the largest one, which is hardly ever the container's first: no status of a pod or a container says
so, and a test runner may count a killed test as a failed one. The control group's own count does not lie.
"""

from __future__ import annotations

from agent_flow.errors import EnvError

OOM_COMMAND = (
    "sh",
    "-c",
    "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null || :",
)
"""Prints what version 2, or version 1, of control groups counts."""


def refuse_oom(counts: bytes) -> None:
    """Refuse what a grader's command said, if anything in its container was killed for its memory.

    Args:
        counts: What `OOM_COMMAND` printed.

    Raises:
        EnvError: of the fault `task`: the same limit would be met again.
    """
    text = counts.decode("ascii", "replace")
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip() not in ("", "0"):
            raise EnvError(
                "oom", "a process of the grader was killed for its memory", fault="task", evidence=text
            )
