"""How a patch is graded: in a fresh sandbox, without what the agent did to the tests that judge it."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar, cast

import msgspec

from agent_flow.environments.named_tests import judging_files
from agent_flow.environments.test_surface import (
    Policy,
    Surface,
    changed_paths,
    surface_of,
    without_paths,
)
from agent_flow.errors import EnvError, GraderError
from agent_flow.protocols import Environment, EnvironmentProvider, Runtime
from agent_flow.rollout import Verdict
from agent_flow.task import Task

T = TypeVar("T")

_ATTEMPTS = 2


class GradersEnvironments(Protocol):
    """A runtime that can name sandboxes of its own for grading."""

    def graders_environments(self) -> EnvironmentProvider | None:
        """What starts them. None: what starts the agents' sandboxes does."""
        ...


def own_environments(runtime: Runtime) -> EnvironmentProvider | None:
    """The sandboxes that a runtime names for grading. None: those of the agents."""
    if not callable(inspect.getattr_static(runtime, "graders_environments", None)):
        return None
    return cast("GradersEnvironments", runtime).graders_environments()


class Grader:
    """Grades patches, each in a fresh sandbox; the policies are those of the flow `swe`."""

    def __init__(
        self,
        runtime: Runtime,
        environments: EnvironmentProvider,
        *,
        test_files: Policy,
        test_configuration: Policy,
    ) -> None:
        self.runtime = runtime
        self._agents = environments
        own = own_environments(runtime)
        self._environments = environments if own is None else own
        self._test_files: Policy = test_files
        self._test_configuration: Policy = test_configuration

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Open as long as sandboxes may be started, of agents or for grading.

        Raises:
            UsageError: no sandbox can be started.
        """
        async with self._agents.session():
            if self._environments is self._agents:
                yield
            else:
                async with self._environments.session():
                    yield

    def graded_part(self, task: Task, patch: bytes) -> tuple[bytes, int]:
        """The patch without the paths that the policies take back, and how many those are."""
        surface = task_surface(task, patch)
        taken_back = surface.reset(self._test_files, self._test_configuration)
        return without_paths(patch, taken_back), len(taken_back)

    async def grade(self, task: Task, graded: bytes) -> Verdict:
        """The verdict on what `graded_part` left of a patch.

        What failed and can be tried again is tried once more.

        Raises:
            EnvError: the sandbox failed.
            GraderError: no verdict was reached.
        """
        return await self.in_fresh(task, lambda environment: self.runtime.grade(task, graded, environment))

    async def in_fresh(self, task: Task, call: Callable[[Environment], Awaitable[T]]) -> T:
        """What `call` makes of a grader's sandbox; raises as `grade` does."""
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


def task_surface(task: Task, patch: bytes) -> Surface:
    """What of its judging a patch touches, by the task's test patch and by the tests that it names."""
    brought = patch_of_tests(task)
    named = _named_tests(task)
    if not named:
        return surface_of(patch, brought)
    judging = judging_files(named, changed_paths(patch), has_test_patch=bool(brought))
    return surface_of(patch, brought, judging)


def patch_of_tests(task: Task) -> bytes:
    """Of rows that have the column, as SWE-bench's do; else empty."""
    column = task.row.get("test_patch")
    return column.encode() if isinstance(column, str) else b""


def _named_tests(task: Task) -> list[str]:
    """Of rows about a repository, which have a base commit; else none.

    A column in another form is for the runtime to refuse, or to leave unread.
    """
    found: list[str] = []
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = task.row.get(column)
        if isinstance(value, str):  # as in SWE-bench's own data set
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
        if "base_commit" in task.row and isinstance(value, list | tuple):
            found += [test for test in cast("Sequence[object]", value) if isinstance(test, str)]
    return found
