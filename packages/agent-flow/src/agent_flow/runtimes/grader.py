"""How a patch is graded: in a fresh sandbox, without what the agent did to the tests that judge it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from agent_flow.environments.test_surface import Policy, surface_of, without_paths
from agent_flow.errors import EnvError, GraderError
from agent_flow.protocols import Environment, EnvironmentProvider, Runtime
from agent_flow.rollout import Verdict
from agent_flow.task import Task

T = TypeVar("T")

_ATTEMPTS = 2


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
        self._environments = environments
        self._test_files: Policy = test_files
        self._test_configuration: Policy = test_configuration

    def graded_part(self, task: Task, patch: bytes) -> tuple[bytes, int]:
        """The patch without the paths that the policies take back, and how many those are."""
        surface = surface_of(patch, patch_of_tests(task))
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


def patch_of_tests(task: Task) -> bytes:
    """Of rows that have the column, as SWE-bench's do; else empty."""
    column = task.row.get("test_patch")
    return column.encode() if isinstance(column, str) else b""
