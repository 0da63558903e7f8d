"""`e2b`: one sandbox per rollout and one per grading, from a service that speaks the E2B protocol.

The SDK is loaded by a session and not before, so that its configuration can be read without it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from agent_flow.config import Count, Seconds
from agent_flow.engines.endpoint import base_url, proxy_of, read_token
from agent_flow.environments.creation import creating
from agent_flow.environments.e2b_environment import E2bEnvironment, E2bHandle
from agent_flow.environments.identity import GIT_IDENTITY
from agent_flow.environments.stops import Stops
from agent_flow.errors import ConfigError, EnvCreateError, EnvError, UsageError, unwrapped
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext
from agent_flow.provider_module import failure

if TYPE_CHECKING:
    from agent_flow.environments.e2b_sandbox import E2bSandbox, E2bService

logger = logging.getLogger(__name__)

_STOP_S = 60.0
_START = "agent-flow.start"
"""Key of the metadata by which a sandbox is found whose start had no answer."""
_RENEWALS = 3
"""Of a lease, within its time."""


class E2bEnvironments:
    """Starts sandboxes of a template: the one that a task names as its image, or `template`."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[environment]` with `provider = "e2b"`."""

        api_key_file: Annotated[str, msgspec.Meta(examples=["e2b.key"])]
        """File with the service's API key alone."""
        template: str = ""
        """Name or id, for tasks that name none. A task's `image` is one, too."""
        domain: str = "e2b.app"
        """Of the service."""
        api_url: str = ""
        """Base URL of its control API. Empty: `https://api.` and the domain."""
        sandbox_url: str = ""
        """Base URL at which every sandbox is reached, for services without a name per sandbox. Empty: what
        `E2B_SANDBOX_URL` says, else by the domain."""
        use_proxies: bool = False
        """Go through the proxy that `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY` name for the control API, also
        to the sandboxes. Else no proxy is used, whatever they say."""
        user: str = ""
        """In whose name commands run. Empty: the template's."""
        workspace: str = ""
        """Folder in the sandbox for repositories that come from this machine: an absolute path. Empty: the
        user's home."""
        network: bool = False
        """Whether sandboxes may reach the internet."""
        env: Mapping[str, str] = {}
        """Of everything that runs in a sandbox, on top of the template's. No secrets: a model sees it."""
        lease_s: Count = 300
        """A sandbox ends by itself when its worker was silent for so long: the service's time-out, which is
        extended three times within it."""
        start_timeout_s: Seconds = 120.0
        """Of one start. Within it the service is asked again when it has no room or was asked too often."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._clock = context.clock
        self._where = f"{context.file.path} [environment]"
        self._key_file = context.file.resolve(config.api_key_file)
        self.run_id = context.clock.new_id()
        """What all sandboxes of this run have in their metadata."""
        try:
            self._api_url = base_url(config.api_url or f"https://api.{config.domain}")
            self._sandbox_url = base_url(config.sandbox_url) if config.sandbox_url else ""
        except UsageError as error:
            raise ConfigError(error.what, where=self._where, fix=error.fix) from error
        if config.workspace and not config.workspace.startswith("/"):
            raise ConfigError(
                f"workspace = {config.workspace!r} is not an absolute path",
                where=self._where,
                fix="begin it with a /, or leave it out for the user's home",
            )
        self._service: E2bService | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self.stops = Stops()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """A key that the service takes; while it is open, the leases of all sandboxes are extended.

        Raises:
            UsageError: the SDK is missing, there is no key, or the service does not take it.
        """
        try:
            key = read_token(self._key_file)
        except UsageError as error:
            raise ConfigError(error.what, where=self._where, fix=f"look into {error.where}") from error
        service = await anyio.to_thread.run_sync(self._load, key)
        try:
            await service.check()
        except EnvError as error:
            raise ConfigError(
                f"no sandboxes can be started: {error.message} ({error.evidence})",
                where=self._where,
                fix="look at api_key_file, domain and api_url",
            ) from error
        with unwrapped():
            async with anyio.create_task_group() as group:
                self._service, self._group = service, group
                try:
                    yield
                finally:
                    self._service = self._group = None
                    group.cancel_scope.cancel()

    def _load(self, key: str) -> E2bService:
        """Slow: the SDK takes a second to import."""
        try:
            from agent_flow.environments.e2b_sandbox import E2bService
        except ImportError as error:
            raise failure("environment provider 'e2b'", error, self._where) from error
        config = self._config
        return E2bService(
            api_key=key,
            domain=config.domain,
            api_url=self._api_url,
            sandbox_url=self._sandbox_url,
            proxy=proxy_of(self._api_url) if config.use_proxies else None,
            user=config.user,
        )

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A fresh sandbox; with a working copy of the repository unless that is in its template."""
        if self._service is None or self._group is None:
            raise EnvCreateError("client", "open was called outside session")
        template = spec.image or self._config.template
        if not template:
            raise EnvCreateError(
                "image", "the task names no image, and environment.template is empty", fault="task"
            )
        return self._open(self._service, self._group, spec, template)

    @asynccontextmanager
    async def _open(
        self, service: E2bService, group: anyio.abc.TaskGroup, spec: EnvironmentSpec, template: str
    ) -> AsyncGenerator[Environment]:
        with creating():
            sandbox = await self._create(service, spec, template)
        made = E2bEnvironment(sandbox, self._clock, api_url=self._api_url, purpose=spec.purpose)
        async with self._kept(group, made):
            with creating():
                await made.prepare(spec, template=template, workspace=self._config.workspace)
            yield made

    async def _create(self, service: E2bService, spec: EnvironmentSpec, template: str) -> E2bSandbox:
        config = self._config
        key = self._clock.new_id()
        named = {_START: key}
        start = partial(
            service.create,
            template,
            key=key,
            lease_s=config.lease_s,
            env={**GIT_IDENTITY, **config.env},
            metadata={"agent-flow.run": self.run_id, "agent-flow.purpose": spec.purpose, **named},
            network=config.network,
        )
        try:
            with anyio.move_on_after(config.start_timeout_s):
                return await start(timeout_s=config.start_timeout_s)
        except EnvError as error:
            if error.cause == "unreachable":
                await self._end_start(partial(self._end_unseen, service, start, named))
            elif error.retryable and error.cause != "rate_limit":
                await self._end_start(partial(service.end, named))
            raise
        except anyio.get_cancelled_exc_class():
            await self._end_start(partial(self._end_unseen, service, start, named))
            raise
        await self._end_start(partial(self._end_unseen, service, start, named))
        why = f"no sandbox of {template!r} within {config.start_timeout_s:g} s"
        raise EnvError("start", why, retryable=True)

    async def _end_unseen(
        self, service: E2bService, start: Callable[..., Awaitable[E2bSandbox]], named: Mapping[str, str]
    ) -> int:
        """A start that is on its way may be in no list yet: to ask for it again is to be told of it."""
        try:
            sandbox = await start(timeout_s=_STOP_S / 2, patient=False)
        except EnvError:
            return await service.end(named)
        await sandbox.kill()
        return 1

    async def _end_start(self, end: Callable[[], Awaitable[int]]) -> None:
        """End what came up of a start that was given up; nobody else would know of it."""
        with anyio.move_on_after(_STOP_S, shield=True):
            try:
                self.stops.done += await end()
            except EnvError as error:
                logger.warning("a sandbox whose start was given up may be left: %s", error)
            else:
                return
        self.stops.failed += 1

    @asynccontextmanager
    async def attach(self, handle: E2bHandle) -> AsyncGenerator[E2bEnvironment]:
        """The sandbox that its owner has left; stopped at the end of the block, unless it is left again.

        Whoever attached with the same handle before gets `fenced` from then on.

        Raises:
            EnvError: it is gone, or is of another service.
        """
        service, group = self._service, self._group
        if service is None or group is None:
            raise EnvError("client", "attach was called outside session")
        if handle.api_url != self._api_url:
            raise EnvError("attach", f"the sandbox is one of {handle.api_url}, not of {self._api_url}")
        sandbox = await service.connect(handle.sandbox_id, lease_s=self._config.lease_s)
        made = E2bEnvironment(
            sandbox, self._clock, api_url=self._api_url, purpose=handle.purpose, attached=handle
        )
        await made.take_over()
        async with self._kept(group, made):
            yield made

    @asynccontextmanager
    async def _kept(self, group: anyio.abc.TaskGroup, environment: E2bEnvironment) -> AsyncGenerator[None]:
        """Extend the lease while the block lasts; then stop the sandbox once, if it is still ours."""
        renewing = anyio.CancelScope()
        try:
            group.start_soon(self._renew, environment, renewing)
            yield
        finally:
            renewing.cancel()
            if not environment.detached:
                await self._stop(environment)

    async def _renew(self, environment: E2bEnvironment, renewing: anyio.CancelScope) -> None:
        lease_s = self._config.lease_s
        with renewing:
            while True:
                await anyio.sleep(lease_s / _RENEWALS)
                try:
                    await environment.renew(lease_s)
                except EnvError as error:
                    logger.warning("the lease of sandbox %s was not extended: %s", environment.id, error)
                    if error.cause == "lost":
                        return

    async def _stop(self, environment: E2bEnvironment) -> None:
        with anyio.move_on_after(_STOP_S, shield=True) as limit:
            try:
                await environment.stop()
            except EnvError as error:
                # It ends by itself with its lease; a finished rollout must not be lost over it.
                self.stops.failed += 1
                logger.warning("sandbox %s could not be stopped: %s", environment.id, error)
            else:
                self.stops.done += 1
        if limit.cancelled_caught:
            self.stops.failed += 1
            logger.warning("sandbox %s did not confirm its end within %g s", environment.id, _STOP_S)
