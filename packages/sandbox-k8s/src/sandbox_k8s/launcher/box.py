"""What the launcher holds: environment, sessions, commands under way."""

import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import dialect
from .children import Children
from .clean import CleanState
from .execute import CommandRequest, Outcome, Run, Wake
from .ownership import Ownership
from .shell import STARTUP, Shell, ShellRequest
from .tenure import Tenure


class SessionExistsError(Exception):
    """There is a session of that name."""


class SessionMissingError(Exception):
    """There is no session of that name."""


@dataclass(frozen=True)
class BoxSettings:
    """How the launcher was told to set things up."""

    env: Mapping[str, str]
    workdir: str
    pipes: Path
    memory_bytes: int | None = None
    epoch_file: Path | None = None
    """Where `Box` keeps the epoch; None for nowhere."""
    orphans: bool = False
    """Whether this process is there for the box alone, and reaps whatever falls to it."""


class Box(Tenure):
    """One sandbox seen from the inside. All methods may be called from any thread.

    Args:
        settings: How things are set up.
        ownership: Its owner and lease.
        told: See `Tenure`.
        keep: See `Tenure`.

    Attributes:
        clean: The state to come back to; None before somebody marked one.
    """

    def __init__(
        self,
        settings: BoxSettings,
        ownership: Ownership,
        *,
        told: Callable[[float | None], None] = lambda left_s: None,
        keep: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        super().__init__(ownership, told=told, keep=keep)
        self.settings = settings
        self.children = Children(orphans=settings.orphans)
        self.clean: CleanState | None = None
        self._sessions: dict[str, Shell] = {}

    def remember(self, state: CleanState, wake: Wake) -> None:
        """Make a state the one to come back to, if its caller is still the owner.

        Raises:
            CutOffError: It is not.
        """
        with self._changed:
            wake.go_on()
            self.clean = state

    def argv_for(self, command: str | Sequence[str]) -> list[str]:
        """The argument list for a command; a string is for `shell`."""
        return [self.shell().program, "-c", command] if isinstance(command, str) else list(command)

    def shell(self) -> dialect.Dialect:
        """The shell of this sandbox: bash, or sh as long as there is no bash."""
        return dialect.of(self.settings.env.get("PATH"))

    def environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        """The environment of a command; bash reads the start-up files through BASH_ENV."""
        startup = {"BASH_ENV": str(STARTUP)} if self.shell().reads_startup else {}
        return {**self.settings.env, **startup, **(extra or {})}

    def execute(self, request: CommandRequest, wake: Wake, connection: socket.socket | None) -> Outcome:
        """Run a command on its own.

        Raises:
            OSError: It cannot be started.
            ValueError: It has no word.
        """
        if not request.argv:
            raise ValueError("the command is an empty list")
        request.argv = self._limited(request.argv, request)
        return Run(self.children, request, wake, connection)()

    def _limited(self, argv: Sequence[str], request: CommandRequest) -> list[str]:
        limit = self.settings.memory_bytes
        if limit is None:
            return list(argv)
        if shutil.which(argv[0], path=request.env.get("PATH")) is None:
            raise FileNotFoundError(2, "No such file or directory", argv[0])
        return ["/bin/sh", "-c", f'ulimit -v {limit // 1024} || exit 126; exec "$@"', "sh", *argv]

    def create_session(
        self, name: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Shell:
        """Start a session.

        Raises:
            SessionExistsError: There is one of that name, alive.
            OSError: The shell cannot be started.
        """
        with self._changed:
            held = self._sessions.get(name)
            if held is not None and held.alive:
                raise SessionExistsError(f"session {name!r} already exists")
            self._sessions[name] = shell = Shell(
                self.children,
                name,
                self.shell(),
                cwd=cwd or self.settings.workdir,
                env={**self.settings.env, **(env or {})},
                pipes=self.settings.pipes,
                memory_bytes=self.settings.memory_bytes,
            )
        return shell

    def session(self, name: str) -> Shell:
        """The session of that name.

        Raises:
            SessionMissingError: There is none.
        """
        with self._changed:
            try:
                return self._sessions[name]
            except KeyError:
                raise SessionMissingError(f"session {name!r} does not exist") from None

    def sessions(self) -> dict[str, bool]:
        """Names of the sessions, and whether their shells run."""
        with self._changed:
            return {name: shell.alive for name, shell in self._sessions.items()}

    def run_in_session(
        self, name: str, request: ShellRequest, wake: Wake, connection: socket.socket | None
    ) -> Outcome:
        """Run a command in a session.

        Raises:
            SessionMissingError, ShellBusyError, ShellClosedError: It cannot be run there.
        """
        return self.session(name).run(request, wake, connection)

    def close_session(self, name: str) -> None:
        """End a session and forget it.

        Raises:
            SessionMissingError: There is none.
        """
        shell = self.session(name)
        with self._changed:
            self._sessions.pop(name, None)
        shell.close()

    def close_sessions(self, wake: Wake | None = None) -> None:
        """End all sessions, for a request; None is for nobody whom a new owner could follow.

        Raises:
            CutOffError: A new owner came, whose sessions the others are.
        """
        for name in list(self.sessions()):
            if wake is not None:
                wake.go_on()
            with self._changed:
                shell = self._sessions.pop(name, None)
            if shell is not None:
                shell.close()
