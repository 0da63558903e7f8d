"""SWE-ReX's two seams over an `Environment`: what SWE-agent's `SWEEnv` and tool bundles run on.

Called in the scaffold's thread, within the small event loops that SWE-agent opens there; every call goes over
to the loop of the rollout and is waited for.

SWE-agent and its bundles put their files below `/root`. Where that is not the sandbox's home, these paths
(and no others) stand for a folder of its temporary one, in commands, in requests and in the bundles.
"""

# pyright: basic

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from swerex.deployment.abstract import AbstractDeployment
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from agent_flow.agents.scaffold_thread import call, stopping
from agent_flow.agents.shell import Shell
from agent_flow.protocols import CommandOutput, Environment

logger = logging.getLogger(__name__)

_OWN = re.compile(
    r"(?<![\w.-])/root(?=/(tools\b|state\.json\b|model\.patch\b|test\.patch\b|\.swe-agent-env\b))"
)
_COMMAND_S = 300.0
"""Limit of a command that names none."""
_IS_HOME = '[ "$HOME" = /root ] && mkdir -p /root/tools && [ -w /root ]'
"""In a container of root; in a sandbox that is only a process, `/root` is not the sandbox's own."""
_NO_FILE = 66


class EnvironmentRuntime(AbstractRuntime):
    """One shell, files and single commands of an environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.shell: Shell | None = None
        self.root = "/root"
        """What `/root` stands for, in SWE-agent's own paths."""

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Always: a sandbox that is lost ends the rollout."""
        return IsAliveResponse(is_alive=True)

    def begin(self) -> None:
        """Start the shell.

        Raises:
            RolloutStopped: the sandbox failed.
        """
        with stopping():
            self.shell = call(Shell.start, self._environment)
        if self._execute(["bash", "-c", _IS_HOME]).exit_code != 0:
            self.root = f"{self.shell.folder}/home"
            self._execute(["mkdir", "-p", f"{self.root}/tools"])
            logger.info("the sandbox has no /root of its own: SWE-agent's files are in %s", self.root)

    def go_on(self, folder: str, root: str) -> None:
        """Use the shell that another process started.

        Raises:
            RolloutStopped: the sandbox failed, or it is not the one that the shell was in.
        """
        self.shell, self.root = Shell(self._environment, folder), root
        with stopping():
            call(self.shell.keep)

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        """Start the shell; it reads `~/.bashrc`, whatever the request names."""
        self.begin()
        return CreateBashSessionResponse()

    async def run_in_session(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Run a command in the shell. An interrupt has nothing to do: a late command is ended already."""
        if self.shell is None:
            raise SessionDoesNotExistError("no session was created")
        if isinstance(action, BashInterruptAction):
            return BashObservation(output="")
        command = self._moved(action.command)
        limit_s = _COMMAND_S if action.timeout is None else action.timeout
        with stopping():
            done = call(partial(self.shell.run, command, timeout_s=limit_s))
        if done.syntax_error:
            raise BashIncorrectSyntaxError(
                "the command is no bash", extra_info={"bash_stdout": "", "bash_stderr": done.syntax_error}
            )
        if done.timed_out:
            raise CommandTimeoutError(f"timeout after {limit_s:g} seconds while running {action.command!r}")
        output = done.output
        if done.ended:
            output += f"\n[the shell ended with exit code {done.exit_code}; a new one was started]"
        if action.check == "raise" and done.exit_code != 0:
            raise NonZeroExitCodeError(f"{action.command!r} ended with exit code {done.exit_code}: {output}")
        return BashObservation(output=output, exit_code=done.exit_code)

    async def close_session(self, request: Any) -> CloseBashSessionResponse:
        """Nothing: the shell ends with the sandbox."""
        return CloseBashSessionResponse()

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command on its own."""
        argv = command.command
        if isinstance(argv, str):
            argv = ["bash", "-c", argv] if command.shell else [argv]
        variables = [f"{key}={value}" for key, value in (command.env or {}).items()]
        argv = [*(["env", *variables] if variables else []), *argv]
        done = self._execute([self._moved(part) for part in argv], timeout_s=command.timeout, cwd=command.cwd)
        if done.timed_out:
            raise CommandTimeoutError(f"timeout while running {command.command!r}")
        if command.check and done.exit_code != 0:
            raise NonZeroExitCodeError(f"{command.command!r} ended with exit code {done.exit_code}")
        return CommandResponse(
            stdout=done.stdout.decode("utf-8", "replace"),
            stderr=done.stderr.decode("utf-8", "replace"),
            exit_code=done.exit_code,
        )

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """A file's text.

        Raises:
            FileNotFoundError: there is none.
        """
        path = self._moved(request.path)
        if self._execute(["bash", "-c", '[ -f "$1" ] || exit 66', "read", path]).exit_code == _NO_FILE:
            raise FileNotFoundError(path)
        with stopping():
            data = call(self._environment.read, path)
        return ReadFileResponse(content=data.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a file's text."""
        with stopping():
            call(self._environment.write, self._moved(request.path), request.content.encode())
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or a folder of this machine into the sandbox."""
        source, target = Path(request.source_path), self._moved(request.target_path)
        self._upload(source, target)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """Nothing: the sandbox is its opener's."""
        return CloseResponse()

    def _upload(self, source: Path, target: str) -> None:
        with stopping(), tempfile.TemporaryDirectory() as scratch:
            if source.is_file():
                call(self._environment.write, target, source.read_bytes())
            else:
                call(self._environment.upload, self._moved_folder(source, Path(scratch)), target)

    def _execute(
        self, argv: list[str], *, timeout_s: float | None = None, cwd: str | None = None
    ) -> CommandOutput:
        run = partial(self._environment.execute, argv, timeout_s=timeout_s or _COMMAND_S, cwd=cwd or "/")
        with stopping():
            return call(run)

    def _moved(self, text: str) -> str:
        return text if self.root == "/root" else _OWN.sub(lambda _: self.root, text)

    def _moved_folder(self, source: Path, scratch: Path) -> Path:
        if self.root == "/root":
            return source
        copied = scratch / source.name
        shutil.copytree(source, copied, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in copied.rglob("*"):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                moved = re.sub(_OWN.pattern.encode(), lambda _: self.root.encode(), data)
                if moved != data:
                    path.write_bytes(moved)
        return copied


class EnvironmentDeployment(AbstractDeployment):
    """A sandbox that somebody else started and will stop."""

    def __init__(self, runtime: EnvironmentRuntime) -> None:
        self._runtime = runtime

    def add_hook(self, hook: Any) -> None:
        """Nothing is started here that a hook could see."""

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """As the runtime says."""
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Nothing: it runs."""

    async def stop(self) -> None:
        """Nothing: the sandbox is its opener's."""

    @property
    def runtime(self) -> EnvironmentRuntime:
        """The sandbox."""
        return self._runtime

    def __del__(self) -> None:
        """Nothing; upstream's would open an event loop."""
