"""What the launcher holds: environment, sessions, commands under way, the owner and the lease."""

import shutil
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import dialect
from .children import Children
from .clean import CleanState
from .clock import date, monotonic_s
from .execute import CommandRequest, Outcome, Run, Wake
from .ownership import Operation, Ownership
from .shell import STARTUP, Shell, ShellRequest

_OLDER_END_S = 15.0
_TELL_EVERY_S = 1.0


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


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        epoch: The owner that the caller says it is; None for one that knows no epochs.
        request_id: Its name for the request, for the log.
        connection: Where it waits; shut for reading when its request must end. None for one that is not cut.
    """

    epoch: int | None = None
    request_id: str | None = None
    connection: socket.socket | None = None


NOBODY = Caller()


class Box:
    """One sandbox seen from the inside. All methods may be called from any thread.

    Args:
        settings: How things are set up.
        ownership: Its owner and lease.
        told: Told the seconds left of the lease, at each renewal (at most once a second) and each change.
        keep: Told each new epoch before it is in force, for an owner to stay fenced over a restart.

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
        self.settings = settings
        self.children = Children()
        self.clean: CleanState | None = None
        self._ownership = ownership
        self._told = told
        self._keep = keep
        self._told_s = 0.0
        self._changed = threading.Condition()
        self._sessions: dict[str, Shell] = {}
        self._wakes: dict[Operation, Wake] = {}
        self._callers: dict[Operation, Caller] = {}

    @property
    def epoch(self) -> int:
        """The owner's epoch; 0 before there was one."""
        return self._ownership.epoch

    def fence(self, epoch: int) -> int:
        """Make ``epoch`` the owner; returns once nothing of older owners runs any more.

        Raises:
            FencedError, LeaseOverError: See `Ownership.fence`.
        """
        with self._changed:
            if epoch > self.epoch:
                self._keep(epoch)
            number, older = self._ownership.fence(epoch, monotonic_s())
            self._tell(force=True)
            for operation in older:
                self._cut(operation)
            # Without an end of its own a stuck process would keep the sandbox from its new owner.
            self._changed.wait_for(
                lambda: not any(self._ownership.runs(one) for one in older), timeout=_OLDER_END_S
            )
            self._ownership.fenced(number, epoch, monotonic_s())
        return epoch

    def _cut(self, operation: Operation) -> None:
        self._wakes[operation].cancel("fenced")
        connection = self._callers[operation].connection
        if connection is not None:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RD)

    @contextmanager
    def operation(self, what: str, caller: Caller = NOBODY, *, busy_s: float = 0.0) -> Generator[Wake]:
        """Something under way on behalf of a caller.

        Args:
            what: For the log: ``command``, ``session`` or ``write``.
            caller: Who asks.
            busy_s: How long it may take; holds the lease for callers that know no heartbeats.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: The caller may not, or was replaced meanwhile.
        """
        with self._changed:
            operation = self._ownership.begin(
                what, caller.epoch, monotonic_s(), busy_s=busy_s, request_id=caller.request_id
            )
            wake = self._wakes[operation] = Wake()
            self._callers[operation] = caller
            self._tell(force=busy_s > 0)
        try:
            yield wake
        finally:
            with self._changed:
                del self._wakes[operation], self._callers[operation]
                wake.close()
                self._changed.notify_all()
                self._ownership.end(operation, monotonic_s())

    def check(self, epoch: int | None) -> None:
        """Refuse whoever is not the owner; callers that know no epochs may stay.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not.
        """
        with self._changed:
            self._ownership.check(epoch, monotonic_s())

    def heard(self, epoch: int | None) -> None:
        """A request came, or goes on: see `Ownership.heard`."""
        with self._changed:
            self._ownership.heard(epoch, monotonic_s())
            self._tell(force=False)

    def renew(self, epoch: int | None) -> None:
        """A heartbeat.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not the owner's.
        """
        with self._changed:
            self._ownership.must_own(epoch, monotonic_s())

    def change_lease(self, epoch: int | None, length_s: float | None) -> None:
        """Give the lease another length, counted from now.

        Raises:
            FencedError, NotOwnerError, LeaseOverError: It is not the owner who asks.
        """
        with self._changed:
            self._ownership.change_lease(epoch, length_s, monotonic_s())
            self._tell(force=True)
            self._changed.notify_all()

    def left_s(self) -> float | None:
        """Seconds until the lease is over; None when it never is."""
        with self._changed:
            return self._ownership.left_s(monotonic_s())

    def wait_for_end(self) -> str:
        """Return when the lease has run out: with a sentence that says whose, and since when."""
        with self._changed:
            while not self._ownership.over(monotonic_s()):
                self._changed.wait(self._ownership.left_s(monotonic_s()))
            silent_s = monotonic_s() - self._ownership.lease.renewed_s
            owner = f"its owner, epoch {self.epoch}," if self.epoch else "anybody"
            return f"the lease ran out at {date()}: nothing was heard of {owner} for {silent_s:.0f} s"

    def log(self, after: int = 0) -> list[dict[str, Any]]:
        """The lines of the log above a number; see `log.Entry`."""
        with self._changed:
            return self._ownership.log.after(after)

    def _tell(self, *, force: bool) -> None:
        now_s = monotonic_s()
        if force or now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._told(self._ownership.left_s(now_s))

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

    def close_sessions(self) -> None:
        """End all sessions."""
        for name in list(self.sessions()):
            self.close_session(name)
