"""`harbor`: Harbor's task folders, graded in a fresh sandbox by what the agent changed in the work folder.

Harbor runs `tests/test.sh` in the agent's own container, which it leaves as the agent left it. Here no grader
sees a rollout's sandbox: the changes to the work folder are taken as a patch against what lay there at the
start (a git repository in the image or not), applied in a fresh sandbox of the same image, and the tests are
put in only then. So what an agent does elsewhere is lost: packages it installs, files outside of the work
folder, what still runs; and in the folder `.git`, and what a `.gitignore` names (a rollout's `left_out.json`
lists that). A task that hangs on such things cannot be solved here, and `agent-flow check-tasks` finds it:
its solution goes the same way and fails. Images need git and bash. What a folder asks for beyond that is
honoured, or an error at the start (`harbor_task`); sandboxes, their size and network are those of
`[environment]`.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import msgspec
from token_tracking.sample import Scalar

from agent_flow.config import WorkerConfig
from agent_flow.environments.folder import make_folder
from agent_flow.errors import GraderError, TaskRowError
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext
from agent_flow.rollout import Verdict
from agent_flow.runtimes.build_log import machine_broke
from agent_flow.runtimes.grading import KILLED, NOT_RUN, Observation, apply_patch
from agent_flow.runtimes.harbor_task import (
    EnvironmentTable,
    HarborTask,
    check_workdir,
    digest_of,
    of_each,
    read_tasks,
)
from agent_flow.runtimes.image_names import check_image_name, image_of
from agent_flow.runtimes.reward_file import LARGEST, read_reward
from agent_flow.runtimes.rules import ruled_tasks
from agent_flow.runtimes.script import LOOK_S, ScriptRun, ended_by_signal, not_fetched, run_logged
from agent_flow.task import Task

logger = logging.getLogger(__name__)

GRADER_VERSION = "harbor/1"
TEST = "tests/test.sh"
"""The one test of every task: the reward says no more."""
_START = "the work folder as it was at the start"
_READY = r"""
set -eu
mkdir -p "$1/logs/agent" "$1/logs/verifier" "$1/logs/artifacts"
rm -f "$1/logs/verifier/reward.txt" "$1/logs/verifier/reward.json"
"""


class HarborRuntime:
    """Tasks of a folder in Harbor's format, judged by the reward that their `tests/test.sh` writes."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[runtime]` with `provider = "harbor"`; `tasks.path` is a folder of tasks, or one task."""

        image: str = ""
        """Image of tasks without `environment.docker_image`, such as one that you built of its Dockerfile;
        `{instance_id}` becomes the folder's name in lower case. Empty: such a task is an error."""
        workdir: str = ""
        """Work folder of tasks that say none, by `environment.workdir` or `WORKDIR` in their Dockerfile."""
        reward: str = ""
        """Which number of a reward.json with several is the reward. Empty: several are no verdict."""
        timeout_multiplier: Annotated[float, msgspec.Meta(gt=0)] = 1.0
        """Every task's time-outs times this, for machines that are slower than its author's."""
        solve_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
        """Limit of a reference solution in `check-tasks`, where the task has none for agents."""
        repos: str = ""
        """Folder with a folder for each task, named alike: what its work folder holds at the start. The tasks
        then run on copies of these in sandboxes without images; the work folder, `/tests`, `/solution` and
        `/logs` in files of `tests/` and `solution/` become paths of the sandbox; the instruction stays as it
        is. Empty: the image has it."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._file = context.file
        check_image_name(config.image, context.file, "registry/{instance_id}:latest")
        self._repos = context.file.resolve(config.repos) if config.repos else None
        self._folders: dict[str, HarborTask] = {}
        self._specs: dict[str, EnvironmentSpec] = {}

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"grader": GRADER_VERSION}

    def load(self) -> tuple[Task, ...]:
        """Read every folder.

        Raises:
            TaskRowError: some are malformed, have no image or work folder, or want what is not done here.
        """
        path = self._file.resolve(self._file.run.tasks.path)
        folders = tuple(
            msgspec.structs.replace(folder, workdir=_without_end(folder.workdir or self._config.workdir))
            for folder in read_tasks(path)
        )
        self._folders = {folder.name: folder for folder in folders}
        specs = of_each(folders, self._spec, where=str(path))
        self._specs = dict(zip(self._folders, specs, strict=True))
        _warn(folders, self._file.run.worker, self._config.timeout_multiplier)
        return ruled_tasks(self._file, tuple(self._task(folder) for folder in folders))

    def _task(self, folder: HarborTask) -> Task:
        digest = folder.digest
        if self._repos is not None:
            digest = f"{digest} {digest_of(self._repos / folder.name)}"
        row = {"instance_id": folder.name, "digest": digest, "FAIL_TO_PASS": (TEST,), "PASS_TO_PASS": ()}
        limit_s = folder.table.agent.timeout_sec
        return Task(
            instance_id=folder.name,
            problem_statement=folder.instruction,
            row={**row, "problem_statement": folder.instruction},
            where=folder.where,
            time_limit_s=None if limit_s is None else limit_s * self._config.timeout_multiplier,
        )

    def _spec(self, folder: HarborTask) -> EnvironmentSpec:
        check_workdir(folder)
        if self._repos is not None:
            return EnvironmentSpec(repository=self._source(folder, self._repos), plain=True)
        image = image_of(self._config.image, folder.name)
        image = folder.table.environment.docker_image or image
        if not image:
            raise TaskRowError(
                "environment.docker_image is not said, and environment/Dockerfile is not built here",
                where=folder.where,
                fix="runtime.image = 'registry/{instance_id}:latest', after you have built and pushed them",
            )
        return EnvironmentSpec(image=image, workdir=folder.workdir, plain=True)

    def _source(self, folder: HarborTask, repos: Path) -> Path:
        if not (repos / folder.name).is_dir():
            raise TaskRowError(
                f"no folder {folder.name!r} below {repos}",
                where=folder.where,
                fix="put there what the task's work folder holds at the start",
            )
        return repos / folder.name

    def environment(self, task: Task) -> EnvironmentSpec:
        """The task's image and work folder, or its files of this machine."""
        return self._specs[task.instance_id]

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Apply the patch, put the tests in, run them, read their reward.

        Raises:
            PatchApplyError: the patch does not apply.
            GraderError: there is no reward (never a reward of 0).
            EnvError: the sandbox was lost.
        """
        return (await self.observe(task, patch, environment)).verdict()

    async def observe(self, task: Task, patch: bytes, environment: Environment) -> Observation:
        """See `TestRunner.observe`. The one test passed if the reward is at least `eval.pass_reward`."""
        folder = self._folders[task.instance_id]
        verifier = folder.table.verifier
        await apply_patch(environment, patch, task.instance_id, _START)
        root = await self._ready(environment)
        test = await self._put(folder, TEST, environment, root)
        limit_s = verifier.timeout_sec * self._config.timeout_multiplier
        done = await run_logged(
            environment,
            ["env", *_assignments(verifier.env), *test],
            f"{await make_folder(environment)}/log",  # not in /logs: tests may empty that
            timeout_s=limit_s,
            cwd=environment.workdir,
        )
        if done.timed_out:
            problem = GraderError(
                "timeout", f"{TEST} ran longer than {limit_s:g} s", fault="agent", evidence=done.log
            )
            return _unjudged(done.log, problem, timed_out=True)
        try:
            reward = read_reward(
                await _content(environment, f"{root}/logs/verifier/reward.txt"),
                await _content(environment, f"{root}/logs/verifier/reward.json"),
                key=self._config.reward,
            )
        except GraderError as error:
            what = f"{error.message} ({TEST} ended with exit code {done.exit_code})"
            problem = GraderError(error.cause, what, retryable=error.retryable, evidence=done.log)
            return _unjudged(done.log, problem)
        passed = reward >= self._file.run.eval.pass_reward
        broken = _broken(done, passed=passed)
        if broken:
            what = f"{broken} ({TEST} ended with exit code {done.exit_code} and a reward of {reward:g})"
            problem = GraderError("unreadable", what, retryable=True, evidence=done.log)
            return _unjudged(done.log, problem)
        state = "passed" if passed else "failed"
        return Observation(states={TEST: state}, log=done.log, resolved=passed, reward=reward)

    async def solve(self, task: Task, environment: Environment) -> None:
        """See `Solver.solve`: `solution/solve.sh`, whose exit code says nothing, as in Harbor."""
        folder = self._folders[task.instance_id]
        if folder.solution is None:
            raise GraderError("solution", "the task has no solution/solve.sh", fault="task")
        root = await self._ready(environment)
        solve = await self._put(folder, "solution/solve.sh", environment, root)
        done = await run_logged(
            environment,
            [
                "env",
                "DEBIAN_FRONTEND=noninteractive",
                *_assignments(folder.table.solution.env),
                *solve,
            ],
            f"{await make_folder(environment)}/log",
            timeout_s=task.time_limit_s or self._config.solve_timeout_s * self._config.timeout_multiplier,
            cwd=environment.workdir,
        )
        if done.timed_out:
            what = "solution/solve.sh did not end in time"
            raise GraderError("solution", what, fault="task", evidence=done.log)
        if done.exit_code in KILLED:
            raise GraderError("solution", "solution/solve.sh was killed", retryable=True, evidence=done.log)

    async def _ready(self, environment: Environment) -> str:
        """What `/tests`, `/solution` and `/logs` lie below. Empty: they are where Harbor has them."""
        root = "" if self._repos is None else await make_folder(environment)
        made = await environment.execute(["sh", "-c", _READY, "ready", root], timeout_s=LOOK_S)
        if made.exit_code != 0:
            evidence = made.stderr.decode("utf-8", "replace")
            raise GraderError(
                "folders", "there is no room for /logs in the sandbox", fault="image", evidence=evidence
            )
        return root

    async def _put(
        self, folder: HarborTask, script: str, environment: Environment, root: str
    ) -> tuple[str, ...]:
        """Put `tests` or `solution` into the sandbox; returns the command that runs its script."""
        part = script.partition("/")[0]
        places: dict[str, str] = {}
        if root:
            places = {path: f"{root}{path}" for path in ("/tests", "/solution", "/logs")}
            places[folder.workdir] = environment.workdir
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / part
            await anyio.to_thread.run_sync(_copy, folder.path / part, source, places)
            await environment.upload(source, f"{root}/{part}")
        named = (folder.path / script).read_bytes().startswith(b"#!")
        return (f"{root}/{script}",) if named else ("bash", f"{root}/{script}")  # as a shell in bash does it


def _copy(source: Path, target: Path, places: Mapping[str, str]) -> None:
    """A copy with every file executable that ends in `.sh`, and other paths in its texts."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    found = re.compile(rf"(?<![\w./}}-])(?:{'|'.join(map(re.escape, places))})(?![\w.-])") if places else None
    for path in target.rglob("*"):
        if not path.is_file():
            continue
        if path.suffix == ".sh":
            path.chmod(path.stat().st_mode | 0o755)
        if found is not None:
            data = path.read_bytes()
            if b"\0" in data:
                continue  # no text
            text = data.decode("utf-8", "surrogateescape")
            new = found.sub(lambda match: places[match[0]], text)
            if new != text:
                path.write_bytes(new.encode("utf-8", "surrogateescape"))


