"""One command from start to end: output in bounds, a deadline that kills the whole group, cancellation."""

import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread

from . import processes
from .children import Child, Children
from .clock import monotonic_s
from .output import READ_SIZE, Capture, read_available, read_once

_POLL_WHILE_KILLING_S = 0.02
_END_AFTER_KILL_S = 5.0
OVERRUN_S = _END_AFTER_KILL_S
"""How much longer than its time-out and its grace a command may take."""
FENCED = "fenced"
FENCED_GRACE_S = 2.0  # a new owner waits for it


class CutOffError(Exception):
    """Its owner was replaced while something was under way."""


class Wake:
    """A pipe that ends a ``select``: rung from another thread when a child ends or the caller is fenced.

    Attributes:
        cancelled: Why its command must end; empty while it need not.
        fenced: Whether a new owner waits for that: then there is little time.
    """

    def __init__(self) -> None:
        self.cancelled = ""
        self.fenced = False
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = Lock()
        self._open = True

    def ring(self) -> None:
        """Wake the waiting thread; nothing happens once it is gone."""
        # Under the lock: a late ring must not write into whatever got the descriptor's number next.
        with self._lock, suppress(BlockingIOError):
            if self._open:
                os.write(self._write_fd, b"!")

    def cancel(self, why: str) -> None:
        """Wake the waiting thread and tell it to end its command."""
        self.cancelled = self.cancelled or why
        self.fenced = self.fenced or why == FENCED
        self.ring()

    def go_on(self) -> None:
        """Look whether there is still somebody to work for; for work that waits for no pipe.

        Raises:
            CutOffError: It was cut off.
        """
        if self.cancelled:
            raise CutOffError(f"cut off: {self.cancelled}")

    def clear(self) -> None:
        """Swallow the rings so far."""
        with suppress(BlockingIOError):
            os.read(self.read_fd, READ_SIZE)

    def close(self) -> None:
        """Give the pipe back."""
        with self._lock:
            self._open = False
            os.close(self.read_fd)
            os.close(self._write_fd)


@dataclass
class CommandRequest:
    """What to run.

    Attributes:
        timeout_s: None waits for ever.
        grace_s: Between SIGTERM and SIGKILL.
        output_limit: Bytes kept per stream.
    """

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    stdin: bytes = b""
    timeout_s: float | None = None
    grace_s: float = 1.0
    output_limit: int = 8 << 20
    merge: bool = False


@dataclass
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: 0 to 255; 128 + n when signal n ended it; None when it did not end by itself or is not
            known.
        cancelled: Why it was cut off, empty when it was not.
        infra_error: The sandbox's own failure, empty when there was none.
    """

    stdout: Capture
    stderr: Capture
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    cancelled: str = ""
    infra_error: str = ""
    duration_s: float = 0.0
    session_alive: bool = True


def exit_of(child: Child) -> tuple[int | None, int | None]:
    """Exit code in the shell's convention, and the signal if one ended the process."""
    code = child.returncode
    if code is not None and code < 0:
        return 128 - code, -code
    return code, None


def discard(fd: int) -> None:
    """Go on reading a pipe that a background process holds, so that it is neither blocked nor killed."""
    os.set_blocking(fd, True)

    def read_to_end() -> None:
        with suppress(OSError):
            while os.read(fd, READ_SIZE):
                pass
        os.close(fd)

    Thread(target=read_to_end, name="discard", daemon=True).start()


