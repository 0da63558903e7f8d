"""`none`: no engine, for evaluations whose agent brings a model of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec
from token_tracking import GenerationRecord
from token_tracking.sample import Scalar, Source

from agent_flow.errors import ConfigError, EngineError
from agent_flow.protocols import GenerateRequest, ProviderContext
from agent_flow.task import Task


class NoEngine:
    """Samples nothing: whoever asks it for a turn gets an error."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[engine]` with `provider = "none"`."""

    source: Source = "sampled"

    def __init__(self, config: Config, context: ProviderContext) -> None:
        if context.mode == "train":
            raise ConfigError(
                "there is nothing to train on without an engine",
                where=context.file.where(("engine", "provider")),
                fix="engine.provider = 'sglang'; 'none' is for agent-flow eval",
            )

    def check(self, tasks: Sequence[Task]) -> None:
        """Any task will do."""

    def session(self) -> AbstractAsyncContextManager[None]:
        """Nothing is held open."""
        return nullcontext()

    async def generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "none", "the flow or its agent asked for a turn, and [engine] is 'none'", fault="task"
        )

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"engine": "none"}