def _broken(done: ScriptRun, *, passed: bool) -> str:
    """Why a reward is none: the tests did not come to their end. Empty: it is one.

    Where it passes, what the log says of the machine was of no consequence.
    """
    code = done.exit_code
    if code in KILLED or (passed and ended_by_signal(code)):
        return "the tests were killed"
    if passed:
        return ""
    if code in NOT_RUN:
        return "the tests were not run to their end"
    if machine_broke(done.log):
        return "memory or space ran out"
    return "the tests could not fetch what they need" if not_fetched(done.log) else ""


def _without_end(workdir: str) -> str:
    """`/app/` is `/app`."""
    return workdir if workdir == "/" else workdir.removesuffix("/")


def _assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


async def _content(environment: Environment, path: str) -> bytes | None:
    """The beginning of a file; None: there is no such file."""
    command = ["sh", "-c", 'test -f "$1" || exit 66; head -c "$2" "$1"', "read", path, str(LARGEST + 1)]
    done = await environment.execute(command, timeout_s=LOOK_S)
    if done.exit_code == 66:
        return None
    if done.exit_code != 0:
        evidence = done.stderr.decode("utf-8", "replace")
        raise GraderError("reward_unreadable", f"{path} cannot be read", retryable=True, evidence=evidence)
    return done.stdout


