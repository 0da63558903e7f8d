"""`swebench`: rows in the form of swebench 5.x, graded in a sandbox of ours with swebench's own parsers."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import anyio.to_thread
import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.folder import make_folder
from agent_flow.errors import GraderError, TaskRowError
from agent_flow.protocols import CommandOutput, Environment, EnvironmentSpec, ProviderContext
from agent_flow.rollout import TestState, Verdict
from agent_flow.runtimes.build_log import build_failed, machine_broke
from agent_flow.runtimes.grading import NOT_RUN, Observation, apply_patch, running_test
from agent_flow.runtimes.repositories import Repositories
from agent_flow.runtimes.rows import repository_row
from agent_flow.runtimes.rules import LEFT_OUT, ruled_tasks
from agent_flow.runtimes.script import run_logged
from agent_flow.runtimes.swebench_log import LogReport, Swebench, TestSpec, load_swebench
from agent_flow.task import Task, load_tasks

WORKDIR = "/testbed"
"""Where every image of SWE-bench has its repository."""
CLASSIC_LACKS = ("image", "eval_script", "log_parser", "eval_type")
"""What swebench 5 wants of a row beyond the classic columns."""
_NOT_BY_PATCH = (None, 0, *NOT_RUN, 137)
"""Exit codes of a test command that found nothing wrong, is not there, or was killed (out of memory)."""
_IN_SCRIPT = re.compile(r"/testbed(?![\w.-])")


class SwebenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of swebench 5.x, beside those of `RepositoryRow`."""

    image: str
    eval_script: str
    log_parser: str
    eval_type: str
    version: str


