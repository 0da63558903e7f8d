"""One inference server, as the router sees it."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking import GenerationRecord

from agent_flow.config import SamplingConfig

PauseMode = Literal["abort", "retract", "in_place"]
"""`abort`: running requests end with what they have. `retract`: they go back to the queue, without their KV
cache. `in_place`: they stay, with it. New requests wait in every mode until `resume`."""


class ReplicaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call to a server: a turn, or what is left of one."""

    rid: str
    """32 hex characters, new for each call: servers match ids of requests by prefix (SGLang's scheduler)."""
    prompt_ids: npt.NDArray[np.int32]
    """Shape `[n]`."""
    stop_ids: frozenset[int]
    sampling: SamplingConfig
    max_new_tokens: int
    """At least 1; clamped by the caller to what budget and context leave."""
    salt: str = ""
    """Prefix caches are shared among requests of one salt alone. Empty: among all."""
    session: str = ""
    """For routers in between: the same for all calls of one attempt of a rollout."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    weight_version: str
    """Its own text; `engines.version` reads it."""
    context_length: int
    """Prompt and completion together, in tokens."""
    kv_tokens: int | None
    """Tokens that its KV cache holds. None: it does not say."""
    model_path: str


class Replica(Protocol):
    """A client of one server. Safe for any number of calls at once."""

    address: str
    """Base URL."""

    async def info(self) -> ReplicaInfo:
        """Ask it; quick.

        Raises:
            EngineError: of all methods: no answer, a refusal, or an answer that cannot be true.
        """
        ...

    async def sample(self, request: ReplicaRequest) -> tuple[GenerationRecord, ...]:
        """Sample; see `Engine.generate`. The last finish reason is `abort` where somebody aborted it.

        Raises:
            EngineError: `partial` holds what had come; `retryable` is false for what would be refused again.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Abort one call; its `sample` returns what it has. An unknown id is no error."""
        ...

    async def abort_all(self) -> None:
        """The same for all."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def flush_cache(self) -> bool:
        """Empty the prefix cache. False: it was refused, since requests run."""
        ...

    async def update_from_disk(self, path: str, weight_version: str, *, flush_cache: bool) -> None:
        """Load other weights of the same shape."""
        ...
