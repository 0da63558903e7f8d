"""Who is running: the process table, trees in it, and signals to trees and groups."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    parent: int
    group: int


def table() -> list[Process]:
    """Every process visible here, zombies left out."""
    return _table_from_proc() if sys.platform == "linux" else _table_from_ps()


def _table_from_proc() -> list[Process]:
    rows: list[Process] = []
    for entry in os.listdir(PROC):  # noqa: PTH208  (names only: a Path per process is four times the work)
        if not entry.isdigit():
            continue
        try:
            text = (PROC / entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we were looking
        # The name stands in parentheses and may hold spaces and parentheses itself.
        state, parent, group = text[text.rindex(b")") + 2 :].split()[:3]
        if state not in (b"Z", b"X"):
            rows.append(Process(int(entry), int(parent), int(group)))
    return rows


def _table_from_ps() -> list[Process]:
    text = subprocess.run(
        ["/bin/ps", "-axo", "pid=,ppid=,pgid=,state="], capture_output=True, check=True, text=True
    ).stdout
    rows = [line.split() for line in text.splitlines()]
    return [Process(int(row[0]), int(row[1]), int(row[2])) for row in rows if not row[3].startswith("Z")]


def children_of(pid: int) -> set[int]:
    """The direct children of ``pid`` that are running."""
    return {row.pid for row in table() if row.parent == pid}


def tree_of(leader: int) -> set[int]:
    """All that came from a process which leads a group: descendants, and members of any of their groups.

    Groups matter because a parent may have ended; nothing else then links its children to the leader.
    """
    rows = table()
    found: set[int] = set()
    known, groups = {leader}, {leader}
    grew = True
    while grew:
        more = {row for row in rows if row.pid not in known and (row.parent in known or row.group in groups)}
        grew = bool(more)
        found |= {row.pid for row in more}
        known |= found
        groups |= {row.group for row in more}
    return found


def descendants_of(root: int, *, without: Iterable[int] = ()) -> set[int]:
    """All descendants of ``root`` by parentage, not descending into ``without``."""
    rows = table()
    barred = set(without)
    known = {root}
    grew = True
    while grew:
        more = {row.pid for row in rows if row.parent in known and row.pid not in known | barred}
        grew = bool(more)
        known |= more
    return known - {root}


def marked(variable: str, value: str) -> set[int]:
    """Processes whose environment holds ``variable=value``; none where there is no ``/proc``."""
    if sys.platform != "linux":
        return set()
    needle = f"{variable}={value}".encode()
    found: set[int] = set()
    for row in table():
        try:
            environment = (PROC / str(row.pid) / "environ").read_bytes()
        except OSError:
            continue  # ended, or another user's
        if needle in environment.split(b"\0"):
            found.add(row.pid)
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process; those that ended are skipped."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def send_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to a process group; False when the group has no member left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
