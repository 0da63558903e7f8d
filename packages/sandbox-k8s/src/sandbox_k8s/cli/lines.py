"""Standard input as commands of a session, one per line: from a terminal with a prompt, else as they come."""

import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import anyio

from sandbox_k8s.errors import SandboxError
from sandbox_k8s.sandbox import Sandbox
from sandbox_k8s.session import Session

from .exec import exit_code_of, print_output

_STDIN = 0
_CHUNK = 1 << 16
_LEAVE = re.compile(r"\s*(?:exit|logout)(?:\s+(\d{1,3}))?\s*;?\s*")


async def work(sandbox: Sandbox, session_name: str, timeout_s: float | None) -> int:
    """Run the lines until they end, or the terminal goes away; the result is the last command's exit code.

    A line that is ``exit``, ``exit N`` or ``logout`` leaves and the shell stays, with its jobs; N is the
    result then.
    """
    asks = os.isatty(_STDIN)
    if asks:
        sys.stderr.write(f"sandbox {sandbox.id}, session {session_name}; ctrl-D leaves it running\n")
    session = await sandbox.session(session_name)
    shell = _Shell(session, f"{sandbox.id[:8]}$ " if asks else "", timeout_s)
    problem: SandboxError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hear_signals, shell, tasks.cancel_scope)
        try:
            await _run_lines(shell)
        except SandboxError as found:
            problem = found  # raised below: the group would wrap it
        tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem
    if asks:
        sys.stderr.write("\n")
    return shell.code


async def _run_lines(shell: "_Shell") -> None:
    async with aclosing(_lines()) as lines:
        shell.prompt()
        async for line in lines:
            leaves = _LEAVE.fullmatch(line)
            if leaves is not None:
                shell.code = shell.code if leaves[1] is None else int(leaves[1]) & 255
                return
            if line.strip() and not await shell.run(line):
                return
            shell.prompt()


def first_line() -> bytes:
    """The first line of standard input, read so that the rest is left to `work`."""
    line = b""
    while not line.endswith(b"\n") and (one := os.read(_STDIN, 1)):
        line += one
    return line


class _Shell:
    """The session, and whether it runs something at this moment.

    Attributes:
        code: Exit code of the last command.
        asks: Whether somebody types the lines.
    """

    def __init__(self, session: Session, prompt: str, timeout_s: float | None) -> None:
        self.code = 0
        self.asks = bool(prompt)
        self._session = session
        self._prompt = prompt
        self._timeout_s = timeout_s
        self._running = False

    def prompt(self) -> None:
        """Ask for a line, where there is somebody to ask."""
        if self.asks:
            sys.stderr.write(f"[{self.code}] {self._prompt}" if self.code else self._prompt)
            sys.stderr.flush()

    async def run(self, line: str) -> bool:
        """Run a line; False when the shell takes no other one."""
        self._running = True
        try:
            result = await self._session.run(line, timeout_s=self._timeout_s)
        finally:
            self._running = False
        print_output(result)
        self.code = 128 + signal.SIGINT if result.cancelled else exit_code_of(result)
        return result.session_alive

    async def interrupt(self) -> None:
        """What ctrl-C does: end the command; at the prompt, begin a new line."""
        if self._running:
            await self._session.interrupt()
            return
        sys.stderr.write("\n")
        self.prompt()


async def _hear_signals(shell: _Shell, scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as heard:
        async for one in heard:
            if one == signal.SIGINT and shell.asks:
                await shell.interrupt()
                continue
            shell.code = 128 + one
            scope.cancel()  # the sandbox is detached all the same
            return


async def _lines() -> AsyncGenerator[str]:
    """Lines as they come; a thread that waits in a read could not be given up."""
    rest = b""
    while True:
        with suppress(PermissionError):  # of a regular file, where there is nothing to wait for
            await anyio.wait_readable(_STDIN)
        data = os.read(_STDIN, _CHUNK)
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "backslashreplace")
        if not data:
            if rest:
                yield rest.decode("utf-8", "backslashreplace")
            return
