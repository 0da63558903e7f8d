"""The parts of a run that every rollout shares: engine, flow, templates, and how they make a rollout."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from token_tracking import Conversation
from token_tracking.sample import Scalar

from agent_flow.config import SamplingConfig
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_engine, load_flow
from agent_flow.rollout import Mode, Rollout
from agent_flow.task import Task
from agent_flow.templates import Templates


class Parts:
    """Built from a configuration; nothing is started before `session`.

    Raises:
        UsageError: a provider or its configuration cannot work.
    """

    def __init__(self, context: ProviderContext) -> None:
        self.flow = load_flow(context)
        self.engine = load_engine(context)
        self.templates = Templates(context, self.flow.tools)
        self.sampling: SamplingConfig = context.file.run.sampling

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Open as long as rollouts run."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.engine.session())
            await stack.enter_async_context(self.flow.session())
            yield

    def new_rollout(
        self, task: Task, mode: Mode, rollout_id: str, group_id: str, member: int, attempt: int
    ) -> Rollout:
        """An attempt at a task, before its first step."""
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            member=member,
            attempt=attempt,
            task=task,
            mode=mode,
            conversation=Conversation(self.templates.of(task)),
        )

    def provenance(self, rollout: Rollout) -> dict[str, Scalar]:
        """What produced a rollout."""
        return {
            **self.engine.describe(),
            **self.flow.describe(),
            **self.templates.describe(),
            **rollout.produced_by,
            "mode": rollout.mode,
            "exit_status": rollout.exit_status,
            "ungraded": "" if rollout.ungraded is None else rollout.ungraded.reason,
        }
