"""`swefactory`: rows as SWE-Factory makes them, graded by the exit code of their eval script's tests.

SWE-Factory (DeepSoftwareAnalytics/swe-factory, arXiv:2506.10954) gives each row a Dockerfile and an eval
script, which brings the tests, runs them and says `echo "OMNIGRIL_EXIT_CODE=$rc"`; 0 is solved. Its harness
takes the first such line of the log, which code under test can write too; here the shell also writes the code
to a file of its own, behind a mark that it alone knows, and a log that says another is no verdict. A script
that never says it is judged by its own exit code, as in the original runtime of this name. Images are not
built here: a row names its own, or `runtime.image` does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.folder import make_folder
from agent_flow.environments.test_surface import changed_paths
from agent_flow.errors import GraderError, TaskRowError
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext
from agent_flow.rollout import Verdict
from agent_flow.runtimes.build_log import machine_broke
from agent_flow.runtimes.grading import KILLED, NOT_RUN, Observation, apply_patch, apply_test_patch
from agent_flow.runtimes.image_names import check_image_name, image_of
from agent_flow.runtimes.repositories import Repositories
from agent_flow.runtimes.rows import RepositoryRow, repository_row
from agent_flow.runtimes.rules import ruled_tasks
from agent_flow.runtimes.script import LOOK_S, ScriptRun, ended_by_signal, run_logged
from agent_flow.task import Task, load_tasks

GRADER_VERSION = "swefactory/1"
TEST = "eval_script"
"""The one test of every task: the exit code says no more."""
WORD = "OMNIGRIL_EXIT_CODE"
"""As SWE-Factory spells it."""
PLACEHOLDER = "[CONTENT OF TEST PATCH]"
"""Where SWE-Factory's script writer leaves room for the column `test_patch`."""
_IMAGES = ("image_name", "docker_image", "image")
_SAYS = re.compile(
    rf"""^(?P<indent>[ \t]*)echo[ \t]+(?P<quote>"?){WORD}=(?P<code>\$(?:\w+|\{{\w+\}}|\?))(?P=quote)"""
    r"(?=[ \t]*(?:#|;|$))",
    re.MULTILINE,
)
_SAID = re.compile(rf"(?<!echo )(?<!\"){WORD}=(\w*)")
"""In a log; what is behind an `echo` is bash's trace of the same line."""
_NOT_APPLIED = re.compile(
    r"^error: (?:corrupt patch at |unrecognized input|No valid patches in input"
    r"|patch failed: (?P<part>.+):\d+$|(?P<path>.+): (?:patch does not apply|No such file or directory"
    r"|already exists in (?:working directory|index)|does not (?:exist in|match) index|wrong type)$)",
    re.MULTILINE,
)
"""What `git apply` says of a patch that it did not take, and of which file."""
_KNOW = r"""IFS= read -r agent_flow_mark < {0}; rm -f {0}
"""
"""Before an eval script, which a trace does not show yet: a variable of this shell alone."""


class SwefactoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The column of SWE-Factory that judges, beside those of `RepositoryRow`."""

    eval_script: Annotated[str, msgspec.Meta(min_length=1)]


class SwefactoryRuntime:
    """SWE-Factory's tasks: the row's image, its eval script, and the exit code that this says."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[runtime]` with `provider = "swefactory"`."""

        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
        """Limit of one run of an eval script; the default of SWE-Factory's harness."""
        image: str = "setup.{instance_id}:latest"
        """Image of rows without `image_name`, `docker_image` or `image`; `{instance_id}` becomes the row's in
        lower case. The default is what SWE-Factory's harness calls the images that it builds."""
        workdir: Annotated[str, msgspec.Meta(pattern=r"\A/.*[^/]\Z")] = "/testbed"
        """Where the images have the repository."""
        repos: str = ""
        """Folder with one folder per repository, plain files or a git clone, named as in the column `repo`:
        the rows then run on these in sandboxes without images, and `workdir` in an eval script becomes the
        working copy. Empty: the image has the repository."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._clock = context.clock
        self._file = context.file
        check_image_name(config.image, context.file, "setup.{instance_id}:latest")
        self._repositories = (
            Repositories(context.file.resolve(config.repos), context.scratch / "repositories")
            if config.repos
            else None
        )
        self._in_script = re.compile(rf"{re.escape(config.workdir)}(?![\w.-])")
        self._specs: dict[str, EnvironmentSpec] = {}

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"grader": GRADER_VERSION}

    def load(self) -> tuple[Task, ...]:
        """Read and check every row.

        Raises:
            TaskRowError: a row is malformed, its eval script says no exit code, or it has no repository.
        """
        read = load_tasks(self._file.resolve(self._file.run.tasks.path))
        tasks = ruled_tasks(self._file, tuple(_with_test(task) for task in read))
        for task in tasks:
            row = repository_row(task)
            _check_script(task, row)
            if self._repositories is None:
                self._specs[task.instance_id] = EnvironmentSpec(
                    image=self._image(task), workdir=self._config.workdir, base_commit=row.base_commit
                )
            else:
                path = self._repositories.prepare(task, row)
                self._specs[task.instance_id] = EnvironmentSpec(repository=path, base_commit=row.base_commit)
        return tasks

    def _image(self, task: Task) -> str:
        named = next((task.row[name] for name in _IMAGES if task.row.get(name)), None)
        if named is None:
            return image_of(self._config.image, task.instance_id)
        if not isinstance(named, str):
            raise TaskRowError(f"the image is {named!r}, not a name", where=_where(task))
        return named

    def environment(self, task: Task) -> EnvironmentSpec:
        """The row's image, or its repository of this machine."""
        return self._specs[task.instance_id]

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Apply the patch, run the eval script, take its tests' exit code: 0 is 1.0, another one is 0.0.

        Raises:
            PatchApplyError: the patch does not apply.
            GraderError: the exit code says nothing about the patch.
            EnvError: the sandbox was lost.
        """
        return (await self.observe(task, patch, environment)).verdict()

    async def observe(self, task: Task, patch: bytes, environment: Environment) -> Observation:
        """See `TestRunner.observe`."""
        row = repository_row(task)
        text = task.columns(SwefactoryRow, needs="eval_script").eval_script
        await apply_patch(environment, patch, task.instance_id, row.base_commit)
        if not _brings_tests(text, row):
            await apply_test_patch(environment, row.test_patch, task.instance_id, row.base_commit)
        folder = await make_folder(environment)
        script, codes, mark = f"{folder}/eval.sh", f"{folder}/exit_codes", self._clock.new_id()
        text = text.replace(PLACEHOLDER, row.test_patch.rstrip("\n"))
        if self._repositories is not None:
            text = self._in_script.sub(lambda _: environment.workdir, text)
        says = _SAYS.search(text) is not None
        brought = _patched(text, row)
        text = _KNOW.format(shlex.quote(f"{folder}/mark")) + _SAYS.sub(partial(_recorded, codes), text)
        await environment.write(f"{folder}/mark", f"{mark}\n".encode())
        await environment.write(script, text.encode())
        done = await run_logged(
            environment,
            ["bash", script],
            f"{folder}/log",
            timeout_s=self._config.timeout_s,
            cwd=environment.workdir,
        )
        if done.timed_out:
            return self._out_of_time(done.log)
        said = [str(done.exit_code)]
        if says:
            said = await _codes(environment, codes, mark, done.log)
        return _judge(done, said, brought, says=says, patched=bool(patch))

    def _out_of_time(self, log: str) -> Observation:
        said = f"the eval script ran longer than {self._config.timeout_s:g} s"
        return Observation(
            states={TEST: "missing"},
            log=log,
            timed_out=True,
            running=TEST,
            problem=GraderError("timeout", said, fault="agent", evidence=log),
        )


def _with_test(task: Task) -> Task:
    """The task with the exit code as its only test: what its row lists as tests is not looked at."""
    return msgspec.structs.replace(task, row={**task.row, "FAIL_TO_PASS": (TEST,), "PASS_TO_PASS": ()})


def _where(task: Task) -> str:
    return f"{task.where} ({task.instance_id})"


def _check_script(task: Task, row: RepositoryRow) -> None:
    text = task.columns(
        SwefactoryRow, needs="instance_id, problem_statement, repo, base_commit and eval_script"
    ).eval_script
    if WORD in text and _SAYS.search(text) is None:
        raise TaskRowError(
            f"eval_script has {WORD} and no line that says it",
            where=_where(task),
            fix=f'rc=$?, and then a line of its own: echo "{WORD}=$rc"',
        )
    if PLACEHOLDER in text and not row.test_patch:
        raise TaskRowError(
            f"eval_script has {PLACEHOLDER}, and the row has no test_patch",
            where=_where(task),
            fix="add the column test_patch, or write the patch into the script",
        )


def _brings_tests(script: str, row: RepositoryRow) -> bool:
    """Whether the script applies the row's test patch; applied before it too, it would not apply again."""
    return PLACEHOLDER in script or "git apply" in script or row.test_patch.strip() in script


