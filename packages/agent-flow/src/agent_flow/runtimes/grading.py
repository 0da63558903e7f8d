"""What runtimes share: applying patches in a grader's sandbox, and what a run of the tests showed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from agent_flow.environments.base_commit import ATTRIBUTES
from agent_flow.environments.folder import make_folder
from agent_flow.errors import GraderError, PatchApplyError
from agent_flow.protocols import CommandOutput, Environment
from agent_flow.rollout import TestState, Verdict
from agent_flow.task import Task

APPLY_TIMEOUT_S = 60.0
NOT_RUN = (126, 127)
"""Exit codes of a shell for a program that is not executable, or not there."""

KILLED = (None, 137, -9)
"""Exit codes of a program that was killed; None without a time-out."""
_GIT_FATAL = 128
"""What git itself ends with on an error; above it are signals."""
_MACHINE = re.compile(
    r"(?:No space left on device|Cannot allocate memory|Out of memory.*|Disk quota exceeded"
    r"|Input/output error|Too many open files|Resource temporarily unavailable)\s*$",
    re.MULTILINE,
)
"""How a line of git or the shell ends that tells of the machine."""

_RESET_TESTS = r"""
set -euo pipefail
# The files that the test patch brings must be its own: what the agent wrote there is set back first, and
# so is a file or link of the agent's where the patch needs a folder.
git apply --numstat -z "$1" | while IFS= read -r -d '' row; do
  path="${row#*$'\t'}"; path="${path#*$'\t'}"
  rest="$path"; parent=""
  while [ "$rest" != "${rest#*/}" ]; do
    parent="$parent${rest%%/*}"; rest="${rest#*/}"
    if [ -L "$parent" ] || { [ -e "$parent" ] && [ ! -d "$parent" ]; }; then rm -f -- "$parent"; fi
    parent="$parent/"
  done
  if git cat-file -e "$2:$path" 2>/dev/null
  then
    if [ -d "$path" ] && [ ! -L "$path" ]; then rm -rf -- "$path"; fi
    git checkout --quiet "$2" -- "$path"
  else rm -rf -- "$path"
  fi
done
git apply --whitespace=nowarn "$1"
"""

_APPLIES_TO_BASE = r"""
set -eu
export GIT_INDEX_FILE="$3"
git read-tree "$2"
git apply --cached --check --whitespace=nowarn "$1"
"""

_CHECK_OUT = r"""
set -eu
mkdir "$1"
GIT_INDEX_FILE="$1.index" git --work-tree="$1" checkout --quiet "$2" -- .
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
    reward: float | None = None
    """What the grader gave. None: it knows right and wrong alone."""
    problem: GraderError | None = None
    """Why this is no verdict. None: it is one."""

    def verdict(self) -> Verdict:
        """The grader's own reward; else 1.0 if the task is resolved, 0.0 if not.

        Raises:
            GraderError: the run says nothing about the patch.
        """
        if self.problem is not None:
            raise self.problem
        reward = float(self.resolved) if self.reward is None else self.reward
        return Verdict(reward=reward, log=self.log, tests=self.states)


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


class Solver(Protocol):
    """A runtime whose tasks bring a program as their reference solution, not a patch."""

    async def solve(self, task: Task, environment: Environment) -> None:
        """Run it in an agent's environment.

        Raises:
            GraderError: the task brings none, or it did not come to its end.
            EnvError: the sandbox was lost.
        """
        ...


_APPLY = r"""
set -eu
# By a git directory of our own: the repository's attributes would convert line ends and keywords, and the
# patch holds the bytes that the agent left.
format=$(git rev-parse --show-object-format 2>/dev/null || echo sha1)
{
  git init --quiet --bare --template= --object-format="$format" "$1/git"
  mkdir -p "$1/git/info"
  printf '%s\n' "$2" > "$1/git/info/attributes"
} || exit 129  # as for a git that was ended: nothing was tried
GIT_DIR="$1/git" GIT_WORK_TREE="$PWD" exec git apply --binary --whitespace=nowarn "$1/agent.diff"
"""


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
    done = await _git(environment, ["bash", "-c", _APPLY, "apply", folder, ATTRIBUTES])
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
        GraderError: it does not apply, which is the row's fault if it does not apply to the base commit
            either, else the agent's; or git is missing or did not come to its end.
    """
    if not patch:
        return
    folder = await make_folder(environment)
    await environment.write(f"{folder}/test.diff", patch.encode())
    command = ["bash", "-c", _RESET_TESTS, "tests", f"{folder}/test.diff", base_commit]
    done = await _git(environment, command)
    if done.exit_code == 0:
        return
    paths = [f"{folder}/test.diff", base_commit, f"{folder}/index"]
    alone = await _git(environment, ["bash", "-c", _APPLIES_TO_BASE, "base", *paths])
    by_agent = alone.exit_code == 0
    over = " over the agent's" if by_agent else ""
    raise GraderError(
        "test_patch",
        f"{name}: the test patch does not apply{over}",
        fault="agent" if by_agent else "task",
        evidence=done.stderr.decode("utf-8", "replace"),
    )


async def check_out(environment: Environment, base_commit: str, folder: str) -> None:
    """Write the files of the base commit, without what patches changed, to a new folder.

    Raises:
        GraderError: git did not do it, which is nobody's fault but the sandbox's.
    """
    done = await _git(environment, ["bash", "-c", _CHECK_OUT, "base", folder, base_commit])
    if done.exit_code != 0:
        evidence = done.stderr.decode("utf-8", "replace")
        raise GraderError("git", f"git gave no {base_commit}", retryable=True, evidence=evidence)


async def _git(environment: Environment, command: Sequence[str]) -> CommandOutput:
    """A git that is missing, was killed or had no memory or space says nothing about the patch."""
    done = await environment.execute(command, timeout_s=APPLY_TIMEOUT_S, cwd=environment.workdir)
    evidence = done.stderr.decode("utf-8", "replace")
    code = done.exit_code
    cut = done.timed_out or code is None or code < 0 or code > _GIT_FATAL or code in NOT_RUN
    if cut or (code != 0 and _MACHINE.search(evidence)):
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
