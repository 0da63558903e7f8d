"""A running sandbox: commands, files, and how it ends."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from .checks import check_command, check_value
from .config import ClientConfig
from .errors import SandboxLostError, SessionError, TransferError
from .handle import LocalPlace, SandboxHandle
from .launcher import archive, execute, shell
from .log import LogEntry
from .result import CommandResult, fields_of
from .session import Session
from .transport import LauncherClient

if TYPE_CHECKING:
    from .client import SandboxClient

_SURVEY_S = 600.0
_SAID_BYTES = 2000
Command = str | Sequence[str]


class Sandbox:
    """One sandbox. Made by `SandboxClient.start` and `SandboxClient.attach`.

    Every method raises `SandboxLostError` when the sandbox is gone and `FencedError` when another worker took
    it. As ``async with sandbox:`` it is stopped at the end of the block, unless it was detached; one that was
    attached without ownership only closes its connections.
    """

    def __init__(
        self, client: "SandboxClient", handle: SandboxHandle, launcher: LauncherClient, owned: bool
    ) -> None:
        self._client = client
        self._handle = handle
        self._launcher = launcher
        self.owned = owned

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r}, {self.backend_name}, {self.workdir!r})"

    async def __aenter__(self) -> "Sandbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            if self.owned:
                await self._client.leave(self)
            else:
                await self._launcher.close()

    @property
    def id(self) -> str:
        """Its name: 16 hex characters."""
        return self._handle.sandbox_id

    @property
    def handle(self) -> SandboxHandle:
        """What another process needs to attach, beside the run key."""
        return self._handle

    @property
    def workdir(self) -> str:
        """Where commands start, as they see it."""
        return self._handle.workdir

    @property
    def backend_name(self) -> str:
        """What it runs in: ``bubblewrap``, ``process`` or ``kubernetes``."""
        place = self._handle.place
        return place.isolation if isinstance(place, LocalPlace) else "kubernetes"

    async def execute(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        merge_stderr: bool = False,
        output_limit: int | None = None,
    ) -> CommandResult:
        """Run one command on its own.

        Args:
            command: A sequence is a program and its arguments. A string is for ``bash -c``, which reads
                ``~/.bashrc`` first if there is one; it is no login shell.
            cwd: Absolute, or below the working directory; None is the working directory.
            env: On top of the sandbox's own.
            timeout_s: Then its whole process group gets SIGTERM, and SIGKILL after the grace time. None waits
                for ever.
            stdin: None is empty input.
            merge_stderr: Both streams in ``stdout``, in the order in which they came.
            output_limit: Bytes kept per stream; None is the configured limit.

        Returns:
            Also for a program that is missing (127), cannot be executed (126), or was killed.

        Raises:
            CommandRefusedError: ``cwd`` is no folder, something holds a NUL byte, or the command is empty.
            ConfigError: An argument has another type.
        """
        check_command(command, timeout_s, stdin)
        check_value("env", env, Mapping[str, str] | None)
        head: dict[str, Any] = {
            "command": command if isinstance(command, str) else list(command),
            "cwd": self._below_workdir(cwd),
            "env": dict(env or {}),
            "timeout_s": timeout_s,
            "grace_s": self.config.grace_s,
            "output_limit": output_limit or self.config.output_limit,
            "merge": merge_stderr,
        }
        work_s = None if timeout_s is None else timeout_s + self.config.grace_s + execute.OVERRUN_S
        answer, parts = await self._launcher.command("/sbx/execute", head, stdin or b"", work_s=work_s)
        return CommandResult(**fields_of(answer, parts))

    async def session(
        self, name: str = "default", *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Session:
        """The bash session of that name, started if there is none (or its shell has ended).

        Raises:
            SessionError: Its start-up files ended its shell, or took longer than ``start_timeout_s``; it was
                closed. The evidence is what they printed.
        """
        if not await self._has_session(name):
            try:
                await self._start_session(name, cwd, env)
            except SessionError:
                # Somebody else may have been quicker; commands wait for the start-up files of theirs.
                if not await self._has_session(name):
                    raise
        return Session(self, name)

    async def _has_session(self, name: str) -> bool:
        return (await self._launcher.info())["sessions"].get(name, False)

    async def _start_session(self, name: str, cwd: str | None, env: Mapping[str, str] | None) -> None:
        start_s = self.config.start_timeout_s
        head = {"name": name, "cwd": self._below_workdir(cwd), "env": dict(env or {}), "timeout_s": start_s}
        work_s = start_s + shell.OVERRUN_S
        answer, parts = await self._launcher.command("/sbx/session/create", head, b"", work_s=work_s)
        if (
            not (answer["timed_out"] or answer["cancelled"] or answer["infra_error"])
            and answer["session_alive"]
        ):
            return
        with anyio.CancelScope(shield=True), suppress(SessionError):
            await Session(self, name).close()
        said = fields_of(answer, parts)["stdout"][-_SAID_BYTES:].decode("utf-8", "replace")
        what = f"the start-up files of session {name!r} in sandbox {self.id}"
        if answer["infra_error"]:
            raise SandboxLostError(f"{what} were not read: {answer['infra_error']}", evidence=said)
        if answer["timed_out"]:
            raise SessionError(f"{what} took more than {start_s:g} s", evidence=said)
        why = answer["cancelled"] or f"they ended its shell, with exit code {answer['exit_code']}"
        raise SessionError(f"{what} were not read to the end: {why}", evidence=said)

    async def read(self, path: str) -> bytes:
        """A file's bytes, as they are.

        Raises:
            FileError: It is missing or cannot be read; `FileError.errno` says which.
            TransferError: It did not arrive whole.
        """
        return b"".join([chunk async for chunk in self._launcher.get("/sbx/file", {"path": path})])

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Write a file, whole or not at all, with its folders.

        Args:
            path: Absolute, or below the working directory. A link is followed.
            data: The content, byte for byte.
            mode: Permission bits; None keeps those of an existing file.

        Raises:
            FileError: It cannot be written.
        """
        check_value("data", data, bytes | bytearray | memoryview)
        query = {"path": path} if mode is None else {"path": path, "mode": f"{mode:o}"}
        await self._launcher.put("/sbx/file", query, [data] if data else [])

    async def upload(self, local: Path | str, remote: str) -> None:
        """Copy a file or folder in: modes, links and empty folders are kept, memory stays constant.

        Raises:
            FileNotFoundError: There is no ``local``.
            FileError: It cannot be written at ``remote``.
            TransferError: Something of ``local`` could not be read, or a file shrank meanwhile.
        """
        source = Path(local)
        await anyio.to_thread.run_sync(source.lstat)
        await self._launcher.put("/sbx/tree", {"path": remote}, archive.pack(source))

    async def download(self, remote: str, local: Path | str) -> None:
        """Copy a file or folder out. Nothing is written outside ``local``, whatever the sandbox sends.

        Raises:
            FileError: There is no ``remote``.
            TransferError: It did not arrive whole, or holds names that lead outside.
        """
        target = Path(local)
        spool = await anyio.to_thread.run_sync(archive.open_spool)
        try:
            async with aclosing(self._launcher.get("/sbx/tree", {"path": remote})) as chunks:
                async for chunk in chunks:
                    await anyio.to_thread.run_sync(spool.write, chunk)
            spool.seek(0)
            await anyio.to_thread.run_sync(archive.unpack, spool, target)
        except archive.ArchiveError as problem:
            raise TransferError(f"{remote} from sandbox {self.id}: {problem}") from problem
        finally:
            spool.close()

    async def info(self) -> dict[str, Any]:
        """What the launcher says: sessions, epoch, seconds left of the lease, commands under way."""
        return await self._launcher.info()

    async def log(self, after: int = 0) -> tuple[LogEntry, ...]:
        """Who did what in here, the oldest first: the launcher's own log, the judge of who owned it when.

        Args:
            after: Only lines above this number.
        """
        return await self._launcher.log(after)

    async def renew(self) -> None:
        """Renew the lease. An open client does this by itself.

        Raises:
            FencedError: Only the owner may: another worker is, or this one is a guest.
        """
        await self._launcher.call("/sbx/lease", {})

    async def mark_clean(self, repo: str | None = None) -> None:
        """Remember the state of now, to come back to it with `reset`. Close all sessions first.

        Args:
            repo: A git working tree whose tracked files `reset` brings back. Absolute, or below the working
                directory. They should be as they are in git's index. None: every file that is changed or
                removed, but for small ones in the home, makes `reset` refuse.

        Raises:
            ResetRefusedError: Something runs, git does not work, or there is no PID namespace (the local back
                end without bubblewrap).
        """
        body = {} if repo is None else {"repo": str(PurePosixPath(self.workdir) / repo)}
        await self._launcher.call("/sbx/mark", body, work_s=_SURVEY_S)

    async def reset(self) -> "Sandbox":
        """Make a used sandbox as good as new, for its next user; see `SandboxClient.reset`.

        Returns:
            The same sandbox with the next epoch: go on with that object, this one is fenced.
        """
        return await self._client.reset(self)

    async def detach(self) -> SandboxHandle:
        """Leave the sandbox running, its shells too, for ``detached_lease_s``; this object is done.

        Returns:
            The handle for `SandboxClient.attach`.
        """
        return await self._client.detach(self)

    async def stop(self) -> None:
        """End everything inside and remove its folder or pod. Stopping twice does nothing.

        Raises:
            FencedError: Another worker owns it, or it lives on as the object that `reset` returned.
        """
        await self._client.stop(self)

    @property
    def config(self) -> ClientConfig:
        """The settings of its client."""
        return self._client.config

    @property
    def launcher(self) -> LauncherClient:
        """The connection to the inside."""
        return self._launcher

    def _below_workdir(self, cwd: str | None) -> str | None:
        return None if cwd is None else str(Path(self.workdir) / cwd)
