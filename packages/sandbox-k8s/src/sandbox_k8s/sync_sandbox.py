"""The blocking face of a sandbox and its sessions."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .handle import SandboxHandle
from .log import LogEntry
from .result import CommandResult, SessionResult
from .sandbox import Command, Sandbox
from .session import Session

if TYPE_CHECKING:
    from .sync import SyncSandboxClient


class SyncSandbox:
    """One sandbox. See `Sandbox` for what the methods do; as ``with sandbox:`` it is stopped at the end."""

    def __init__(self, client: "SyncSandboxClient", sandbox: Sandbox) -> None:
        self.client = client
        self.sandbox = sandbox

    def __repr__(self) -> str:
        return f"Sync{self.sandbox!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.thread.call(partial(self.sandbox.__aexit__, kind, problem, trace))

    @property
    def id(self) -> str:
        """Its name: 16 hex characters."""
        return self.sandbox.id

    @property
    def handle(self) -> SandboxHandle:
        """What another process needs to attach, beside the run key."""
        return self.sandbox.handle

    @property
    def owned(self) -> bool:
        """False when it was attached without ownership."""
        return self.sandbox.owned

    @property
    def workdir(self) -> str:
        """Where commands start, as they see it."""
        return self.sandbox.workdir

    @property
    def backend_name(self) -> str:
        """What it runs in: ``bubblewrap``, ``process`` or ``kubernetes``."""
        return self.sandbox.backend_name

    def execute(
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
        """See `Sandbox.execute`."""
        execute = partial(
            self.sandbox.execute,
            command,
            cwd=cwd,
            env=env,
            timeout_s=timeout_s,
            stdin=stdin,
            merge_stderr=merge_stderr,
            output_limit=output_limit,
        )
        return self.client.thread.call(execute)

    def session(
        self, name: str = "default", *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> "SyncSession":
        """See `Sandbox.session`."""
        session = partial(self.sandbox.session, name, cwd=cwd, env=env)
        return SyncSession(self.client, self.client.thread.call(session))

    def read(self, path: str) -> bytes:
        """See `Sandbox.read`."""
        return self.client.thread.call(partial(self.sandbox.read, path))

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """See `Sandbox.write`."""
        self.client.thread.call(partial(self.sandbox.write, path, data, mode))

    def upload(self, local: Path | str, remote: str) -> None:
        """See `Sandbox.upload`."""
        self.client.thread.call(partial(self.sandbox.upload, local, remote))

    def download(self, remote: str, local: Path | str) -> None:
        """See `Sandbox.download`."""
        self.client.thread.call(partial(self.sandbox.download, remote, local))

    def info(self) -> dict[str, Any]:
        """See `Sandbox.info`."""
        return self.client.thread.call(self.sandbox.info)

    def log(self, after: int = 0) -> tuple[LogEntry, ...]:
        """See `Sandbox.log`."""
        return self.client.thread.call(partial(self.sandbox.log, after))

    def mark_clean(self, repo: str | None = None) -> None:
        """See `Sandbox.mark_clean`."""
        self.client.thread.call(partial(self.sandbox.mark_clean, repo))

    def reset(self) -> "SyncSandbox":
        """See `Sandbox.reset`."""
        return SyncSandbox(self.client, self.client.thread.call(self.sandbox.reset, Sandbox.stop))

    def renew(self) -> None:
        """See `Sandbox.renew`."""
        self.client.thread.call(self.sandbox.renew)

    def detach(self) -> SandboxHandle:
        """See `Sandbox.detach`. Interrupted by Ctrl-C, it leaves the sandbox this client's."""
        return self.client.thread.call(self.sandbox.detach, self.take_back)

    async def take_back(self, handle: SandboxHandle) -> None:
        """Attach it again after a detach whose caller never got the handle. For the client's own thread.

        What it had, its sessions too, is as it was; objects of sessions from before are fenced.
        """
        self.sandbox = await self.client.client.attach(handle)

    def stop(self) -> None:
        """See `Sandbox.stop`."""
        self.client.thread.call(self.sandbox.stop)


class SyncSession:
    """A bash that keeps its state from command to command. See `Session`; ``with session:`` closes it."""

    def __init__(self, client: "SyncSandboxClient", session: Session) -> None:
        self.client = client
        self.session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.thread.call(partial(self.session.__aexit__, kind, problem, trace))

    @property
    def name(self) -> str:
        """Its name."""
        return self.session.name

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        merge_stderr: bool = False,
        output_limit: int | None = None,
    ) -> SessionResult:
        """See `Session.run`."""
        run = partial(
            self.session.run,
            command,
            timeout_s=timeout_s,
            merge_stderr=merge_stderr,
            output_limit=output_limit,
        )
        return self.client.thread.call(run)

    def interrupt(self) -> bool:
        """See `Session.interrupt`."""
        return self.client.thread.call(self.session.interrupt)

    def close(self) -> None:
        """See `Session.close`."""
        self.client.thread.call(self.session.close)
