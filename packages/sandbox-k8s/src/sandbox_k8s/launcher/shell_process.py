"""An interactive shell without a terminal: lines go in through a pipe, marks come back over a descriptor.

Interactive, because an interrupt then ends the running command and not the shell. Without a terminal there is
no job control, so nothing is ever stopped. There is no prompt to recognise, so nothing that a
start-up file does to PS1 matters (SWE-agent/SWE-agent#1084).
"""

import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from threading import Lock

from . import processes
from .children import Children
from .dialect import Dialect
from .output import READ_SIZE

CLOSE_WITHIN_S = 5.0
_MARK_FD = 200
_MARK = re.compile(rb"([BDS]) (\d+)(?: (\d+))?")


class ShellProcess:
    """The process, its input and its marks.

    Attributes:
        input_fd: Non-blocking; whole lines as `line_for` gives them. To be used inside `held` alone.
        mark_fd: Non-blocking; read it through `marks`, inside `held` alone.
        on_exit: Called from another thread when the shell ended.
    """

    def __init__(
        self,
        children: Children,
        dialect: Dialect,
        *,
        cwd: str,
        env: Mapping[str, str],
        memory_bytes: int | None,
    ) -> None:
        self.on_exit: Callable[[], None] | None = None
        self._dialect = dialect
        self._partial = b""
        self._lock = Lock()
        self._holders = 1  # this constructor: the shell may end before it does
        self._ended = self._closed = False
        self.mark_fd, mark_write = os.pipe()
        input_read, self.input_fd = os.pipe()
        # A high number: commands use the low ones. Each command has it closed (see Dialect.line).
        self._their_mark_fd = fcntl.fcntl(mark_write, fcntl.F_DUPFD, _MARK_FD)
        own = dialect.own_mark_fd
        try:
            self.child = children.start(
                [dialect.program, *dialect.interactive],
                on_exit=self._exited,
                cwd=cwd,
                env=dialect.session_environment(env),
                stdin=input_read,
                stdout=subprocess.DEVNULL if own else mark_write,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._their_mark_fd] if own else [],
            )
        except BaseException:
            os.close(self.mark_fd)
            os.close(self.input_fd)
            raise
        finally:
            for fd in (mark_write, self._their_mark_fd, input_read):
                os.close(fd)
        limit = "" if memory_bytes is None else f"ulimit -v {memory_bytes // 1024}\n"
        try:
            with suppress(BrokenPipeError):  # it ended at once: `alive` says so
                os.write(self.input_fd, (dialect.prepare(env) + limit).encode("utf-8", "surrogateescape"))
            os.set_blocking(self.input_fd, False)
            os.set_blocking(self.mark_fd, False)
        finally:
            self._let_go()

    @property
    def alive(self) -> bool:
        """Whether the shell runs."""
        return not self.child.exited.is_set()

    @contextmanager
    def held(self) -> Generator[None]:
        """Keep the descriptors: they are closed once the shell has ended and nobody holds them.

        Whoever holds them looks at `alive` before the first use.
        """
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._ended and not self._holders and not self._closed:
            self._closed = True
            os.close(self.input_fd)
            os.close(self.mark_fd)

    def line_for(self, turn: int, command: str, *, status: int, out: str, err: str) -> bytes:
        """The line that runs one command; see `Dialect.line`."""
        return self._dialect.line(turn, command, status=status, out=out, err=err, mark_fd=self._their_mark_fd)

    def interrupt(self, turn: int, jobs: Iterable[int]) -> None:
        """Do what Ctrl-C does, sparing ``jobs``; ``S turn`` comes once the shell reads its input again."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.input_fd, self._dialect.question(turn, self._their_mark_fd))
        # The shell first: a child that dies of an interrupt which it has not seen just makes it go on.
        own = processes.descendants_of(self.child.pid, without=jobs)
        processes.send([self.child.pid, *own], signal.SIGINT)

    def marks(self) -> list[tuple[str, int, int]]:
        """The marks that came: letter, turn, status (0 where there is none)."""
        with suppress(BlockingIOError):
            self._partial += os.read(self.mark_fd, READ_SIZE)
        *lines, self._partial = self._partial.split(b"\n")
        found = (_MARK.fullmatch(line) for line in lines)
        return [(mark[1].decode(), int(mark[2]), int(mark[3] or 0)) for mark in found if mark]

    def close(self) -> None:
        """End the shell and everything below it, background jobs too."""
        tree = processes.tree_of(self.child.pid)
        processes.send_group(self.child.pid, signal.SIGKILL)
        processes.send(tree, signal.SIGKILL)
        self.child.exited.wait(CLOSE_WITHIN_S)

    def _exited(self) -> None:
        on_exit = self.on_exit
        if on_exit is not None:
            on_exit()
        with self._lock:
            self._ended = True
            self._close_if_unused()