class SwebenchRuntime:
    """Tasks in swebench 5.x form: the row's image, its eval script, and swebench's reading of the log."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[runtime]` with `provider = "swebench"`."""

        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
        """Limit of one run of an eval script; swebench's own default."""
        repos: str = ""
        """Folder with one folder per repository, plain files or a git clone, named as in the column `repo`
        (`owner/name`): the rows then run on these in sandboxes without images, and `/testbed` in an eval
        script becomes the working copy. Empty: the row's image has the repository."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._file = context.file
        self._swebench = load_swebench(f"{context.file.path} [runtime]")
        self._repositories = (
            Repositories(context.file.resolve(config.repos), context.scratch / "repositories")
            if config.repos
            else None
        )
        self._specs: dict[str, EnvironmentSpec] = {}

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"grader": f"swebench/{self._swebench.version}"}

    def load(self) -> tuple[Task, ...]:
        """Read and check every row.

        Raises:
            TaskRowError: a row is malformed, is a classic one, names an unknown parser, or needs images that
                are no container's.
        """
        tasks = ruled_tasks(self._file, self.read_tasks())
        for task in tasks:
            columns = _check_columns(task, self._swebench)
            row = repository_row(task)
            if self._repositories is None:
                spec = EnvironmentSpec(image=columns.image, workdir=WORKDIR, base_commit=row.base_commit)
            else:
                path = self._repositories.prepare(task, row)
                spec = EnvironmentSpec(repository=path, base_commit=row.base_commit)
            self._specs[task.instance_id] = spec
        return tasks

    def read_tasks(self) -> tuple[Task, ...]:
        """The rows of `tasks.path`; raises as `load_tasks` does."""
        return load_tasks(self._file.resolve(self._file.run.tasks.path))

    def environment(self, task: Task) -> EnvironmentSpec:
        """The row's image, or its repository of this machine."""
        return self._specs[task.instance_id]

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Apply the patch, run the eval script, read its log. Resolved: 1.0, else 0.0.

        Raises:
            PatchApplyError: the patch does not apply.
            GraderError: the log says nothing about the patch.
            EnvError: the sandbox was lost.
        """
        return (await self.observe(task, patch, environment)).verdict()

    async def observe(self, task: Task, patch: bytes, environment: Environment) -> Observation:
        """See `TestRunner.observe`."""
        spec = self._swebench.spec({**task.row, **_lists(task)})
        await apply_patch(environment, patch, task.instance_id, repository_row(task).base_commit)
        folder = await make_folder(environment)
        script, path, code = f"{folder}/eval.sh", f"{folder}/log", f"{folder}/exit_code"
        text = self._swebench.record_exit_code(self._script(task, spec, environment), code)
        await environment.write(script, text.encode())
        # The markers are on stderr (`set -x`): both streams are one log, as in swebench's own harness.
        done = await run_logged(
            environment, ["bash", script], path, timeout_s=self._config.timeout_s, cwd=environment.workdir
        )
        log = done.log
        if done.timed_out:
            return await self._out_of_time(spec, log)
        recorded = await environment.execute(["cat", code], timeout_s=60.0)
        report = await anyio.to_thread.run_sync(self._swebench.read, spec, log)
        return _contradicted(report, recorded, log) or judge(report, log)

    def _script(self, task: Task, spec: TestSpec, environment: Environment) -> str:
        script = spec.eval_script
        left_out = cast("tuple[str, ...]", task.row.get(LEFT_OUT, ()))
        if left_out:
            # Only pytest reads it; with other runners such a test is started all the same.
            options = shlex.join(f"--deselect={test}" for test in left_out)
            script = f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS-}} "{shlex.quote(options)}\n{script}'
        if self._repositories is None:
            return script
        return _IN_SCRIPT.sub(lambda _: environment.workdir, script)

    async def _out_of_time(self, spec: TestSpec, log: str) -> Observation:
        states = await anyio.to_thread.run_sync(self._swebench.read_cut, spec, log)
        running = running_test(log, states)
        what = f"the eval script ran longer than {self._config.timeout_s:g} s"
        said = f"{what}: {running} did not end" if running else what
        problem = GraderError("timeout", said, fault="agent", evidence=log)
        return Observation(states=states, log=log, timed_out=True, running=running, problem=problem)


def _contradicted(report: LogReport, recorded: CommandOutput, log: str) -> Observation | None:
    """What the shell wrote of the exit code outside of the log, against what the log says."""
    said = report.exit_code
    if said is None or recorded.stdout.decode("utf-8", "replace") == str(said):
        return None
    problem = GraderError(
        "contradiction",
        f"the log says that the test command's exit code is {said}, the shell does not",
        fault="agent",
        evidence=log,
    )
    return Observation(states=report.states, log=log, problem=problem)


def judge(report: LogReport, log: str) -> Observation:
    """What swebench's report of a log means here.

    swebench scores whatever it cannot read as unresolved. That stands where the log says that the code could
    not be built. Else it is no verdict: an infrastructure failure where the eval script did not come to its
    end, where the log shows a broken environment, or where the tests are said to be fine and are not in the
    log; evidence against nobody (fault `agent`: out of loss and baseline) where the test command failed
    without a word on its tests, or against its own log, as after a patch that prints results or markers.
    """
    if report.forged:
        forged = GraderError(
            "contradiction",
            f"the log has not exactly the eval script's own markers: {report.forged!r}",
            fault="agent",
            evidence=log,
        )
        return Observation(states=report.states, log=log, problem=forged)
    unseen = [test for test, state in report.states.items() if state == "missing"]
    failed = any(state == "failed" for state in report.states.values())
    machine = report.certain or machine_broke(log)
    if report.found and not (unseen and (machine or not failed)):
        return Observation(states=report.states, log=log, resolved=report.resolved)
    by_patch = report.ended and not machine and report.exit_code not in _NOT_BY_PATCH
    if by_patch and build_failed(log):
        failed_all: dict[str, TestState] = dict.fromkeys(report.states, "failed")
        return Observation(states=failed_all, log=log, resolved=False)
    problem = GraderError(
        "unreadable",
        _why(report, unseen),
        fault="agent" if by_patch else "infra",
        retryable=not by_patch,
        evidence=log,
    )
    return Observation(states=report.states, log=log, problem=problem)


def _why(report: LogReport, unseen: list[str]) -> str:
    if not (report.begun and report.ended):
        what = f"the eval script did not come to its {'end' if report.begun else 'tests'}"
    elif not report.found:
        what = "swebench finds no results in the log that it trusts"
    else:
        shown = ", ".join(unseen[:3]) + (" ..." if len(unseen) > 3 else "")
        what = f"{len(unseen)} of {len(report.states)} expected tests are not in the log: {shown}"
    code = "" if report.exit_code is None else f" (the test command's exit code: {report.exit_code})"
    return what + code + (f" ({report.signature})" if report.signature else "")


def _lists(task: Task) -> dict[str, object]:
    row = repository_row(task)
    return {"FAIL_TO_PASS": list(row.FAIL_TO_PASS), "PASS_TO_PASS": list(row.PASS_TO_PASS)}


def _check_columns(task: Task, swebench: Swebench) -> SwebenchRow:
    where = f"{task.where} ({task.instance_id})"
    missing = [name for name in CLASSIC_LACKS if not task.row.get(name)]
    if missing:
        raise TaskRowError(
            f"a classic SWE-bench row: swebench 5 needs the columns {', '.join(missing)} too",
            where=where,
            fix=f"agent-flow tasks convert {Path(task.where.rpartition(':')[0]).name} --out NEW.jsonl",
        )
    columns = task.columns(SwebenchRow, needs=f"{', '.join(CLASSIC_LACKS)} and version")
    if columns.log_parser not in swebench.parsers:
        near = difflib.get_close_matches(columns.log_parser, swebench.parsers, n=1)
        raise TaskRowError(
            f"swebench {swebench.version} has no log parser {columns.log_parser!r}",
            where=where,
            fix=f"did you mean {near[0]!r}?" if near else f"one of {', '.join(sorted(swebench.parsers))}",
        )
    if columns.eval_type not in swebench.eval_types:
        known = " or ".join(sorted(swebench.eval_types))
        raise TaskRowError(f"eval_type is {columns.eval_type!r}", where=where, fix=known)
    return columns
