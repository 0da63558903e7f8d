"""`local`: sandboxes on this machine, from sandbox-k8s' local back end (bubblewrap, else a plain process)."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
from sandbox_k8s import LocalConfig, Sandbox, SandboxClient, SandboxError, SandboxSpec
from token_tracking.sample import Scalar

from agent_flow.config import Seconds
from agent_flow.errors import EnvError
from agent_flow.protocols import CommandOutput, Environment, ProviderContext

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

        network: bool = False
        """Only bubblewrap can take the network away; a plain process always has it."""
        lease_s: Seconds = 60.0
        """A sandbox ends by itself when its worker was silent for so long."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._client: SandboxClient | None = None
        self._backend = ""

    async def start(self) -> None:
        """Open the client."""
        client = SandboxClient.local(LocalConfig())
        try:
            await client.__aenter__()
        except SandboxError as error:
            raise _failure("client", error) from error
        self._client = client

    async def close(self) -> None:
        """Stop every sandbox that still lives."""
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)

    def open(self, repository: Path) -> AbstractAsyncContextManager[Environment]:
        """A fresh sandbox with a working copy of the repository."""
        return self._open(repository)

    @asynccontextmanager
    async def _open(self, repository: Path) -> AsyncGenerator[Environment]:
        if self._client is None:
            raise EnvError("client", "the environment provider was not started")
        try:
            sandbox = await self._client.start(self._spec())
        except SandboxError as error:
            raise _failure("start", error) from error
        self._backend = sandbox.backend_name
        try:
            environment = LocalEnvironment(sandbox)
            await environment.upload(repository, sandbox.workdir)
            yield environment
        finally:
            await sandbox.stop()

    def _spec(self) -> SandboxSpec:
        # The commands of a task call `python3`: the very interpreter that runs here, without its
        # site-packages.
        prefix = Path(sys.base_prefix).resolve()
        return SandboxSpec(
            env={"PATH": f"{prefix / 'bin'}{os.pathsep}/usr/local/bin:/usr/bin:/bin", **_GIT_IDENTITY},
            read_only_paths=(str(prefix),),
            network=self._config.network,
            lease_s=self._config.lease_s,
        )

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"environment": "local", "environment_backend": self._backend}


class LocalEnvironment:
    """A sandbox seen as the flow's environment; its errors become `EnvError`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.workdir = sandbox.workdir

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


def _failure(cause: str, error: SandboxError) -> EnvError:
    return EnvError(cause, str(error), fault=error.fault, retryable=error.retryable)
