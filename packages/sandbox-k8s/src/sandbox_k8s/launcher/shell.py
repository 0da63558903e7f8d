"""A session: one shell that keeps directory, variables, functions and background jobs between commands.

Each command has pipes made for it alone, so output that comes late goes nowhere instead of into the next
answer (the reference server, swe-rex 1.4.0, answers ``late`` and ``next`` together after a time-out).
"""

import os
import selectors
import shlex
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from . import processes
from .children import Children
from .clock import monotonic_s
from .dialect import Dialect
from .execute import FENCED_GRACE_S, Outcome, Wake, discard, exit_of, peer_left
from .output import Capture, read_available, read_once
from .shell_process import CLOSE_WITHIN_S, ShellProcess

STARTUP = Path(__file__).with_name("startup.sh")
_INTERRUPT_EVERY_S = 0.25
_LINE_READ_WITHIN_S = 10.0
_PROMPT_AFTER_KILL_S = 2.0
_BUSY_S = 1.0
_LOOK_EVERY_S = 0.02
_ENDING_S = _LINE_READ_WITHIN_S + _PROMPT_AFTER_KILL_S
OVERRUN_S = _BUSY_S + 2 * _ENDING_S + CLOSE_WITHIN_S
"""How much longer than its time-out and its grace a command may take: an earlier one that is ending, its own
interrupt, and the end of a shell that does not come back from it."""


class ShellBusyError(Exception):
    """Another command is running in this session."""


class ShellClosedError(Exception):
    """The shell of this session has ended."""


@dataclass
class ShellRequest:
    """One command for a session; the fields are those of `CommandRequest`."""

    command: str
    timeout_s: float | None = None
    grace_s: float = 1.0
    output_limit: int = 8 << 20
    merge: bool = False


class Shell:
    """One session. Commands run one at a time; a second one is refused after a second, not queued."""

    def __init__(
        self,
        children: Children,
        name: str,
        dialect: Dialect,
        *,
        cwd: str,
        env: Mapping[str, str],
        pipes: Path,
        memory_bytes: int | None,
    ) -> None:
        """Start the shell; the start-up files are for the caller to run as its first command.

        ``pipes`` is a folder for the named pipes of its commands; ``memory_bytes`` the address space of each
        of its processes, None for no limit.

        Raises:
            OSError: The shell is missing, or the system refuses another process.
        """
        self.name = name
        self._dialect = dialect
        self._process = ShellProcess(children, dialect, cwd=cwd, env=env, memory_bytes=memory_bytes)
        self._pipes = pipes
        self._lock = Lock()
        self._wake: Wake | None = None
        self._caller: socket.socket | None = None
        self._starting_up = False
        self._turns = 0
        self._status = 0

    @property
    def alive(self) -> bool:
        """Whether its shell still runs."""
        return self._process.alive

    def run(self, request: ShellRequest, wake: Wake, connection: socket.socket | None) -> Outcome:
        """Run one command.

        A time-out or a cancellation interrupts it; the next command waits for its end. When even SIGKILL for
        everything it started does not bring the shell back to its input, the session is ended and the
        outcome says so.

        Raises:
            ShellBusyError: A command is running.
            ShellClosedError: The shell has ended.
            CutOffError: A new owner came before the command began.
            ValueError: The command holds a NUL byte, which no shell would see.
        """
        if "\0" in request.command:
            raise ValueError("the command holds a NUL byte")
        self._wait_for_turn(wake)
        try:
            with self._process.held():
                return self._take_turn(request, wake, connection)
        finally:
            self._process.on_exit = None
            self._wake = self._caller = None
            self._lock.release()

    def _take_turn(self, request: ShellRequest, wake: Wake, connection: socket.socket | None) -> Outcome:
        if not self.alive:
            raise ShellClosedError(f"the shell of session {self.name!r} has ended")
        wake.go_on()
        self._turns += 1
        self._wake, self._caller = wake, connection
        self._process.on_exit = wake.ring
        pipe = self._pipes / f"{self._process.child.pid}-{self._turns}"
        turn = _Turn(self._process, self._turns, request, wake, pipe)
        try:
            outcome = turn.run(self._status, connection)
        finally:
            turn.close()
        self._status = turn.status
        return outcome

    def _wait_for_turn(self, own: Wake) -> None:
        """Take the lock. Start-up files are waited for, and a command that ends since its caller went away.

        The news of that may come a moment later than the next command: it is another connection.

        Raises:
            ShellBusyError: A command is running, and goes on.
        """
        give_up = monotonic_s() + _BUSY_S
        ending = False
        while not self._lock.acquire(timeout=_LOOK_EVERY_S):
            own.go_on()
            wake, caller = self._wake, self._caller
            if not ending and wake is not None and (wake.cancelled or (caller and peer_left(caller))):
                ending = True
                give_up += _LINE_READ_WITHIN_S + _PROMPT_AFTER_KILL_S
            if self._starting_up:
                give_up = monotonic_s() + _BUSY_S  # its caller was cancelled, or is just about to hear
            if monotonic_s() >= give_up:
                raise ShellBusyError(f"session {self.name!r} is running another command")

    def start_up(self, wake: Wake, sources: Sequence[str], timeout_s: float) -> Outcome:
        """Read the start-up files, then ``sources``; what they print is the outcome's output."""
        files = [str(STARTUP), *sources] if self._dialect.reads_startup else sources
        command = "; ".join(f". {shlex.quote(path)}" for path in files) or ":"
        self._starting_up = True
        try:
            return self.run(ShellRequest(command, timeout_s=timeout_s, merge=True), wake, None)
        finally:
            self._starting_up = False

    def interrupt(self) -> bool:
        """End the running command; False when there is none."""
        wake = self._wake
        if wake is not None:
            wake.cancel("interrupted")
        return wake is not None

    def close(self) -> None:
        """End the shell and everything below it."""
        self._process.close()


