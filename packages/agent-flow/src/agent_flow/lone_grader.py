"""A grader without a run around it: a configuration's runtime and sandboxes, without engine and agent."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NoReturn, cast

from token_tracking import Tokenizer

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.decoding import decode
from agent_flow.environments.test_surface import Policy
from agent_flow.errors import ProviderError
from agent_flow.flow import SweFlow
from agent_flow.protocols import Environment, EnvironmentProvider, ProviderContext, Runtime
from agent_flow.providers import load_environments, load_runtime
from agent_flow.rollout import Verdict
from agent_flow.runtimes.grader import Grader
from agent_flow.runtimes.grading import Observation, TestRunner
from agent_flow.scratch import scratch_folder
from agent_flow.task import Task


class LoneGrader:
    """Grades whole patches of a configuration's tasks as the flow `swe` does."""

    def __init__(
        self,
        runtime: Runtime,
        environments: EnvironmentProvider,
        *,
        tasks: tuple[Task, ...],
        test_files: Policy,
        test_configuration: Policy,
    ) -> None:
        self.tasks = tasks
        self.runtime = runtime
        self._grader = Grader(
            runtime, environments, test_files=test_files, test_configuration=test_configuration
        )

    async def grade(self, task: Task, patch: bytes) -> Verdict:
        """The verdict on a patch. What failed and can be tried again is tried once more, as in a run.

        Raises:
            EnvError: the sandbox failed.
            GraderError: no verdict was reached.
        """
        graded, _ = self._grader.graded_part(task, patch)
        return await self._grader.grade(task, graded)

    async def observe(self, task: Task, patch: bytes) -> Observation:
        """What a run of the tests shows; raises as `grade` does, but not for what the tests did."""
        runner = cast("TestRunner", self.runtime)
        graded, _ = self._grader.graded_part(task, patch)

        async def run(environment: Environment) -> Observation:
            seen = await runner.observe(task, graded, environment)
            if seen.problem is not None and seen.problem.fault != "agent":
                raise seen.problem
            return seen

        return await self._grader.in_fresh(task, run)

    def require_runner(self, file: ConfigFile) -> None:
        """Raises: ProviderError: the runtime gives verdicts only."""
        if not callable(inspect.getattr_static(self.runtime, "observe", None)):
            raise ProviderError(
                f"runtime {file.run.runtime.get('provider')!r} has no method `observe`, so its tasks cannot "
                "be checked",
                where=f"{file.path} [runtime]",
                fix="add it: see agent_flow.runtimes.grading.TestRunner",
            )


@asynccontextmanager
async def open_grader(file: ConfigFile, clock: Clock) -> AsyncGenerator[LoneGrader]:
    """Load the tasks and be ready to start sandboxes.

    Raises:
        UsageError: the configuration, a task or a provider cannot work.
    """
    with scratch_folder() as scratch:
        tokenizer = cast("Tokenizer", _NoTokenizer())
        context = ProviderContext(file=file, clock=clock, tokenizer=tokenizer, scratch=scratch)
        runtime = load_runtime(context)
        environments = load_environments(context)
        tasks = runtime.load()
        async with environments.session():
            flow = _flow(file)
            yield LoneGrader(
                runtime,
                environments,
                tasks=tasks,
                test_files=flow.test_files,
                test_configuration=flow.test_configuration,
            )


class _NoTokenizer:
    """Stands where a run has its tokenizer, which takes seconds to load and which no grading needs."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ProviderError(f"a runtime or environment asks for the tokenizer ({name}) while it only grades")


def _flow(file: ConfigFile) -> SweFlow.Config:
    """The flow's part in grading; a flow that is not `swe` takes nothing back but the tests of the task."""
    section = {key: value for key, value in file.run.flow.items() if key != "provider"}
    if file.run.flow.get("provider") != "swe":
        return SweFlow.Config()
    return decode(section, SweFlow.Config, where=file.where, section=("flow",))
