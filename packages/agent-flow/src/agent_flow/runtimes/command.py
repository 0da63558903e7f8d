"""`command`: repositories from plain folders, judged by a test command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.folder import make_folder
from agent_flow.environments.repository import build_repository
from agent_flow.errors import GraderError, PatchApplyError, TaskRowError
from agent_flow.protocols import CommandOutput, Environment, EnvironmentSpec, ProviderContext
from agent_flow.rollout import Verdict
from agent_flow.runtimes.rows import RepositoryRow, repository_row
from agent_flow.runtimes.unittest_log import TestState, machine_failed, read_report, unknown_tests
from agent_flow.task import Task, load_tasks

GRADER_VERSION = "command/1"
_APPLY_S = 60.0
_PATCHED_FILE = re.compile(r"^\+\+\+ b/(\S+)\.py$", re.MULTILINE)
_NOT_RUN = (126, 127)
"""Exit codes of a shell for a program that is not executable, or not there."""

_RESET_TESTS = r"""
set -eu
# The files that the test patch brings must be its own: what the agent wrote there is set back first.
git apply --numstat -z "$1" | while IFS= read -r -d '' row; do
  path="${row#*$'\t'}"; path="${path#*$'\t'}"
  if git cat-file -e "$2:$path" 2>/dev/null
  then git checkout --quiet "$2" -- "$path"
  else rm -rf -- "$path"
  fi
done
git apply --whitespace=nowarn "$1"
"""


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
        self._tasks_path = context.file.resolve(context.file.run.tasks.path)
        self._repos = context.file.resolve(config.repos)
        self._built = context.scratch / "repositories"
        self._rows: dict[str, RepositoryRow] = {}
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
        tasks = load_tasks(self._tasks_path)
        commits: dict[str, str] = {}
        for task in tasks:
            row = self._rows[task.instance_id] = repository_row(task)
            if row.repo not in commits:
                commits[row.repo] = self._build(task, row.repo)
            commit = commits[row.repo]
            if not commit.startswith(row.base_commit):
                raise TaskRowError(
                    f"base_commit is {row.base_commit}, but the files of {row.repo!r} give {commit}",
                    where=f"{task.where} ({task.instance_id})",
                    fix="put the files back, or write the new commit into the row",
                )
        return tasks

    def environment(self, task: Task) -> EnvironmentSpec:
        """The repository that was built for the task."""
        row = self._rows[task.instance_id]
        return EnvironmentSpec(repository=self._built / row.repo, base_commit=row.base_commit)

    def _build(self, task: Task, repo: str) -> str:
        source = (self._repos / repo).resolve()
        if not source.is_dir() or self._repos not in source.parents:
            raise TaskRowError(
                f"no folder {repo!r} below {self._repos}",
                where=f"{task.where} ({task.instance_id})",
                fix="set `repo` to the name of a folder of runtime.repos",
            )
        self._built.mkdir(parents=True, exist_ok=True)
        return build_repository(source, self._built / repo, repo)

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Base commit + patch + test patch, then the test command.

        The reward is 1.0 when every FAIL_TO_PASS and PASS_TO_PASS test passed, else 0.0.

        Raises:
            PatchApplyError: the agent's patch does not apply.
            GraderError: the test patch does not apply, or the report cannot be read.
            EnvError: the sandbox was lost.
        """
        row = self._rows[task.instance_id]
        await self._apply(environment, patch, task.instance_id, row)
        expected = (*row.FAIL_TO_PASS, *row.PASS_TO_PASS)
        command = self._config.test_command.replace("{tests}", shlex.join(expected))
        done = await environment.execute(
            ["bash", "-c", command], timeout_s=self._config.timeout_s, cwd=environment.workdir
        )
        report = done.stderr.decode("utf-8", "replace")
        output = done.stdout.decode("utf-8", "replace")
        log = f"$ {command}\n{report}" + (f"\n--- stdout ---\n{output}" if output else "")
        _check_run(done, self._config.timeout_s, log)
        _check_row(task.instance_id, row, unknown_tests(report, row.FAIL_TO_PASS), log)
        states = read_report(report, expected)
        unseen = [test for test, state in (states or {}).items() if state == "missing"]
        if states is None or unseen:
            by_machine = machine_failed(report)
            raise GraderError(
                "unreadable",
                f"no verdict for {', '.join(unseen) or 'any test'} (exit code {done.exit_code})",
                fault="infra" if by_machine else "agent",
                retryable=by_machine,
                evidence=log,
            )
        return Verdict(reward=_reward(states), log=log, tests=states)

    async def _apply(self, environment: Environment, patch: bytes, name: str, row: RepositoryRow) -> None:
        folder = await make_folder(environment)
        if patch:
            await environment.write(f"{folder}/agent.diff", patch)
            command = ["git", "apply", "--binary", "--whitespace=nowarn", f"{folder}/agent.diff"]
            done = await environment.execute(command, timeout_s=_APPLY_S, cwd=environment.workdir)
            if done.exit_code != 0:
                _check_git(done)
                raise PatchApplyError(
                    "patch_apply",
                    f"{name}: the agent's patch does not apply to {row.base_commit}",
                    fault="agent",
                    evidence=done.stderr.decode("utf-8", "replace"),
                )
        if row.test_patch:
            await environment.write(f"{folder}/test.diff", row.test_patch.encode())
            command = ["bash", "-c", _RESET_TESTS, "tests", f"{folder}/test.diff", row.base_commit]
            done = await environment.execute(command, timeout_s=_APPLY_S, cwd=environment.workdir)
            if done.exit_code != 0:
                _check_git(done)
                raise GraderError(
                    "test_patch",
                    f"{name}: the test patch does not apply",
                    fault="task",
                    evidence=done.stderr.decode("utf-8", "replace"),
                )


def _check_git(done: CommandOutput) -> None:
    """A git that is missing or did not come to its end says nothing about the patch."""
    if done.timed_out or done.exit_code in _NOT_RUN:
        evidence = done.stderr.decode("utf-8", "replace")
        raise GraderError("git", "git apply did not run to its end", retryable=True, evidence=evidence)


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


def _check_run(done: CommandOutput, limit_s: float, log: str) -> None:
    if done.timed_out:
        raise GraderError("timeout", f"the tests ran longer than {limit_s:g} s", fault="agent", evidence=log)
    if done.exit_code in _NOT_RUN:
        raise GraderError(
            "test_command",
            f"the test command cannot be run (exit code {done.exit_code}); look at runtime.test_command",
            fault="task",
            evidence=log,
        )


def _reward(states: Mapping[str, TestState]) -> float:
    return 1.0 if all(state == "passed" for state in states.values()) else 0.0