def peer_left(connection: socket.socket) -> bool:
    """Whether the caller closed its connection (readable, and nothing to read)."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass
class Run:
    """A command under way: the event loop of its thread."""

    children: Children
    request: CommandRequest
    wake: Wake
    connection: socket.socket | None
    outcome: Outcome = field(init=False)
    _selector: selectors.BaseSelector = field(init=False)

    def __post_init__(self) -> None:
        limit = self.request.output_limit
        self.outcome = Outcome(Capture(limit), Capture(limit))
        self._selector = selectors.DefaultSelector()

    def __call__(self) -> Outcome:
        """Run to the end.

        Raises:
            OSError: It could not be started.
        """
        started = monotonic_s()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        in_read, in_write = os.pipe()
        try:
            child = self.children.start(
                self.request.argv,
                on_exit=self.wake.ring,
                cwd=self.request.cwd,
                env=self.request.env,
                stdin=in_read,
                stdout=out_write,
                stderr=out_write if self.request.merge else err_write,
            )
        except BaseException:
            for fd in (out_read, err_read, in_write):
                os.close(fd)
            raise
        finally:
            for fd in (out_write, err_write, in_read):
                os.close(fd)
        try:
            self._feed_and_read(child, out_read, err_read, in_write, started)
        finally:
            self._selector.close()
        self.outcome.duration_s = monotonic_s() - started
        return self.outcome

    def _feed_and_read(self, child: Child, out_fd: int, err_fd: int, in_fd: int, started: float) -> None:
        streams = {out_fd: self.outcome.stdout, err_fd: self.outcome.stderr}
        for fd in streams:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, self._reader(fd, streams))
        self._selector.register(self.wake.read_fd, selectors.EVENT_READ, self.wake.clear)
        if self.connection is not None:
            self._selector.register(self.connection, selectors.EVENT_READ, self._look_at_peer)
        self._register_stdin(in_fd)
        timeout_s = self.request.timeout_s
        deadline = None if timeout_s is None else started + timeout_s
        while not child.exited.is_set():
            now = monotonic_s()
            if deadline is not None and now >= deadline:
                self.outcome.timed_out = True
                break
            if self.wake.cancelled:
                self.outcome.cancelled = self.wake.cancelled
                break
            self._step(None if deadline is None else deadline - now)
        if self.outcome.timed_out or self.outcome.cancelled:
            self._kill(child)
        else:
            self.outcome.exit_code, self.outcome.signal = exit_of(child)
            if self.outcome.exit_code is None:
                self.outcome.infra_error = "the exit status of the command could not be read"
        self._close(streams, in_fd)

    def _register_stdin(self, fd: int) -> None:
        if not self.request.stdin:
            os.close(fd)
            return
        os.set_blocking(fd, False)
        left = memoryview(self.request.stdin)

        def write() -> None:
            nonlocal left
            try:
                left = left[os.write(fd, left[:READ_SIZE]) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                left = left[:0]  # the command does not want the rest
            if not left:
                self._selector.unregister(fd)
                os.close(fd)

        self._selector.register(fd, selectors.EVENT_WRITE, write)

    def _reader(self, fd: int, streams: dict[int, Capture]) -> Callable[[], None]:
        def read() -> None:
            if not read_once(fd, streams[fd]):
                self._selector.unregister(fd)

        return read

    def _look_at_peer(self) -> None:
        if self.connection is None:
            return
        if peer_left(self.connection):
            self.wake.cancel("the caller went away")
        self._selector.unregister(self.connection)  # bytes of a next request: not this command's

    def _step(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _kill(self, child: Child) -> None:
        # The tree is read before the first signal: once parents are gone, nothing links their children to us.
        tree = processes.tree_of(child.pid) | {child.pid}
        processes.send_group(child.pid, signal.SIGTERM)
        processes.send(tree, signal.SIGTERM)
        killed = monotonic_s()
        while monotonic_s() < killed + self._grace_s() and self._any_lives(child, tree):
            self._step(_POLL_WHILE_KILLING_S)
        tree |= processes.tree_of(child.pid)
        processes.send_group(child.pid, signal.SIGKILL)
        processes.send(tree, signal.SIGKILL)
        give_up = monotonic_s() + _END_AFTER_KILL_S
        while monotonic_s() < give_up and not child.exited.is_set():
            self._step(_POLL_WHILE_KILLING_S)

    def _grace_s(self) -> float:
        return min(self.request.grace_s, FENCED_GRACE_S) if self.wake.fenced else self.request.grace_s

    def _any_lives(self, child: Child, tree: set[int]) -> bool:
        return any(row.pid in tree or row.group == child.pid for row in processes.table())

    def _close(self, streams: dict[int, Capture], in_fd: int) -> None:
        registered = self._selector.get_map()
        for fd, capture in streams.items():
            # What the command wrote is in the pipe by now; a background child may hold the other end for
            # ever.
            if fd in registered and read_available(fd, capture):
                discard(fd)
            else:
                os.close(fd)
        if in_fd in registered and self.request.stdin:
            os.close(in_fd)