class _Turn:
    """One command in a shell, from its line to its last byte."""

    def __init__(
        self, process: ShellProcess, number: int, request: ShellRequest, wake: Wake, pipe: Path
    ) -> None:
        self.status = 0
        self._process = process
        self._number = number
        self._request = request
        self._wake = wake
        self._begun = self._done = self._back = False
        self._jobs = processes.children_of(process.child.pid)
        self._outcome = Outcome(Capture(request.output_limit), Capture(request.output_limit))
        self._selector = selectors.DefaultSelector()
        self._paths = [pipe.with_name(pipe.name + ".out"), pipe.with_name(pipe.name + ".err")]
        self._streams: dict[int, Capture] = {}
        self._held: list[int] = []

    def _open(self) -> None:
        folder = self._paths[0].parent
        folder.mkdir(parents=True, exist_ok=True)  # a command may have emptied the folder above
        for path, capture in zip(self._paths, (self._outcome.stdout, self._outcome.stderr), strict=True):
            os.mkfifo(path, 0o600)
            self._streams[os.open(path, os.O_RDONLY | os.O_NONBLOCK)] = capture
            # We hold a write end too: a named pipe without writers reads as ended, and the shell has not
            # opened it yet.
            self._held.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    def run(self, status: int, connection: socket.socket | None) -> Outcome:
        """See `Shell.run`; ``status`` is what ``$?`` shows to the command."""
        started = monotonic_s()
        self._open()
        self._watch(status, connection)
        deadline = None if self._request.timeout_s is None else started + self._request.timeout_s
        while not self._done and self._process.alive:
            now = monotonic_s()
            if deadline is not None and now >= deadline:
                self._outcome.timed_out = True
                break
            if self._wake.cancelled:
                self._outcome.cancelled = self._wake.cancelled
                break
            self._step(None if deadline is None else deadline - now)
        if self._outcome.timed_out or self._outcome.cancelled:
            self.status = 130
            if not self._interrupt():
                self._process.close()
        elif self._done:
            self._outcome.exit_code = self.status
        else:
            self._take_marks()
            self._outcome.exit_code, self._outcome.signal = exit_of(self._process.child)
        self._outcome.session_alive = self._process.alive
        self._outcome.duration_s = monotonic_s() - started
        return self._outcome

    def close(self) -> None:
        """Take the pipes away; whoever still writes into them is read on in the background."""
        self._selector.close()
        for fd in self._held:
            os.close(fd)
        for path in self._paths:
            path.unlink(missing_ok=True)
        for fd, capture in self._streams.items():
            if read_available(fd, capture):
                discard(fd)
            else:
                os.close(fd)

    def _watch(self, status: int, connection: socket.socket | None) -> None:
        out, err = (shlex.quote(str(path)) for path in self._paths)
        line = memoryview(
            self._process.line_for(
                self._number,
                self._request.command,
                status=status,
                out=out,
                err="&1" if self._request.merge else err,
            )
        )

        def write() -> None:
            nonlocal line
            try:
                line = line[os.write(self._process.input_fd, line) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                line = line[:0]  # the shell ended: the loop sees that by itself
            if not line:
                self._selector.unregister(self._process.input_fd)

        def look_at_peer() -> None:
            if connection is not None:
                if peer_left(connection):
                    self._wake.cancel("the caller went away")
                self._selector.unregister(connection)

        self._selector.register(self._process.input_fd, selectors.EVENT_WRITE, write)
        self._selector.register(self._process.mark_fd, selectors.EVENT_READ, self._take_marks)
        for fd, capture in self._streams.items():
            self._selector.register(fd, selectors.EVENT_READ, partial(read_once, fd, capture))
        self._selector.register(self._wake.read_fd, selectors.EVENT_READ, self._wake.clear)
        if connection is not None:
            self._selector.register(connection, selectors.EVENT_READ, look_at_peer)

    def _step(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _take_marks(self) -> None:
        for letter, number, status in self._process.marks():
            if number != self._number:
                continue  # an answer to an earlier turn's interrupt
            if letter == "B":
                self._begun = True
            elif letter == "S":
                self._back = True
            else:
                self._done, self.status = True, status

    def _interrupt(self) -> bool:
        """Bring the shell back to its input; False when it would not come."""
        now = monotonic_s()
        give_up = now + _LINE_READ_WITHIN_S
        while not self._begun and self._process.alive and monotonic_s() < give_up:
            self._step(_INTERRUPT_EVERY_S)
        if not self._begun:
            return not self._process.alive
        begun = now = again = monotonic_s()
        while not (self._done or self._back) and self._process.alive:
            kill_at = begun + self._grace_s()
            if now >= kill_at + _PROMPT_AFTER_KILL_S:
                break
            if now >= again:
                self._process.interrupt(self._number, self._jobs)
                again = now + _INTERRUPT_EVERY_S
            if now >= kill_at:
                own = processes.descendants_of(self._process.child.pid, without=self._jobs)
                processes.send(own, signal.SIGKILL)
            self._step(again - now)
            now = monotonic_s()
        return self._done or self._back or not self._process.alive

    def _grace_s(self) -> float:
        return min(self._request.grace_s, FENCED_GRACE_S) if self._wake.fenced else self._request.grace_s
