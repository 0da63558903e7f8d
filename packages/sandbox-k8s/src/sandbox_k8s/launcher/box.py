"""What the launcher holds: environment, sessions, commands under way, the owner's epoch, the lease."""

import shutil
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import dialect
from .children import Children
from .execute import CommandRequest, Outcome, Run, Wake
from .lease import Lease
from .shell import STARTUP, Shell, ShellRequest


class FencedError(Exception):
    """The request comes from an owner that has been replaced."""


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


class Box:
    """One sandbox seen from the inside. All methods may be called from any thread."""

    def __init__(self, settings: BoxSettings, lease: Lease) -> None:
        self.settings = settings
        self.lease = lease
        self.epoch = 0
        self.children = Children()
        self._lock = threading.Lock()
        self._sessions: dict[str, Shell] = {}
        self._running: dict[Wake, int] = {}

    def fence(self, epoch: int) -> int:
        """Make ``epoch`` the owner and end what older owners are running; returns the epoch now in force.

        Raises:
            FencedError: A higher epoch is in force.
        """
        with self._lock:
            if epoch < self.epoch:
                raise FencedError(f"epoch {epoch} is behind the owner's epoch {self.epoch}")
            self.epoch = epoch
            older = [wake for wake, started in self._running.items() if started < epoch]
        for wake in older:
            wake.cancel("fenced")
        return epoch

    @contextmanager
    def operation(self, epoch: int | None) -> Generator[Wake]:
        """A command under way on behalf of ``epoch`` (None: whoever is the owner).

        Raises:
            FencedError: The owner was replaced, before or meanwhile.
        """
        wake = Wake()
        with self._lock:
            held = self._checked(epoch)
            self._running[wake] = held
        try:
            yield wake
        finally:
            with self._lock:
                del self._running[wake]
                current = self.epoch
            wake.close()
        if epoch is not None and current > held:
            raise FencedError(f"epoch {epoch} was replaced by epoch {current} while its command ran")

    def check(self, epoch: int | None) -> None:
        """Refuse an older owner.

        Raises:
            FencedError: It is one.
        """
        with self._lock:
            self._checked(epoch)

    def _checked(self, epoch: int | None) -> int:
        if epoch is not None and epoch < self.epoch:
            raise FencedError(f"epoch {epoch} is behind the owner's epoch {self.epoch}")
        return self.epoch if epoch is None else epoch

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
        """
        self.lease.renew(request.timeout_s or 0.0)
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
        with self._lock:
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
        with self._lock:
            try:
                return self._sessions[name]
            except KeyError:
                raise SessionMissingError(f"session {name!r} does not exist") from None

    def sessions(self) -> dict[str, bool]:
        """Names of the sessions, and whether their shells run."""
        with self._lock:
            return {name: shell.alive for name, shell in self._sessions.items()}

    def run_in_session(
        self, name: str, request: ShellRequest, wake: Wake, connection: socket.socket | None
    ) -> Outcome:
        """Run a command in a session.

        Raises:
            SessionMissingError, ShellBusyError, ShellClosedError: It cannot be run there.
        """
        self.lease.renew(request.timeout_s or 0.0)
        return self.session(name).run(request, wake, connection)

    def close_session(self, name: str) -> None:
        """End a session and forget it.

        Raises:
            SessionMissingError: There is none.
        """
        shell = self.session(name)
        with self._lock:
            self._sessions.pop(name, None)
        shell.close()

    def close_sessions(self) -> None:
        """End all sessions."""
        for name in list(self.sessions()):
            self.close_session(name)
