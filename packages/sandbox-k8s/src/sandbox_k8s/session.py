"""A persistent shell in a sandbox."""

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from .checks import check_timeout, check_value
from .errors import FencedError, SandboxLostError, SessionError
from .launcher import shell
from .result import SessionResult, fields_of

if TYPE_CHECKING:
    from .sandbox import Sandbox


class Session:
    """A bash that keeps its directory, variables, functions and background jobs from command to command.

    As ``async with await sandbox.session() as session:`` it is closed at the end of the block. One that ended
    there itself is no error; one whose sandbox was detached there, or is another worker's by then, is left
    alone.
    """

    def __init__(self, sandbox: "Sandbox", name: str) -> None:
        self.sandbox = sandbox
        self.name = name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is gone, or another's, is not this block's to close.
        with anyio.CancelScope(shield=True), suppress(SessionError, SandboxLostError, FencedError):
            await self.close()

    async def run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        merge_stderr: bool = False,
        output_limit: int | None = None,
    ) -> SessionResult:
        """Run one command in the shell.

        On a time-out it is interrupted as by Ctrl-C, what resists is killed, and the shell stays. Background
        jobs of earlier commands live on. Standard input is empty; there is no terminal.

        Raises:
            SessionError: The session is busy, or its shell has ended.
            ConfigError: An argument has another type, or the time-out is negative.
        """
        check_value("the command", command, str)
        check_timeout(timeout_s)
        config = self.sandbox.config
        head = {
            "name": self.name,
            "command": command,
            "timeout_s": timeout_s,
            "grace_s": config.grace_s,
            "output_limit": output_limit or config.output_limit,
            "merge": merge_stderr,
        }
        work_s = None if timeout_s is None else timeout_s + config.grace_s + shell.OVERRUN_S
        answer, parts = await self.sandbox.launcher.command("/sbx/session/run", head, b"", work_s=work_s)
        return SessionResult(**fields_of(answer, parts), session_alive=answer["session_alive"])

    async def interrupt(self) -> bool:
        """End the command that another task is running here; False when there is none."""
        return (await self.sandbox.launcher.call("/sbx/session/interrupt", {"name": self.name}))[
            "interrupted"
        ]

    async def close(self) -> None:
        """End the shell and its background jobs."""
        await self.sandbox.launcher.call("/sbx/session/close", {"name": self.name})