def _patched(script: str, row: RepositoryRow) -> frozenset[str]:
    """The files that a patch of the script is about. Empty: it applies none."""
    if "git apply" not in script:
        return frozenset()
    return frozenset((*changed_paths(script.encode()), *changed_paths(row.test_patch.encode())))


def _recorded(path: str, line: re.Match[str]) -> str:
    """The line that says an exit code, and before it one that writes it to a file, without a trace."""
    name = "agent_flow_exit_code"
    write = f'printf \'%s %s\\n\' "$agent_flow_mark" "${name}" >> {shlex.quote(path)}'
    return f'{line["indent"]}{name}={line["code"]}; {{ {write}; }} 2>/dev/null; echo "{WORD}=${name}"'


async def _codes(environment: Environment, path: str, mark: str, log: str) -> list[str]:
    """What the shell wrote of the exit code, once for each time that it was said.

    Raises:
        GraderError: something else wrote one.
    """
    command = ["sh", "-c", 'if [ -e "$1" ]; then cat "$1"; fi', "codes", path]
    read = await environment.execute(command, timeout_s=LOOK_S)
    lines = read.stdout.decode("utf-8", "replace").splitlines()
    if not all(line.startswith(f"{mark} ") for line in lines):
        what = "an exit code was written that is not the eval script's"
        raise GraderError("forged_exit_code", what, fault="agent", evidence=log)
    return [line.removeprefix(f"{mark} ") for line in lines]


def _judge(
    done: ScriptRun, said: list[str], brought: frozenset[str], *, says: bool, patched: bool
) -> Observation:
    problem = _problem(done, said, brought, says=says, patched=patched)
    if problem is not None:
        return Observation(states={TEST: "missing"}, log=done.log, problem=problem)
    passed = said == ["0"]
    return Observation(states={TEST: "passed" if passed else "failed"}, log=done.log, resolved=passed)


def _refused(log: str, brought: frozenset[str]) -> bool:
    """Whether `git apply` did not take the script's patch; of other files it says nothing.

    Whatever the exit code: without their patch tests may well pass.
    """
    if not brought:
        return False
    found = ((line["part"], line["path"]) for line in _NOT_APPLIED.finditer(log))
    return any(not (part or path) or part in brought or path in brought for part, path in found)


def _problem(
    done: ScriptRun, said: list[str], brought: frozenset[str], *, says: bool, patched: bool
) -> GraderError | None:
    """Why an exit code is no verdict."""
    log = done.log
    if not said:
        what = f"the eval script ended ({done.exit_code}) and did not say its tests' exit code"
        return GraderError("no_exit_code", what, retryable=True, evidence=log)
    if done.exit_code in KILLED or (says and ended_by_signal(done.exit_code)):
        what = f"the eval script was killed ({done.exit_code})"
        return GraderError("killed", what, retryable=True, evidence=log)
    if len(said) > 1:
        what = f"the eval script said {len(said)} exit codes: {', '.join(said)}"
        return GraderError("exit_codes", what, evidence=log)
    if not re.fullmatch(r"\d{1,3}", said[0]):
        what = f"the eval script's exit code is not a number: {said[0]!r}"
        return GraderError("exit_code", what, retryable=True, evidence=log)
    if says and set(_SAID.findall(log)) != set(said):
        what = f"the log does not say the exit code that the shell does, {said[0]}"
        return GraderError("contradiction", what, fault="agent", evidence=log)
    if _refused(log, brought):
        what = "the eval script's own patch does not apply"
        return GraderError("test_patch", what, fault="agent" if patched else "task", evidence=log)
    code = int(said[0])
    if code in NOT_RUN or code in KILLED or (code != 0 and machine_broke(log)):
        what = f"the tests were not run to their end (exit code {code})"
        return GraderError("unreadable", what, retryable=True, evidence=log)
    return None
