"""`local`: sandboxes on this machine, from sandbox-k8s' local back end (bubblewrap, else a plain process)."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from sandbox_k8s import LocalConfig, SandboxClient, SandboxError, SandboxSpec

from agent_flow.config import Seconds
from agent_flow.environments.identity import GIT_IDENTITY
from agent_flow.environments.sandbox import started
from agent_flow.environments.stops import Stops
from agent_flow.errors import ConfigError, EnvCreateError
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext


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
            env={"PATH": f"{prefix / 'bin'}:/usr/local/bin:/usr/bin:/bin", **GIT_IDENTITY},
            read_only_paths=(prefix,),
            network=config.network,
            lease_s=config.lease_s,
        )
        self._client: SandboxClient | None = None
        self.stops = Stops()

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
        if self._client is None:
            raise EnvCreateError("client", "open was called outside session")
        if spec.image or spec.repository is None:
            raise EnvCreateError(
                "image",
                f"sandboxes of this machine have no images, the task wants {spec.image!r}; where"
                " the runtime has a key `repos`, a folder of what tasks begin with, it needs none",
                fault="task",
            )
        return started(self._client, self._spec, spec, self.stops, name="local")
