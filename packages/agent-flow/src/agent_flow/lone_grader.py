"""A grader without a run around it: a configuration's runtime and sandboxes, without engine and agent."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NoReturn, cast

from token_tracking import Tokenizer

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.decoding import decode
from agent_flow.environments.base_commit import MIB, BaseCommits
from agent_flow.environments.patch import capture_patch
from agent_flow.environments.test_surface import Policy
from agent_flow.errors import GraderError, ProviderError
from agent_flow.flow import SweFlow
from agent_flow.protocols import Environment, EnvironmentProvider, ProviderContext, Runtime
from agent_flow.providers import load_environments, load_runtime
from agent_flow.rollout import Verdict
from agent_flow.runtimes.grader import Grader
from agent_flow.runtimes.grading import Observation, Solver, TestRunner
from agent_flow.runtimes.rows import tested_row
from agent_flow.scratch import scratch_folder
from agent_flow.task import Task

logger = logging.getLogger(__name__)


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
        bases: BaseCommits,
        max_patch_bytes: int,
    ) -> None:
        self.tasks = tasks
        self.runtime = runtime
        self.bases = bases
        self._max_patch_bytes = max_patch_bytes
        self._environments = environments
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
        """What a run of the tests shows; raises as `grade` does, but not for what the tests did.

        A run whose problem is not the agent's, so that it may be the machine's, is made once more.
        """
        runner = cast("TestRunner", self.runtime)
        graded, _ = self._grader.graded_part(task, patch)
        seen: list[Observation] = []

        async def run(environment: Environment) -> Observation:
            seen.append(await runner.observe(task, graded, environment))
            problem = seen[-1].problem
            if problem is not None and problem.fault != "agent":
                raise problem
            return seen[-1]

        try:
            return await self._grader.in_fresh(task, run)
        except GraderError as error:
            if not seen or error is not seen[-1].problem:
                raise
            return seen[-1]

    def session(self) -> AbstractAsyncContextManager[None]:
        """Open as long as sandboxes may be started; see `Grader.session`."""
        return self._grader.session()

    async def reference(self, task: Task) -> bytes:
        """The patch that solves a task: the row's, or what its program changed in an agent's sandbox.

        Raises:
            EnvError: that sandbox failed.
            GraderError: the program did not come to its end, or changed nothing; or the patch is larger than
                an agent's may be.
        """
        if not callable(inspect.getattr_static(self.runtime, "solve", None)):
            patch = tested_row(task).patch.encode()
            self._check_size(len(patch))
            return patch
        spec = self.runtime.environment(task)
        async with self._environments.open(spec) as environment:
            base = await self.bases.prepare(environment, spec)
            await cast("Solver", self.runtime).solve(task, environment)
            captured = await capture_patch(environment, base, max_patch_bytes=sys.maxsize)
        self._check_size(len(captured.patch))
        if captured.left_out:
            said = ", ".join(f"{entry.path} ({entry.reason})" for entry in captured.left_out[:3])
            count = sum(captured.left_out_counts.values())
            logger.warning("%s: the reference patch leaves out %d files: %s", task.instance_id, count, said)
        if not captured.patch:
            why = "the reference program changed nothing that a patch can hold in"
            raise GraderError("solution", f"{why} {environment.workdir}", fault="task")
        return captured.patch

    def _check_size(self, size: int) -> None:
        if size > self._max_patch_bytes:
            allowed = f"the {self._max_patch_bytes} that flow.max_patch_mib allows"
            raise GraderError(
                "patch_too_large", f"the reference patch has {size} bytes, more than {allowed}", fault="task"
            )

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
        flow = _flow(file)
        grader = LoneGrader(
            runtime,
            environments,
            tasks=tasks,
            test_files=flow.test_files,
            test_configuration=flow.test_configuration,
            bases=BaseCommits(scratch / "bases", max_file_bytes=int(flow.max_file_mib * MIB)),
            max_patch_bytes=int(flow.max_patch_mib * MIB),
        )
        async with grader.session():
            yield grader


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
