"""SWE-ReX's deployment: one sandbox, started, handed over or ended."""

import asyncio
import logging
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import anyio
import anyio.to_thread
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
from swerex.runtime.abstract import IsAliveResponse
from swerex.utils.log import get_logger

from sandbox_k8s.errors import FencedError, SandboxError
from sandbox_k8s.handle import SandboxHandle
from sandbox_k8s.many import stop_all
from sandbox_k8s.sync import SyncSandboxClient
from sandbox_k8s.sync_sandbox import SyncSandbox

from .beginning import Beginning
from .config import K8sDeploymentConfig
from .errors import as_swerex
from .runtime import K8sRemoteRuntime
from .turns import Turns


class K8sDeployment(AbstractDeployment):
    """A sandbox in a pod, or on this machine, wherever SWE-ReX takes a deployment (SWE-agent/SWE-ReX#269).

    Leases are renewed in a thread of its own, so its methods may be called in different event loops, one
    after the other or at once: `start`, `attach`, `detach` and `stop` wait for each other, and `stop` ends a
    start that is under way. `detach` hands the sandbox over; the deployment that let it go does not touch it
    again, not even when it is garbage-collected or the interpreter exits.
    """

    def __init__(
        self,
        *,
        logger: logging.Logger | None = None,
        client: SyncSandboxClient | None = None,
        **kwargs: Any,
    ) -> None:
        """Nothing is started yet.

        Args:
            logger: None is SWE-ReX's own.
            client: An open client that several deployments share: one thread, one watch. It is not closed
                here, and ``kubernetes`` and ``local`` are left out. None makes one for this deployment.
            **kwargs: See `K8sDeploymentConfig`.
        """
        self._config = K8sDeploymentConfig(**kwargs)
        self._shared = client
        self._client: SyncSandboxClient | None = None
        self._runtime: K8sRemoteRuntime | None = None
        self._forgotten: weakref.finalize[Any, Any] | None = None
        self._beginnings: set[Beginning] = set()
        self._turns = Turns()
        self.logger = logger or get_logger("rex-deploy")
        self._hooks = CombinedDeploymentHook()

    def __del__(self) -> None:
        """Nothing: the base class's stops the sandbox from here, in whichever event loop it finds."""

    @classmethod
    def from_config(cls, config: K8sDeploymentConfig) -> Self:
        """A deployment of these settings, not started."""
        return cls(**dict(config))

    def add_hook(self, hook: DeploymentHook) -> None:
        """Have a hook told of the steps of `start`."""
        self._hooks.add_hook(hook)

    async def start(self) -> None:
        """Start a sandbox. Cancelled or failed, it leaves nothing behind.

        Raises:
            K8sStartupError: It did not come up; a `DeploymentStartupError` with the pod's diagnosis. Or it
                was stopped meanwhile.
            DeploymentStartupError: There is a sandbox already.
            ConfigError: The settings ask for what cannot be.
        """
        start = Beginning(lambda client: client.start(self._config.spec()), attached=False)
        await self._become("Starting sandbox", start)

    async def attach(self, handle: SandboxHandle) -> None:
        """Take over a sandbox that another deployment or client detached, instead of `start`.

        Raises:
            SandboxNotFoundError: It has ended.
            ConfigError: The handle belongs to another place than these settings.
            FencedError: Another worker is attaching at this moment.
        """
        attach = Beginning(lambda client: client.attach(handle), attached=True)
        await self._become("Attaching to sandbox", attach)

    async def detach(self) -> SandboxHandle:
        """Leave the sandbox running, its sessions too, for `SandboxSpec.detached_lease_s`.

        Cancelled or failed, it leaves the deployment with its sandbox.

        Returns:
            What `attach` needs, in any process that has the run key.

        Raises:
            DeploymentNotStartedError: There is no sandbox.
        """
        async with self._turns:
            held = self.runtime.sandbox
            try:
                handle = await held.client.thread.call_from(held.sandbox.detach, held.take_back)
            except SandboxError as problem:
                raise as_swerex(problem) from problem
            await self._let_go()
            return handle

    async def stop(self) -> None:
        """End the sandbox, or the start that is under way. Cancelled, it ends the sandbox all the same.

        Without a sandbox, or with one that another worker took, nothing is done.

        Raises:
            K8sLostError: Its end was not confirmed; it is renewed no more, and its lease ends it.
        """
        for beginning in list(self._beginnings):
            beginning.end()
        async with self._turns:
            if self._runtime is None:
                return
            held = self._runtime.sandbox
            try:
                await held.client.thread.call_from(partial(_to_the_end, held))
            except FencedError as problem:
                self.logger.info("%s; left alone", problem)
            except SandboxError as problem:
                raise as_swerex(problem) from problem
            finally:
                await self._let_go()

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the sandbox answers and is still this deployment's.

        Raises:
            DeploymentNotStartedError: There is no sandbox.
        """
        return await self.runtime.is_alive(timeout=timeout)

    @property
    def runtime(self) -> K8sRemoteRuntime:
        """What runs commands.

        Raises:
            DeploymentNotStartedError: There is no sandbox: not started, stopped or detached.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime

    async def _become(self, step: str, beginning: Beginning) -> None:
        self._beginnings.add(beginning)
        try:
            async with self._turns:
                if self._runtime is not None:
                    raise DeploymentStartupError(
                        "this deployment has a sandbox already; stop or detach it first"
                    )
                try:
                    await self._begin(step, beginning)
                except BaseException as problem:
                    await self._let_go()
                    if isinstance(problem, SandboxError):
                        raise as_swerex(problem) from problem
                    raise
        finally:
            self._beginnings.discard(beginning)

    async def _begin(self, step: str, beginning: Beginning) -> None:
        self._hooks.on_custom_step(step)
        client = await self._opened()
        sandbox = await beginning.run(client)
        try:
            self._hooks.on_custom_step("Starting runtime")
        except BaseException:
            await beginning.undo(client, sandbox)
            raise
        held = SyncSandbox(client, sandbox)
        self._runtime = K8sRemoteRuntime(held, logger=self.logger)
        if self._shared is not None:
            self._forgotten = weakref.finalize(self, _forgotten, held)
            self._forgotten.atexit = False  # the client's own end comes then

    async def _opened(self) -> SyncSandboxClient:
        if self._shared is not None:
            return self._shared
        self._client = SyncSandboxClient(self._config.client())
        await _in_thread(self._client.open)
        return self._client

    async def _let_go(self) -> None:
        self._runtime = None
        if self._forgotten is not None:
            self._forgotten.detach()
        client, self._client = self._client, None
        if client is not None and client.opened:
            await _in_thread(client.close)


async def _to_the_end(held: SyncSandbox) -> None:
    with anyio.CancelScope(shield=True):
        await held.sandbox.stop()


async def _in_thread(work: Callable[[], object]) -> None:
    """Run something that blocks, to its end. A cancellation meanwhile is delivered at the next await."""
    own_thread = anyio.CapacityLimiter(1)  # others may hold all that there are
    running = asyncio.ensure_future(anyio.to_thread.run_sync(work, limiter=own_thread))
    cancelled = False
    with anyio.CancelScope(shield=True):
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:  # asyncio's own, which no shield holds off
                cancelled = True
    task = asyncio.current_task()
    if cancelled and task is not None:
        task.uncancel()  # counted once, and `cancel` counts it again
        task.cancel()
    running.result()


def _forgotten(held: SyncSandbox) -> None:
    held.client.thread.post(lambda: stop_all([held.sandbox]))  # first: a warning may be an error
    warnings.warn(
        f"{held.sandbox} of a K8sDeployment was neither stopped nor detached", ResourceWarning, stacklevel=2
    )
