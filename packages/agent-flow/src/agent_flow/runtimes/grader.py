"""A grader without a run around it: a configuration's runtime and sandboxes, without engine and agent."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NoReturn, TypeVar, cast

import msgspec
from token_tracking import Tokenizer

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.decoding import decode
from agent_flow.environments.test_surface import surface_of, without_paths
from agent_flow.errors import EnvError, GraderError, ProviderError
from agent_flow.flow import SweFlow
from agent_flow.protocols import Environment, EnvironmentProvider, ProviderContext, Runtime
from agent_flow.providers import load_environments, load_runtime
from agent_flow.rollout import Verdict
from agent_flow.runtimes.grading import Observation, TestRunner
from agent_flow.scratch import scratch_folder
from agent_flow.task import Task

T = TypeVar("T")

_ATTEMPTS = 2


class Grader:
    """Grades patches, each in a fresh sandbox, and as the flow `swe` does: without what it takes back."""

    def __init__(
        self,
        tasks: tuple[Task, ...],
        runtime: Runtime,
        environments: EnvironmentProvider,
        flow: SweFlow.Config,
    ) -> None:
        self.tasks = tasks
        self.runtime = runtime
        self._environments = environments
        self._flow = flow

    async def grade(self, task: Task, patch: bytes) -> Verdict:
        """The verdict on a patch. What failed and can be tried again is tried once more, as in a run.

        Raises:
            EnvError: the sandbox failed.
            GraderError: no verdict was reached.
        """
        graded = self._without_test_surface(task, patch)
        return await self._fresh(task, lambda environment: self.runtime.grade(task, graded, environment))

    async def observe(self, task: Task, patch: bytes) -> Observation:
        """What a run of the tests shows; raises as `grade` does, but not for what the tests did."""
        runner = cast("TestRunner", self.runtime)
        graded = self._without_test_surface(task, patch)

        async def run(environment: Environment) -> Observation:
            seen = await runner.observe(task, graded, environment)
            if seen.problem is not None and seen.problem.fault != "agent":
                raise seen.problem
            return seen

        return await self._fresh(task, run)

    def _without_test_surface(self, task: Task, patch: bytes) -> bytes:
        column = task.row.get("test_patch")
        surface = surface_of(patch, column.encode() if isinstance(column, str) else b"")
        return without_paths(patch, surface.reset(self._flow.test_files, self._flow.test_configuration))

    def require_runner(self, file: ConfigFile) -> None:
        """Raises: ProviderError: the runtime gives verdicts only."""
        if not callable(inspect.getattr_static(self.runtime, "observe", None)):
            raise ProviderError(
                f"runtime {file.run.runtime.get('provider')!r} has no method `observe`, so its tasks cannot "
                "be checked",
                where=f"{file.path} [runtime]",
                fix="add it: see agent_flow.runtimes.grading.TestRunner",
            )

    async def _fresh(self, task: Task, call: Callable[[Environment], Awaitable[T]]) -> T:
        spec = msgspec.structs.replace(self.runtime.environment(task), purpose="grader")
        attempt = 1
        while True:
            try:
                async with self._environments.open(spec) as environment:
                    return await call(environment)
            except (EnvError, GraderError) as error:
                if not error.retryable or attempt == _ATTEMPTS:
                    raise
            attempt += 1


@asynccontextmanager
async def open_grader(file: ConfigFile, clock: Clock) -> AsyncGenerator[Grader]:
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
            yield Grader(tasks, runtime, environments, _flow(file))


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
