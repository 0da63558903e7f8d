"""The parts of a run that every rollout shares: engine, flow, templates, and how they make a rollout."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime

import numpy as np
from token_tracking import Conversation
from token_tracking.sample import NOT_SAMPLED, UNKNOWN_VERSION, Scalar

from agent_flow.config import SamplingConfig
from agent_flow.protocols import Engine, ProviderContext
from agent_flow.providers import load_engine, load_flow
from agent_flow.rollout import Mode, Rollout
from agent_flow.task import Task
from agent_flow.templates import Templates


class Parts:
    """Built from a configuration; nothing is started before `session`.

    Raises:
        UsageError: a provider or its configuration cannot work.
    """

    def __init__(self, context: ProviderContext, engine: Engine | None = None) -> None:
        """`engine` takes the place of the configuration's; see `replay_run`."""
        self.flow = load_flow(context)
        self.engine = load_engine(context) if engine is None else engine
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
        self,
        task: Task,
        mode: Mode,
        rollout_id: str,
        group_id: str,
        member: int,
        attempt: int,
        *,
        now: datetime | None = None,
    ) -> Rollout:
        """An attempt at a task, before its first step. `now`: what the chat template prints as the date.

        The rollout has the task to itself: a flow that changes its row changes no other attempt's.
        """
        template = self.templates.of(task)
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            member=member,
            attempt=attempt,
            task=task.fresh(),
            mode=mode,
            conversation=Conversation(template if now is None else template.at(now)),
        )

    def provenance(self, rollout: Rollout) -> dict[str, Scalar]:
        """What produced a rollout. A part that does not say what it is stands as `not said`."""
        return {
            **dict.fromkeys(_SAID, "not said"),
            **self.engine.describe(),
            **self.flow.describe(),
            **self.templates.describe(rollout.conversation.template),
            **rollout.produced_by,
            "weight_versions": weight_versions(rollout.conversation),
            "mode": rollout.mode,
            "exit_status": rollout.exit_status,
            "ungraded": "" if rollout.ungraded is None else rollout.ungraded.reason,
        }


_SAID = ("engine", "environment", "grader")


def weight_versions(conversation: Conversation) -> str:
    """The versions that sampled a conversation, such as `4,5`; `unknown` where the engine does not say."""
    found: set[int] = set()
    for branch in conversation.branches:
        found.update(np.unique(branch.ledger.versions).tolist())
    found.discard(NOT_SAMPLED)
    return ",".join("unknown" if version == UNKNOWN_VERSION else str(version) for version in sorted(found))
