"""What runtimes share: applying patches in a grader's sandbox, and what a run of the tests showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from agent_flow.environments.folder import make_folder
from agent_flow.errors import GraderError, PatchApplyError
from agent_flow.protocols import CommandOutput, Environment
from agent_flow.rollout import TestState, Verdict
from agent_flow.task import Task

APPLY_TIMEOUT_S = 60.0
NOT_RUN = (126, 127)
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


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a task's tests showed, whether or not it is a verdict."""

    states: Mapping[str, TestState]
    """Every test that the task names. `missing`: the log says nothing of it."""
    log: str
    timed_out: bool = False
    running: str = ""
    """The test that had begun and not ended when time was up. Empty: none, or the log does not say."""
    resolved: bool = False
    """Every test that counts passed."""
    problem: GraderError | None = None
    """Why this is no verdict. None: it is one."""

    def verdict(self) -> Verdict:
        """Reward 1.0 if the task is resolved, else 0.0.

        Raises:
            GraderError: the run says nothing about the patch.
        """
        if self.problem is not None:
            raise self.problem
        return Verdict(reward=1.0 if self.resolved else 0.0, log=self.log, tests=self.states)


class TestRunner(Protocol):
    """A runtime that says what it saw, which is more than a verdict: `check-tasks` needs one."""

    __test__ = False  # for pytest, which collects classes whose name begins so

    async def observe(self, task: Task, patch: bytes, environment: Environment) -> Observation:
        """Run the task's tests on a patch in a fresh environment. An empty patch: on the base commit.

        Raises:
            GraderError: the tests could not be run at all.
            EnvError: the sandbox was lost.
        """
        ...


async def apply_patch(environment: Environment, patch: bytes, name: str, base_commit: str) -> None:
    """Apply the agent's patch to the repository. Empty: nothing is done.

    Raises:
        PatchApplyError: it does not apply.
        GraderError: git is missing or did not come to its end.
    """
    if not patch:
        return
    folder = await make_folder(environment)
    await environment.write(f"{folder}/agent.diff", patch)
    command = ["git", "apply", "--binary", "--whitespace=nowarn", f"{folder}/agent.diff"]
    done = await _git(environment, command)
    if done.exit_code != 0:
        raise PatchApplyError(
            "patch_apply",
            f"{name}: the agent's patch does not apply to {base_commit}",
            fault="agent",
            evidence=done.stderr.decode("utf-8", "replace"),
        )


async def apply_test_patch(environment: Environment, patch: str, name: str, base_commit: str) -> None:
    """Set the files of the test patch back to the base commit, then apply it. Empty: nothing is done.

    Raises:
        GraderError: it does not apply, which is the row's fault; or git is missing.
    """
    if not patch:
        return
    folder = await make_folder(environment)
    await environment.write(f"{folder}/test.diff", patch.encode())
    command = ["bash", "-c", _RESET_TESTS, "tests", f"{folder}/test.diff", base_commit]
    done = await _git(environment, command)
    if done.exit_code != 0:
        raise GraderError(
            "test_patch",
            f"{name}: the test patch does not apply",
            fault="task",
            evidence=done.stderr.decode("utf-8", "replace"),
        )


async def _git(environment: Environment, command: Sequence[str]) -> CommandOutput:
    """A git that is missing or did not come to its end says nothing about the patch."""
    done = await environment.execute(command, timeout_s=APPLY_TIMEOUT_S, cwd=environment.workdir)
    if done.timed_out or done.exit_code in NOT_RUN:
        evidence = done.stderr.decode("utf-8", "replace")
        raise GraderError("git", "git apply did not run to its end", retryable=True, evidence=evidence)
    return done


def running_test(log: str, states: Mapping[str, TestState]) -> str:
    """The test that a cut log was about: the last one named in it of which it says no result.

    Runners that print a test's name before they start it: unittest and Django with `-v`, pytest with `-v`,
    `go test -v`. Empty: no such line.
    """
    unseen = [test for test, state in states.items() if state == "missing"]
    for line in reversed(log.splitlines()[-50:]):
        words = {word.strip("().") for word in line.split()}
        named = [test for test in unseen if test in words or test in line.strip()]
        if named:
            return max(named, key=len)
    return ""
