r"""An interactive bash without a terminal: lines go in through a pipe, marks come back over a descriptor.

Interactive, because an interrupt then ends the running command and not the shell. Without a terminal there is
no job control, so nothing is ever stopped. There is no prompt to recognise, so nothing that a
start-up file does to PS1 matters (SWE-agent/SWE-agent#1084).
"""

import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from . import processes
from .children import Children
from .output import READ_SIZE

_MARK_FD = 200
_MARK = re.compile(rb"([BDS]) (\d+)(?: (\d+))?")
_PREPARE = (
    'set +H +o history; unset HISTFILE MAILCHECK PROMPT_COMMAND; PS1= PS2=; __sbx_status() { return "$1"; }\n'
)


class Bash:
    """The process, its input and its marks.

    Attributes:
        input_fd: Non-blocking; whole lines as `line_for` gives them.
        mark_fd: Non-blocking; read it through `marks`.
        on_exit: Called from another thread when bash ended.
    """

    def __init__(
        self, children: Children, *, cwd: str, env: Mapping[str, str], memory_bytes: int | None
    ) -> None:
        self.on_exit: Callable[[], None] | None = None
        self._partial = b""
        self.mark_fd, mark_write = os.pipe()
        input_read, self.input_fd = os.pipe()
        # A high number: commands use the low ones. Each command has it closed (see line_for).
        self._their_mark_fd = fcntl.fcntl(mark_write, fcntl.F_DUPFD, _MARK_FD)
        try:
            self.child = children.start(
                ["bash", "--norc", "--noprofile", "--noediting", "-i"],
                on_exit=self._exited,
                cwd=cwd,
                env={**env, "PS1": "", "PS2": ""},
                stdin=input_read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._their_mark_fd],
            )
        except BaseException:
            os.close(self.mark_fd)
            os.close(self.input_fd)
            raise
        finally:
            for fd in (mark_write, self._their_mark_fd, input_read):
                os.close(fd)
        limit = "" if memory_bytes is None else f"ulimit -v {memory_bytes // 1024}\n"
        os.write(self.input_fd, (_PREPARE + limit).encode())
        os.set_blocking(self.input_fd, False)
        os.set_blocking(self.mark_fd, False)

    @property
    def alive(self) -> bool:
        """Whether bash runs."""
        return not self.child.exited.is_set()

    def line_for(self, turn: int, command: str, *, status: int, out: str, err: str) -> bytes:
        r"""The line that runs one command.

        ``B turn`` says that the line was read whole (an interrupt before that would leave bash in the middle
        of somebody's quotes), ``D turn status`` that the command ended.
        """
        quoted = command.replace("'", "'\\''")
        fd = self._their_mark_fd
        return (
            f"echo B {turn} >&{fd}; {{ __sbx_status {status}; eval '{quoted}'; }} "
            f"</dev/null >{out} 2>{err} {fd}>&-; echo D {turn} $? >&{fd}\n"
        ).encode("utf-8", "surrogateescape")

    def interrupt(self, turn: int, jobs: Iterable[int]) -> None:
        """Do what Ctrl-C does, sparing ``jobs``; bash answers ``S turn`` once it reads its input again."""
        # No quotes in this line: an interrupt may swallow its beginning, and the rest must stay harmless.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.input_fd, f"\necho S {turn} >&{self._their_mark_fd}\n".encode())
        # Bash first: a child that dies of an interrupt which bash has not seen just makes it go on.
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
        """End bash and everything below it, background jobs too."""
        tree = processes.tree_of(self.child.pid)
        processes.send_group(self.child.pid, signal.SIGKILL)
        processes.send(tree, signal.SIGKILL)
        self.child.exited.wait(5.0)

    def _exited(self) -> None:
        if self.on_exit is not None:
            self.on_exit()
