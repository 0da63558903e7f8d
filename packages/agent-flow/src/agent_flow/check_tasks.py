"""Are tasks worth training on? No patch must fail, the reference patch must pass, every time.

A flaky test makes the reward noise (SWE-bench/SWE-smith#26): it is found by running the tests several times,
named, and left out of the verdict. The same for a test that hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import anyio
import msgspec

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.errors import EnvError, GraderError, PatchApplyError, TaskRowError, UsageError, unwrapped
from agent_flow.lone_grader import LoneGrader, open_grader
from agent_flow.reward_thread import contained
from agent_flow.rollout import TestState
from agent_flow.runtimes.grading import Observation
from agent_flow.runtimes.rows import TestedRow, tested_row
from agent_flow.runtimes.rules import Rules, TaskRule, row_digest, with_tests
from agent_flow.stage import raised_at
from agent_flow.task import Task

logger = logging.getLogger(__name__)

Listener = Callable[[Task, TaskRule], None]
"""Told of each task when it is known whether it is accepted."""


async def check_tasks(file: ConfigFile, runs: int, *, clock: Clock, listener: Listener) -> Rules:
    """Run every task's tests `runs` times without a patch and `runs` times with its reference patch.

    `tasks.rules` of the configuration is not looked at. `worker.max_rollouts` sandboxes run at a time.

    Raises:
        UsageError: the configuration, a task or a provider cannot work.
    """
    tasks = msgspec.structs.replace(file.run.tasks, rules="")
    file = msgspec.structs.replace(file, run=msgspec.structs.replace(file.run, tasks=tasks))
    async with open_grader(file, clock) as grader:
        grader.require_runner(file)
        rules: dict[str, TaskRule] = {}
        slots = anyio.CapacityLimiter(file.run.worker.max_rollouts)

        # Rows are read before the first sandbox starts.
        checks = {task.instance_id: _Check(task, grader, slots, runs) for task in grader.tasks}

        async def check(task: Task) -> None:
            rules[task.instance_id] = await checks[task.instance_id].rule()
            listener(task, rules[task.instance_id])

        with unwrapped():
            async with anyio.create_task_group() as group:
                for task in grader.tasks:
                    group.start_soon(check, task)
        ordered = {task.instance_id: rules[task.instance_id] for task in grader.tasks}
        return Rules(runs=runs, grader=grader.runtime.describe(), tasks=ordered)


class _Rejected(Exception):  # noqa: N818
    """Why a task is no good."""


class _Check:
    """The check of one task."""

    def __init__(self, task: Task, grader: LoneGrader, slots: anyio.CapacityLimiter, runs: int) -> None:
        self._task = task
        self._row: TestedRow = tested_row(task)
        self._grader = grader
        self._slots = slots
        self._runs = runs
        self._digest = row_digest(task)
        self._hanging: list[str] = []
        self._flaky: list[str] = []

    async def rule(self) -> TaskRule:
        """What was found out.

        Raises:
            UsageError: no task can be checked like that.
        """
        verdict: Literal["accepted", "rejected", "undecided"] = "accepted"
        reason = ""
        counting: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        try:
            counting = await contained(self._counting())
        except _Rejected as error:
            verdict, reason = "rejected", str(error)
        except (EnvError, GraderError) as error:
            verdict, reason = ("rejected" if error.fault == "task" else "undecided"), str(error)
        except TaskRowError as error:
            verdict, reason = "rejected", str(error)
        except UsageError:
            raise
        except Exception as error:
            # As in the worker: what a task or its provider raises is its own, and the others go on.
            logger.exception("task %s could not be checked", self._task.instance_id)
            verdict, reason = "undecided", ": ".join(raised_at(error))
        return TaskRule(
            verdict=verdict,
            reason=reason,
            row=self._digest,
            FAIL_TO_PASS=counting[0],
            PASS_TO_PASS=counting[1],
            flaky=tuple(self._flaky),
            hanging=tuple(self._hanging),
        )

    async def _counting(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tests that count: those that fail without a patch, and those that must go on passing."""
        async with self._slots:
            reference = await self._grader.reference(self._task)
        if not reference:
            raise _Rejected("the row has no reference patch")
        solved = await self._solved_runs(reference)
        unsolved = await self._run_many(b"", self._runs)
        self._compare_rewards(solved, "with the reference patch")
        self._compare_rewards(unsolved, "without a patch")
        fail_to_pass = [test for test in self._row.FAIL_TO_PASS if test not in self._hanging]
        pass_to_pass = [test for test in self._row.PASS_TO_PASS if test not in self._hanging]
        self._flaky += [
            test
            for test in (*fail_to_pass, *pass_to_pass)
            if _mixed(_seen(test, solved)) or _mixed(_seen(test, unsolved))
        ]
        steady = [test for test in (*fail_to_pass, *pass_to_pass) if test not in self._flaky]
        broken = [test for test in steady if "passed" not in _seen(test, solved)]
        if broken:
            said = next((f": {run.problem}" for run in solved if run.problem is not None), "")
            raise _Rejected(f"the reference patch fails {_list(broken)} in every run{said}")
        _check_verdicts(unsolved)
        failing = tuple(test for test in fail_to_pass if test in steady and _fails(_seen(test, unsolved)))
        if not failing:
            raise _Rejected(f"no stable failing test: {self._why_none(steady)}")
        return failing, tuple(test for test in steady if test not in failing)

    def _compare_rewards(self, runs: Sequence[Observation], which: str) -> None:
        """Where a grader gives rewards, it is they that must not change."""
        rewards = [run.reward for run in runs if run.problem is None and run.reward is not None]
        if len(set(rewards)) > 1:
            left = (*self._row.FAIL_TO_PASS, *self._row.PASS_TO_PASS)
            self._flaky += [test for test in left if test not in (*self._flaky, *self._hanging)]
            spread = f"{min(rewards):g} to {max(rewards):g}"
            raise _Rejected(f"rewards differ from run to run: {spread} in {len(rewards)} runs {which}")

    def _why_none(self, steady: Sequence[str]) -> str:
        kinds = {
            "flaky": [test for test in self._row.FAIL_TO_PASS if test in self._flaky],
            "hanging": [test for test in self._row.FAIL_TO_PASS if test in self._hanging],
            "passing without a patch": [test for test in self._row.FAIL_TO_PASS if test in steady],
        }
        return "; ".join(f"{_list(tests)} {kind}" for kind, tests in kinds.items() if tests)

    async def _solved_runs(self, patch: bytes) -> list[Observation]:
        """As many runs with the reference patch as asked for that came to their end.

        A run that hangs names a test; that test is left out and the run is made again.
        """
        ended: list[Observation] = []
        while len(ended) < self._runs:
            try:
                seen = await self._run_many(patch, self._runs - len(ended))
            except PatchApplyError as error:
                raise _Rejected("the reference patch does not apply") from error
            for run in seen:
                if run.problem is not None and run.problem.fault != "agent":
                    raise run.problem
            ended += [run for run in seen if not run.timed_out]
            hung = [run for run in seen if run.timed_out]
            new = {run.running for run in hung} - {"", *self._hanging}
            if hung and not new:
                raise _Rejected(
                    f"hangs although {_list(self._hanging)} is left out"
                    if self._hanging
                    else "hangs with the reference patch, and the log does not say in which test"
                )
            self._hanging += sorted(new)
        return ended

    async def _run_many(self, patch: bytes, count: int) -> list[Observation]:
        """Runs of what is not known to hang."""
        left = [
            tuple(test for test in tests if test not in self._hanging)
            for tests in (self._row.FAIL_TO_PASS, self._row.PASS_TO_PASS)
        ]
        if not left[0]:
            raise _Rejected(f"no stable failing test: {_list(self._hanging)} hanging")
        task = with_tests(self._task, left[0], left[1], tuple(self._hanging))
        seen: list[Observation] = []

        async def run() -> None:
            async with self._slots:
                seen.append(await self._grader.observe(task, patch))

        with unwrapped():
            async with anyio.create_task_group() as group:
                for _ in range(count):
                    group.start_soon(run)
        return seen