def _unjudged(log: str, problem: GraderError, *, timed_out: bool = False) -> Observation:
    running = TEST if timed_out else ""
    return Observation(
        states={TEST: "missing"}, log=log, timed_out=timed_out, running=running, problem=problem
    )


def _warn(folders: Sequence[HarborTask], worker: WorkerConfig, multiplier: float) -> None:
    """Say once, of all tasks, which wishes of theirs `[environment]` and `[worker]` decide."""
    asked = Counter(wish for folder in folders for wish in _wishes(folder.table.environment))
    if asked:
        said = ", ".join(f"{name} ({count})" for name, count in asked.items())
        logger.warning("of %d Harbor tasks some ask for: %s; [environment] decides it", len(folders), said)
    agent_s = max(folder.table.agent.timeout_sec or 0.0 for folder in folders) * multiplier
    verifier_s = max(folder.table.verifier.timeout_sec for folder in folders) * multiplier
    said = "worker.%s = %g ends what %s.timeout_sec of a Harbor task allows: %g s"
    if agent_s > worker.generate_timeout_s:
        logger.warning(said, "generate_timeout_s", worker.generate_timeout_s, "agent", agent_s)
    if verifier_s > worker.reward_timeout_s:
        logger.warning(said, "reward_timeout_s", worker.reward_timeout_s, "verifier", verifier_s)


def _wishes(table: EnvironmentTable) -> Iterator[str]:
    if table.network_mode == "no-network" or table.allow_internet is False:
        yield "no network"
    if table.cpus:
        yield "cpus"
    if table.memory_mb or table.memory:
        yield "memory"
    if table.storage_mb or table.storage:
        yield "storage"
