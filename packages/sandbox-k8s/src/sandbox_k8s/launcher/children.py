"""Child processes: started here, reaped here, an exit status read once and never guessed.

The launcher is process 1 of its sandbox (under bubblewrap), so it inherits every orphan and must reap those
too. ``Popen.wait`` in one thread and ``waitpid(-1)`` in another would steal each other's statuses, after
which ``Popen`` reports 0. One thread therefore looks (``WNOWAIT``), and asks the owner of that pid to collect
it. In a process that has children of others too, nobody may do so: a thread then waits for each child.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence


class Child:
    """A started process in a session and process group of its own.

    Attributes:
        pid: Also its process group.
        returncode: Exit code, minus the signal number when a signal ended it, None while it runs or when the
            status could not be read (then `exited` is set all the same).
        exited: Set once the process has ended.
    """

    def __init__(self, popen: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.returncode: int | None = None
        self.exited = threading.Event()
        self._on_exit = on_exit

    def collect(self) -> None:
        """Read the status of the ended process and tell whoever waits."""
        self.returncode = self.popen.wait()
        self.exited.set()
        self._on_exit()


class Children:
    """Starts children and reaps them.

    Args:
        orphans: Whether to reap also any orphan that falls to this process, and so every child of it.
    """

    def __init__(self, *, orphans: bool = False) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Child] = {}
        self._started = threading.Event()
        self._orphans = orphans and sys.platform == "linux"
        if self._orphans:
            threading.Thread(target=self._reap, name="reaper", daemon=True).start()

    def start(
        self,
        argv: Sequence[str],
        *,
        on_exit: Callable[[], None],
        cwd: str,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start a process as leader of a new session.

        ``on_exit`` is called from another thread after the status was read; the rest is as for ``Popen``.

        Raises:
            OSError: The program or the folder is missing, or the system refuses another process.
        """
        with self._lock:
            popen = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            child = Child(popen, on_exit)
            self._known[child.pid] = child
        if self._orphans:
            self._started.set()
        else:
            threading.Thread(target=self._wait, args=(child,), name=f"wait-{child.pid}", daemon=True).start()
        return child

    def alive(self) -> list[Child]:
        """The children that have not ended."""
        with self._lock:
            return [child for child in self._known.values() if not child.exited.is_set()]

    def _wait(self, child: Child) -> None:
        child.collect()
        with self._lock:
            self._known.pop(child.pid, None)

    def _reap(self) -> None:
        if sys.platform != "linux":
            return
        while True:
            self._started.clear()
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                self._started.wait()
                continue
            if ended is None:
                continue
            with self._lock:
                child = self._known.pop(ended.si_pid, None)
            if child is not None:
                child.collect()
                continue
            try:
                os.waitpid(ended.si_pid, 0)
            except ChildProcessError:
                continue  # Popen collected it: the program could not be executed