def _check_verdicts(unsolved: Sequence[Observation]) -> None:
    """Whether a run could give a 0 to one who solved nothing.

    An agent that makes the tests unreadable is not looked at here: without its patch they can be read.

    Raises:
        _Rejected: no run without a patch came to a verdict, for one reason.
        GraderError: one did not, which says nothing of the task.
    """
    problems = [run.problem for run in unsolved]
    ours = [problem for problem in problems if problem is not None and problem.fault != "agent"]
    timed_out = all(run.timed_out for run in unsolved)
    same = len(ours) == len(unsolved) and len({problem.cause for problem in ours}) == 1
    if timed_out or (same and ours[0].fault != "task"):
        said = next((str(problem) for problem in problems if problem is not None), "out of time")
        raise _Rejected(
            f"no run without a patch comes to a verdict, so that who solves nothing gets no 0: {said}"
        )
    if ours:
        raise ours[0]


def _seen(test: str, runs: Iterable[Observation]) -> set[TestState]:
    """The states of a test over runs.

    A test that was under way when time was up failed; of those that had not begun by then nothing is known.
    """
    states: set[TestState] = set()
    for run in runs:
        state = run.states[test]
        if run.timed_out and state == "missing":
            if run.running == test:
                states.add("failed")
        else:
            states.add(state)
    return states


def _fails(states: set[TestState]) -> bool:
    return bool(states) and "passed" not in states


def _mixed(states: set[TestState]) -> bool:
    return "passed" in states and len(states) > 1


def _list(tests: Sequence[str]) -> str:
    return ", ".join(tests[:3]) + (f" and {len(tests) - 3} more" if len(tests) > 3 else "")
