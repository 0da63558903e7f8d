"""`swe`: an agent works on a repository in a sandbox, and its patch is graded in a fresh one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.patch import capture_patch
from agent_flow.errors import EnvError, GraderError
from agent_flow.outcome import outcome_of
from agent_flow.protocols import Model, ProviderContext
from agent_flow.providers import load_agent, load_environments, load_runtime
from agent_flow.rollout import Rollout
from agent_flow.task import Task

_GRADER_ATTEMPTS = 2
PATCH = "patch.diff"


class SweFlow:
    """The flow of software engineering: agent, environment and runtime are those of the configuration."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[flow]` with `provider = "swe"`, which is what a file without `[flow]` has."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._runtime = load_runtime(context)
        self._environments = load_environments(context)
        self._agent = load_agent(context)
        self.tools: tuple[Mapping[str, object], ...] = self._agent.tools

    def load(self) -> tuple[Task, ...]:
        """The runtime's tasks."""
        return self._runtime.load()

    def session(self) -> AbstractAsyncContextManager[None]:
        """Open as long as sandboxes may be started."""
        return self._environments.session()

    def describe(self) -> dict[str, Scalar]:
        """What goes into a sample's provenance."""
        return {**self._agent.describe(), **self._runtime.describe()}

    async def preprocess(self, rollout: Rollout) -> None:
        """Nothing: repositories and templates were made ready before the first rollout."""

    async def generate(self, rollout: Rollout, model: Model) -> None:
        """Run the agent in a sandbox of its own, then take its patch.

        Raises:
            RolloutError: engine, sandbox, agent or patch capture failed.
        """
        spec = self._runtime.environment(rollout.task)
        async with self._environments.open(spec) as environment:
            rollout.produced_by.update(environment.describe())
            result = await self._agent.run(rollout.task, model, environment)
            rollout.exit_status = result.exit_status
            rollout.messages = result.messages
            try:
                rollout.artifacts[PATCH] = await capture_patch(environment, spec)
            except GraderError as error:
                if error.fault != "agent":
                    raise
                rollout.ungraded = error

    async def reward(self, rollout: Rollout) -> None:
        """Apply the outcome table; grade where it says so.

        A patch that cannot be judged is evidence (no reward, out of loss and baseline) when the patch itself
        is the cause, and an error when the infrastructure is.

        Raises:
            RolloutError: the infrastructure failed twice.
        """
        outcome = outcome_of(rollout.exit_status, rollout.mode)
        rollout.status = outcome.status
        rollout.in_loss = outcome.in_loss
        rollout.in_baseline = outcome.in_baseline
        rollout.reward = outcome.reward
        if not outcome.evaluate:
            return
        try:
            if rollout.ungraded is None:
                await self._grade(rollout)
        except GraderError as error:
            if error.fault != "agent":
                raise
            rollout.ungraded = error
        if rollout.ungraded is not None:
            rollout.status = "failed"
            rollout.in_loss = rollout.in_baseline = False

    async def _grade(self, rollout: Rollout) -> None:
        spec = msgspec.structs.replace(self._runtime.environment(rollout.task), purpose="grader")
        patch = rollout.artifacts[PATCH]
        for attempt in range(1, _GRADER_ATTEMPTS + 1):
            try:
                async with self._environments.open(spec) as environment:
                    rollout.verdict = await self._runtime.grade(rollout.task, patch, environment)
            except (EnvError, GraderError) as error:
                if not error.retryable or attempt == _GRADER_ATTEMPTS:
                    raise
            else:
                rollout.reward = rollout.verdict.reward
                return
