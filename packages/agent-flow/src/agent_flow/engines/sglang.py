"""`sglang`: SGLang servers that run already, behind a router. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Literal

import msgspec
from token_tracking import GenerationRecord
from token_tracking.sample import Scalar, Source

from agent_flow.config import Count, Seconds
from agent_flow.engines.endpoint import base_url
from agent_flow.engines.router import EngineRouter, RouterConfig
from agent_flow.engines.sglang_replica import SglangReplica
from agent_flow.engines.sglang_request import check_sampling
from agent_flow.engines.version import VersionReader
from agent_flow.errors import UsageError
from agent_flow.protocols import GenerateRequest, ProviderContext
from agent_flow.task import Task


class SglangEngine:
    """Every turn is sampled by one of the servers, or by several where one fails; see `EngineRouter`."""

    class Config(RouterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[engine]` with `provider = "sglang"`."""

        addresses: Annotated[
            tuple[str, ...], msgspec.Meta(min_length=1, examples=[["http://127.0.0.1:30000"]])
        ]
        """Base URL of every server. All serve one model with one context length."""
        token_file: str = ""
        """File with the servers' API key (`--api-key`) alone. Empty: they ask for none."""
        ca_file: str = ""
        """PEM file of the authorities that signed the certificates of https servers. Empty: the system's."""
        use_proxies: bool = False
        """Go through the proxies that `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY` name."""
        session_header: str = ""
        """Header that tells a router in front of the servers which calls belong to one rollout, such as
        `X-SMG-Routing-Key` for sgl-router. Empty: none."""
        stream_interval: Count = 32
        """Tokens after which a server sends what it has. What it sampled since is lost if it dies."""
        logprob_kind: Literal["processed", "raw"] = "processed"
        """`raw`: the servers run with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`, and log-probabilities are those
        before temperature."""
        silence_timeout_s: Seconds = 600.0
        """A server that sends nothing of an answer for so long has failed. A paused one sends nothing."""

    source: Source = "sampled"

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._file = context.file
        self._vocab_size = context.tokenizer.vocab_size
        check_sampling(context.file.run.sampling, context.file.where(("sampling",)))
        self._versions = VersionReader(config.policy_run)
        self._replicas = [self._replica(place, address) for place, address in enumerate(config.addresses)]
        known = [replica.address for replica in self._replicas]
        for place, address in enumerate(known):
            if address in known[:place]:
                raise UsageError(
                    f"{address} stands there twice",
                    where=self._file.where(("engine", "addresses", place)),
                    fix="name each server once",
                )
        self.router = EngineRouter(self._replicas, self._versions, config, context.clock)
        """Which takes replicas in and out while the session is open, and knows what was counted."""
        self._stack: AsyncExitStack | None = None

    def check(self, tasks: Sequence[Task]) -> None:
        """Any task will do."""

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Connections to all servers, each of which was asked what it serves.

        Raises:
            UsageError: a file of the configuration cannot be read, a server does not answer, or they do not
                agree; says which and what to do.
        """
        async with AsyncExitStack() as stack:
            for replica in self._replicas:
                await stack.enter_async_context(replica)
            try:
                await stack.enter_async_context(self.router.session())
            except UsageError as error:
                raise UsageError(error.what, where=self._where(error.where), fix=error.fix) from error
            self._stack = stack
            try:
                yield
            finally:
                self._stack = None

    async def add(self, address: str) -> None:
        """A further server; it gets calls as soon as it reports the current weights.

        Raises:
            UsageError: not a base URL, one that is there already, or no session is open.
        """
        if self._stack is None:
            raise UsageError("a server can only be added while the session is open", where=address)
        self.router.add(await self._stack.enter_async_context(self._replica(None, address)))

    async def remove(self, address: str) -> None:
        """Take a server out; its turns go on elsewhere. Returns when no call runs there any more.

        Raises:
            UsageError: there is no server with this address.
        """
        await self.router.remove(base_url(address))

    async def generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        """Sample one turn; see `Engine` and `EngineRouter.generate`."""
        return await self.router.generate(request)

    async def abort(self, rollout_id: str) -> None:
        """End the turns of a rollout with what there is; see `EngineRouter.abort`."""
        await self.router.abort(rollout_id)

    def stats(self) -> dict[str, int]:
        """What was counted since the start, by name; see `EngineRouter.stats`.

        `unknown_weights`: how often weights were named that are no version of this policy run.
        """
        return {**self.router.stats(), "unknown_weights": sum(self._versions.unknown.values())}

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"engine": "sglang", **self.router.describe()}

    def _replica(self, place: int | None, address: str) -> SglangReplica:
        config = self._config
        where = address if place is None else self._file.where(("engine", "addresses", place))
        try:
            return SglangReplica(
                address,
                versions=self._versions,
                token_file=self._file.resolve(config.token_file) if config.token_file else None,
                ca_file=self._file.resolve(config.ca_file) if config.ca_file else None,
                trust_env=config.use_proxies,
                session_header=config.session_header,
                stream_interval=config.stream_interval,
                logprob_kind=config.logprob_kind,
                vocab_size=self._vocab_size,
                silence_timeout_s=config.silence_timeout_s,
            )
        except UsageError as error:
            raise UsageError(error.what, where=where, fix=error.fix) from error

    def _where(self, key: str) -> str:
        """A key of this section as `file:line`."""
        return self._file.where(("engine", key))
