"""`swe`: an agent works on a repository in a sandbox, and its patch is graded in a fresh one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import anyio
import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.base_commit import MIB, Base, BaseCommits
from agent_flow.environments.patch import capture_patch
from agent_flow.environments.test_surface import Policy
from agent_flow.errors import GraderError, RolloutError
from agent_flow.outcome import leave_ungraded, settle
from agent_flow.protocols import Environment, Model, ProviderContext
from agent_flow.providers import load_agent, load_environments, load_runtime
from agent_flow.rollout import Rollout
from agent_flow.runtimes.grader import Grader, task_surface
from agent_flow.stage import opening, waiting_for
from agent_flow.task import Task

PATCH = "patch.diff"
LEFT_OUT = "left_out.json"
SURFACE = "test_surface.json"
ABORTED, OUT_OF_TIME = "Aborted", "TimeExceeded"
"""Words of the outcome table."""


class SweFlow:
    """The flow of software engineering: agent, environment and runtime are those of the configuration."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[flow]` with `provider = "swe"`, which is what a file without `[flow]` has."""

        max_file_mib: Annotated[float, msgspec.Meta(gt=0)] = 4.0
        """A file above this that the agent made or changed is no part of its patch; `left_out.json` names
        it."""
        max_patch_mib: Annotated[float, msgspec.Meta(gt=0)] = 32.0
        """A larger patch is not graded: evidence only."""
        test_files: Policy = "reset"
        """What the agent wrote into files of the tests that judge, which the task's test patch brings or its
        row names: `reset` takes it out of the patch that is graded, `flag` only counts it."""
        test_configuration: Policy = "flag"
        """The same for conftest.py, pytest.ini, jest.config.js and their like."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._bases = BaseCommits(context.scratch / "bases", max_file_bytes=int(config.max_file_mib * MIB))
        self._runtime = load_runtime(context)
        self._environments = load_environments(context)
        self._grader = Grader(
            self._runtime,
            self._environments,
            test_files=config.test_files,
            test_configuration=config.test_configuration,
        )
        self._agent = load_agent(context)
        self.tools: tuple[Mapping[str, object], ...] = self._agent.tools

    def load(self) -> tuple[Task, ...]:
        """The runtime's tasks."""
        return self._runtime.load()

    def session(self) -> AbstractAsyncContextManager[None]:
        """Open as long as sandboxes may be started."""
        return self._grader.session()

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
        async with opening(self._environments.open(spec)) as environment:
            rollout.produced_by.update(environment.describe())
            with waiting_for("the base commit"):
                base = await self._bases.prepare(environment, spec)
            rollout.produced_by.update(base.describe())
            await self._run(rollout, model, environment)
            try:
                await self._capture(rollout, environment, base)
            except GraderError as error:
                if error.fault != "agent":
                    raise
                rollout.ungraded = error

    async def _run(self, rollout: Rollout, model: Model, environment: Environment) -> None:
        result = None
        limit_s = rollout.task.time_limit_s
        with anyio.move_on_after(limit_s) as limit:
            try:
                result = await self._agent.run(rollout.task, model, environment)
            except RolloutError:
                if not limit.cancel_called:
                    raise
        # An agent may keep the cancellation to itself, as an abort does.
        if limit.cancel_called and (result is None or result.exit_status == ABORTED):
            rollout.exit_status = OUT_OF_TIME
        elif result is not None:
            rollout.exit_status = result.exit_status
        if result is not None:
            rollout.messages = result.messages
            rollout.produced_by.update(result.produced_by)

    async def _capture(self, rollout: Rollout, environment: Environment, base: Base) -> None:
        captured = await capture_patch(
            environment, base, max_patch_bytes=int(self._config.max_patch_mib * MIB)
        )
        surface = task_surface(rollout.task, captured.patch)
        rollout.artifacts[PATCH] = captured.patch
        rollout.produced_by.update(surface.counters())
        rollout.produced_by["left_out"] = sum(captured.left_out_counts.values())
        if captured.left_out:
            left_out = {"counts": captured.left_out_counts, "files": captured.left_out}
            rollout.artifacts[LEFT_OUT] = msgspec.json.format(msgspec.json.encode(left_out))
        if surface:
            rollout.artifacts[SURFACE] = surface.to_json()

    async def reward(self, rollout: Rollout) -> None:
        """Apply the outcome table; grade where it says so.

        A patch that cannot be judged is evidence (no reward, out of loss and baseline) when the patch itself
        is the cause, and an error when the infrastructure is.

        Raises:
            RolloutError: the infrastructure failed twice.
        """
        if not settle(rollout):
            return
        if rollout.ungraded is not None:
            leave_ungraded(rollout, rollout.ungraded)
            return
        try:
            await self._grade(rollout)
        except GraderError as error:
            if error.fault != "agent":
                raise
            leave_ungraded(rollout, error)

    async def _grade(self, rollout: Rollout) -> None:
        graded, taken_back = self._grader.graded_part(rollout.task, rollout.artifacts[PATCH])
        rollout.produced_by["surface_reset"] = taken_back
        rollout.verdict = await self._grader.grade(rollout.task, graded)
        rollout.reward = rollout.verdict.reward
