"""`command`: repositories from plain folders, judged by a test command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.folder import make_folder
from agent_flow.errors import GraderError, TaskRowError
from agent_flow.protocols import CommandOutput, Environment, EnvironmentSpec, ProviderContext
from agent_flow.rollout import Verdict
from agent_flow.runtimes.grading import (
    KILLED,
    NOT_RUN,
    Observation,
    apply_patch,
    apply_test_patch,
    check_out,
    running_test,
)
from agent_flow.runtimes.repositories import Repositories
from agent_flow.runtimes.rows import RepositoryRow, repository_row
from agent_flow.runtimes.rules import ruled_tasks
from agent_flow.runtimes.unittest_log import (
    TestState,
    contradiction,
    finished,
    machine_failed,
    read_cut_report,
    read_report,
    unknown_tests,
)
from agent_flow.task import Task

GRADER_VERSION = "command/1"
_PATCHED_FILE = re.compile(r"^\+\+\+ b/(\S+)\.py$", re.MULTILINE)


class CommandRuntime:
    """Tasks of a JSON Lines file over folders of plain files, judged by a test command's report."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[runtime]` with `provider = "command"`."""

        repos: str
        """Folder that holds one folder of plain files per repository."""
        test_command: str
        """Run by bash in the repository; `{tests}` becomes the test ids."""
        log_parser: Literal["unittest"] = "unittest"
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
        """Limit of one test run."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._file = context.file
        self._repositories = Repositories(
            context.file.resolve(config.repos), context.scratch / "repositories"
        )
        self._specs: dict[str, EnvironmentSpec] = {}
        if "{tests}" not in config.test_command:
            raise TaskRowError(
                "runtime.test_command has no {tests}",
                where=str(context.file.path),
                fix="python3 -m unittest -v {tests}",
            )

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"grader": GRADER_VERSION, "grader_command": self._config.test_command}

    def load(self) -> tuple[Task, ...]:
        """Read the rows and build each repository once.

        Raises:
            TaskRowError: a row is malformed, its folder is missing, or its files do not give its base_commit.
        """
        tasks = ruled_tasks(self._file)
        for task in tasks:
            row = repository_row(task)
            path = self._repositories.prepare(task, row)
            self._specs[task.instance_id] = EnvironmentSpec(repository=path, base_commit=row.base_commit)
        return tasks

    def environment(self, task: Task) -> EnvironmentSpec:
        """The repository that was built for the task."""
        return self._specs[task.instance_id]

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Base commit + patch + test patch, then the test command.

        The reward is 1.0 when every FAIL_TO_PASS and PASS_TO_PASS test passed, else 0.0.

        Raises:
            PatchApplyError: the agent's patch does not apply.
            GraderError: the test patch does not apply, or the report cannot be read.
            EnvError: the sandbox was lost.
        """
        return (await self.observe(task, patch, environment)).verdict()

    async def observe(self, task: Task, patch: bytes, environment: Environment) -> Observation:
        """See `TestRunner.observe`."""
        row = repository_row(task)
        await apply_patch(environment, patch, task.instance_id, row.base_commit)
        await apply_test_patch(environment, row.test_patch, task.instance_id, row.base_commit)
        expected = (*row.FAIL_TO_PASS, *row.PASS_TO_PASS)
        command = self._config.test_command.replace("{tests}", shlex.join(expected))
        done = await environment.execute(
            ["bash", "-c", command], timeout_s=self._config.timeout_s, cwd=environment.workdir
        )
        report = done.stderr.decode("utf-8", "replace")
        output = done.stdout.decode("utf-8", "replace")
        log = f"$ {command}\n{report}" + (f"\n--- stdout ---\n{output}" if output else "")
        if done.timed_out:
            return _out_of_time(report, expected, self._config.timeout_s, log)
        if not finished(report):
            _check_killed(done, log)
            if done.exit_code in NOT_RUN:
                await self._check_command(command, row, environment, log)
        _check_row(task.instance_id, row, unknown_tests(report, row.FAIL_TO_PASS), log)
        states = read_report(report, expected) or dict.fromkeys(expected, "missing")
        return Observation(
            states=states,
            log=log,
            resolved=all(state == "passed" for state in states.values()),
            problem=_unreadable(report, states, done.exit_code, log),
        )

    async def _check_command(
        self, command: str, row: RepositoryRow, environment: Environment, log: str
    ) -> None:
        """Code under test can leave with a shell's exit code: the row is wrong if its base gives it too."""
        pristine = f"{await make_folder(environment)}/base"
        await check_out(environment, row.base_commit, pristine)
        done = await environment.execute(
            ["bash", "-c", command], timeout_s=self._config.timeout_s, cwd=pristine
        )
        if done.exit_code in NOT_RUN:
            raise GraderError(
                "test_command",
                f"the test command cannot be run (exit code {done.exit_code}); look at runtime.test_command",
                fault="task",
                evidence=log,
            )


def _check_row(name: str, row: RepositoryRow, unknown: Sequence[str], log: str) -> None:
    """A test that is not there although the test patch has just brought its file is the row's mistake."""
    brought = set(_PATCHED_FILE.findall(row.test_patch))
    mistyped = [
        test
        for test in unknown
        if any(f"{test.replace('.', '/')}/".startswith(f"{file}/") for file in brought)
    ]
    if mistyped:
        raise GraderError(
            "no_such_test",
            f"{name}: FAIL_TO_PASS names {mistyped[0]}, which the test patch does not bring",
            fault="task",
            evidence=log,
        )


def _check_killed(done: CommandOutput, log: str) -> None:
    if done.exit_code in KILLED:
        raise GraderError(
            "killed",
            f"the test process was killed before it came to its end (exit code {done.exit_code})",
            retryable=True,
            evidence=log,
        )


def _out_of_time(report: str, expected: Sequence[str], limit_s: float, log: str) -> Observation:
    states = read_cut_report(report, expected)
    running = running_test(report, states)
    what = f"the tests ran longer than {limit_s:g} s"
    return Observation(
        states=states,
        log=log,
        timed_out=True,
        running=running,
        problem=GraderError(
            "timeout", f"{what}: {running} did not end" if running else what, fault="agent", evidence=log
        ),
    )


def _unreadable(
    report: str, states: Mapping[str, TestState], exit_code: int | None, log: str
) -> GraderError | None:
    unseen = [test for test, state in states.items() if state == "missing"]
    by_machine = machine_failed(report)
    told = "" if by_machine else contradiction(report, list(states), exit_code)
    if told:
        return GraderError(
            "contradiction", f"the report contradicts itself: {told}", fault="agent", evidence=log
        )
    if not unseen:
        return None
    named = "any test" if len(unseen) == len(states) else ", ".join(unseen)
    return GraderError(
        "unreadable",
        f"no verdict for {named} (exit code {exit_code})",
        fault="infra" if by_machine else "agent",
        retryable=by_machine,
        evidence=log,
    )
