"""`local`: sandboxes on this machine, from sandbox-k8s' local back end (bubblewrap, else a plain process)."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from sandbox_k8s import LocalConfig, Sandbox, SandboxClient, SandboxError, SandboxSpec
from token_tracking.sample import Scalar

from agent_flow.config import Seconds
from agent_flow.errors import ConfigError, EnvError
from agent_flow.protocols import CommandOutput, Environment, EnvironmentSpec, ProviderContext

logger = logging.getLogger(__name__)

_GIT_IDENTITY = {
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@sandbox.invalid",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@sandbox.invalid",
    "GIT_CONFIG_NOSYSTEM": "1",
}


class LocalEnvironments:
    """Starts one local sandbox per rollout and one per grading."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[environment]` with `provider = "local"`."""

        root: str = ""
        """Folder of the sandboxes, for `sandbox-k8s ps --root`. Empty: in the run's own temporary folder."""
        network: bool = False
        """Only bubblewrap can take the network away; a plain process always has it."""
        lease_s: Seconds = 60.0
        """A sandbox ends by itself when its worker was silent for so long."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        # In the run's own scratch folder, so that nothing stays behind in the machine's temporary folder.
        self._root = context.file.resolve(config.root) if config.root else context.scratch / "s"
        # The commands of a task call `python3`: the interpreter that runs here, without its site-packages.
        prefix = Path(sys.base_prefix).resolve()
        self._spec = SandboxSpec(
            env={"PATH": f"{prefix / 'bin'}:/usr/local/bin:/usr/bin:/bin", **_GIT_IDENTITY},
            read_only_paths=(prefix,),
            network=config.network,
            lease_s=config.lease_s,
        )
        self._client: SandboxClient | None = None

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """One client for all sandboxes; its end stops those that still live."""
        async with AsyncExitStack() as stack:
            try:
                client = SandboxClient.local(LocalConfig(root=self._root))
                self._client = await stack.enter_async_context(client)
            except SandboxError as error:
                raise ConfigError(f"no sandboxes can be started: {error}", where="environment") from error
            try:
                yield
            finally:
                self._client = None

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A fresh sandbox with a working copy of the repository."""
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: EnvironmentSpec) -> AsyncGenerator[Environment]:
        if self._client is None:
            raise EnvError("client", "open was called outside session")
        if spec.image or spec.repository is None:
            raise EnvError(
                "image",
                f"sandboxes of this machine have no images, the task wants {spec.image!r}",
                fault="task",
            )
        repository = spec.repository
        try:
            sandbox = await self._client.start(self._spec)
        except SandboxError as error:
            raise _failure("start", error) from error
        try:
            environment = LocalEnvironment(sandbox, f"{sandbox.workdir}/{repository.name}")
            await environment.upload(repository, environment.workdir)
            yield environment
        finally:
            try:
                await sandbox.stop()
            except SandboxError as error:
                # It ends by itself with its lease; a finished rollout must not be lost over it.
                logger.warning("a sandbox could not be stopped: %s", error)


class LocalEnvironment:
    """A sandbox seen as the flow's environment; its errors become `EnvError`."""

    def __init__(self, sandbox: Sandbox, workdir: str) -> None:
        self._sandbox = sandbox
        self.workdir = workdir

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"environment": "local", "environment_backend": self._sandbox.backend_name}

    async def execute(
        self, command: Sequence[str], *, timeout_s: float, cwd: str | None = None
    ) -> CommandOutput:
        """Run an argument vector; see `Environment.execute`."""
        try:
            done = await self._sandbox.execute(list(command), timeout_s=timeout_s, cwd=cwd)
        except SandboxError as error:
            raise _failure("execute", error) from error
        if done.infra_failed or (done.exit_code is None and not done.timed_out):
            raise EnvError("execute", f"no exit code for {' '.join(command)[:200]!r}", retryable=True)
        return CommandOutput(
            exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, timed_out=done.timed_out
        )

    async def read(self, path: str) -> bytes:
        """A file's bytes."""
        try:
            return await self._sandbox.read(path)
        except SandboxError as error:
            raise _failure("read", error) from error

    async def write(self, path: str, data: bytes) -> None:
        """Write a file's bytes."""
        try:
            await self._sandbox.write(path, data)
        except SandboxError as error:
            raise _failure("write", error) from error

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder into the sandbox."""
        try:
            await self._sandbox.upload(source, target)
        except SandboxError as error:
            raise _failure("upload", error) from error

    async def download(self, source: str, target: Path) -> None:
        """Copy a folder out of the sandbox."""
        try:
            await self._sandbox.download(source, target)
        except SandboxError as error:
            raise _failure("download", error) from error


def _failure(cause: str, error: SandboxError) -> EnvError:
    return EnvError(cause, str(error), fault=error.fault, retryable=error.retryable)
