"""Folders of Harbor's task format, read and refused: `task.toml`, `instruction.md`, `tests/`, `solution/`.

Read against harbor 0.26 (schema 1.4 and older). What cannot be honoured here is an error that names file and
key, and so is a key that is not known: a newer schema may mean something by it. `metadata` and `task` are for
people.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import msgspec

from agent_flow.config_file import parse, place
from agent_flow.decoding import decode, dotted
from agent_flow.errors import ConfigError, TaskRowError
from agent_flow.task import InstanceId
from agent_flow.toml_lines import Keys

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
"""Finite: TOML knows `inf` and `nan`."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0)]
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_FROM_HOST = re.compile(r"\$\{[^}]+\}")
_BUILD_STEP = re.compile(r"^[ \t]*(FROM|WORKDIR)[ \t]+(.+?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
_SCHEMA = re.compile(r"1(?:\.\d+)?\Z")
_ROOT = (None, "root", 0, "0")
_LEAVE_OUT = "leave the task out of the folder"
_MOST_NAMED = 20
G = TypeVar("G")
T = TypeVar("T")


class VerifierTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: Mapping[str, str] = {}
    user: str | int | None = None
    environment_mode: str | None = None
    environment: Mapping[str, Any] | None = None
    collect: tuple[Any, ...] = ()
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] | None = None


class AgentTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] | None = None


class SolutionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[solution]`."""

    env: Mapping[str, str] = {}


class EnvironmentTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[environment]`."""

    docker_image: str | None = None
    workdir: str | None = None
    build_timeout_sec: Seconds = 600.0
    os: str = "linux"
    cpus: Amount | None = None
    memory_mb: Count | None = None
    memory: str | None = None
    storage_mb: Count | None = None
    storage: str | None = None
    gpus: Count | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Mapping[str, Any] | None = None
    mcp_servers: tuple[Any, ...] = ()
    env: Mapping[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Mapping[str, Any] | None = None
    network_mode: str = "public"
    allowed_hosts: tuple[str, ...] | None = None
    allow_internet: bool | None = None


class TaskTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of `task.toml`."""

    schema_version: str = "1.4"
    version: str | None = None
    source: str | None = None
    task: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    multi_step_reward_strategy: str | None = None
    steps: tuple[Any, ...] = ()
    artifacts: tuple[str | Mapping[str, Any], ...] = ()


class HarborTask(msgspec.Struct, frozen=True, kw_only=True):
    """One folder."""

    name: InstanceId
    """The folder's, or that of a link to one."""
    path: Path
    instruction: str
    table: TaskTable
    workdir: str
    """Where the agent and the tests work. Empty: the folder does not say."""
    digest: str
    """SHA-256 of what the folder says and brings; `environment/` is not looked at, since nothing is built."""

    @property
    def where(self) -> str:
        """For errors."""
        return str(self.path / "task.toml")

    @property
    def solution(self) -> Path | None:
        """The folder of the reference solution. None: there is none."""
        folder = self.path / "solution"
        return folder if (folder / "solve.sh").is_file() else None


def read_tasks(path: Path) -> tuple[HarborTask, ...]:
    """Every task of a folder: the folder itself if it has a `task.toml`, else each folder in it that has one.

    Raises:
        TaskRowError: there is none, or some are malformed or want what this version does not do.
    """
    fix = "set tasks.path to a folder of Harbor tasks"
    if not path.is_dir():
        raise TaskRowError("no such folder", where=str(path), fix=fix)
    own = (path / "task.toml").is_file()
    alone = path if path.name not in ("", "..") else path.resolve()
    folders = [alone] if own else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise TaskRowError("neither it nor a folder in it has a task.toml", where=str(path), fix=fix)
    return of_each(folders, _read_task, where=str(path))


def of_each(given: Iterable[G], make: Callable[[G], T], *, where: str) -> tuple[T, ...]:
    """What `make` gives for each task.

    Raises:
        TaskRowError: as `make` does; of several, one that names them all.
    """
    made: list[T] = []
    wrong: list[TaskRowError] = []
    for one in given:
        try:
            made.append(make(one))
        except TaskRowError as error:
            wrong.append(error)
    if len(wrong) > 1:
        lines = [f"{error.where}: {error.what}" for error in wrong[:_MOST_NAMED]]
        lines += [f"and {len(wrong) - _MOST_NAMED} more"] if len(wrong) > _MOST_NAMED else []
        fixes = " or ".join(dict.fromkeys(error.fix for error in wrong if error.fix))
        what = f"{len(wrong)} of {len(wrong) + len(made)} tasks cannot be run\n  "
        raise TaskRowError(what + "\n  ".join(lines), where=where, fix=fixes)
    if wrong:
        raise wrong[0]
    return tuple(made)


def _read_task(folder: Path) -> HarborTask:
    file = folder / "task.toml"
    text = _text_of(file)
    where = partial(place, file, text)
    table = _table(file, text, where)
    for way, what in _refused(table):
        raise TaskRowError(f"{dotted(way)}: {what}", where=where(way), fix=_LEAVE_OUT)
    for path, what in _refused_files(folder):
        raise TaskRowError(what, where=str(path), fix=_LEAVE_OUT)
    workdir = table.environment.workdir or _workdir_of(folder / "environment" / "Dockerfile")
    instruction = _without_canary(_text_of(folder / "instruction.md"))
    if not instruction.strip():
        raise TaskRowError("there is no instruction in it", where=str(folder / "instruction.md"))
    try:
        name = msgspec.convert(folder.name, InstanceId)
    except msgspec.ValidationError as error:
        fix = "letters, digits, dots, dashes and underscores"
        raise TaskRowError("the folder's name cannot name a task", where=str(folder), fix=fix) from error
    digest = digest_of(file, folder / "instruction.md", folder / "tests", folder / "solution", put=True)
    return HarborTask(
        name=name, path=folder, instruction=instruction, table=table, workdir=workdir, digest=digest
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskRowError("no such file", where=str(path), fix="every Harbor task has one") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskRowError(f"cannot be read as text: {error}", where=str(path)) from error


def _table(file: Path, text: str, where: Callable[[Keys], str]) -> TaskTable:
    try:
        return decode(parse(file, text), TaskTable, where=where)
    except ConfigError as error:
        raise TaskRowError(error.what, where=error.where, fix=error.fix) from error


def _refused(table: TaskTable) -> Iterator[tuple[Keys, str]]:
    """Keys with a value that is not honoured here, and what is not done."""
    verifier, agent, environment = table.verifier, table.agent, table.environment
    if not _SCHEMA.match(table.version or table.schema_version):
        yield ("version" if table.version else "schema_version",), "no schema 1.x"
    separate = verifier.environment_mode not in (None, "shared")
    simple: tuple[tuple[Keys, object, str], ...] = (
        (("steps",), table.steps, "tasks of several steps are not handled"),
        (("multi_step_reward_strategy",), table.multi_step_reward_strategy, "tasks of several steps are not"),
        (("verifier", "environment"), verifier.environment, "a verifier's own image is not handled"),
        (("verifier", "environment_mode"), separate, "a verifier's own environment is not handled"),
        (("verifier", "collect"), verifier.collect, "commands that collect state are not handled"),
        (("verifier", "user"), verifier.user not in _ROOT, "users other than the sandbox's are not handled"),
        (("agent", "user"), agent.user not in _ROOT, "users other than the sandbox's are not handled"),
        (("agent", "network_mode"), agent.network_mode, "a network per phase is not handled"),
        (("agent", "allowed_hosts"), agent.allowed_hosts, "a network per phase is not handled"),
        (("verifier", "network_mode"), verifier.network_mode, "a network per phase is not handled"),
        (("verifier", "allowed_hosts"), verifier.allowed_hosts, "a network per phase is not handled"),
        (("environment", "allowed_hosts"), environment.allowed_hosts, "lists of hosts are not handled"),
        (("environment", "os"), environment.os.lower() != "linux", "Linux alone is handled"),
        (("environment", "gpus"), environment.gpus, "GPUs are not handled"),
        (("environment", "gpu_types"), environment.gpu_types, "GPUs are not handled"),
        (("environment", "tpu"), environment.tpu, "TPUs are not handled"),
        (("environment", "mcp_servers"), environment.mcp_servers, "MCP servers are not handled"),
        (("environment", "skills_dir"), environment.skills_dir, "an agent's skills are not handled"),
        (("environment", "healthcheck"), environment.healthcheck, "services of an image are not started"),
        (("environment", "env"), environment.env, "variables of a sandbox are not handled"),
        *_values_of_host(("verifier", "env"), verifier.env),
        *_values_of_host(("solution", "env"), table.solution.env),
    )
    yield from ((way, what) for way, value, what in simple if value)


def _values_of_host(way: Keys, variables: Mapping[str, str]) -> Iterator[tuple[Keys, object, str]]:
    for name, value in variables.items():
        yield (
            (*way, name),
            _FROM_HOST.search(value),
            f"{value!r}: variables of this machine are not passed on",
        )


def _refused_files(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted((folder / "environment").glob("*compose.y*ml")):
        yield path, "environments of several services are not handled"
    for name, what in (("steps", "tasks of several steps"), ("trajectory.json", "an agent's prior context")):
        if (folder / name).exists():
            yield folder / name, f"{what}: not handled"
    if not (folder / "tests" / "test.sh").is_file():
        yield folder / "tests", "there is no test.sh in it"
    for part in ("tests", "solution"):
        for path in sorted((folder / part).rglob("*")):
            if path.name == ".harborignore":
                yield path, "files that are left out of a task are not handled"
            if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(folder.resolve())):
                yield path, "a link that leads nowhere, or out of the task"
                return
        yield from _loops(folder / part, ())


def _loops(folder: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    """Links by which a folder lies in itself, by whatever way."""
    around = (*above, folder.resolve())
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and path.is_dir() and path.resolve() in around:
            yield path, "a link to a folder that it lies in"
        elif path.is_dir():
            yield from _loops(path, around)


def _workdir_of(dockerfile: Path) -> str:
    """`WORKDIR` of the last stage. Empty: there is none, or it hangs on a variable."""
    workdir = PurePosixPath()
    for step, value in _BUILD_STEP.findall(_text_of(dockerfile) if dockerfile.is_file() else ""):
        workdir = PurePosixPath() if step.upper() == "FROM" else workdir / value.strip("\"'")
    text = str(workdir)
    return text if text.startswith("/") and "$" not in text else ""


def check_workdir(folder: HarborTask) -> None:
    """Whether changes to the work folder can be taken, and whether they are all that the task speaks of.

    Raises:
        TaskRowError: it is none below the root, or artifacts lie outside of it.
    """
    workdir = folder.workdir
    parts = PurePosixPath(workdir).parts
    if not workdir.startswith("/") or "//" in workdir or ".." in parts or len(parts) < 2:
        said = f"the work folder is {workdir!r}" if workdir else "no work folder is said"
        raise TaskRowError(
            f"{said}: environment.workdir or a WORKDIR in environment/Dockerfile has to name one below /",
            where=folder.where,
            fix="runtime.workdir = '/app', for tasks that say none",
        )
    for artifact in folder.table.artifacts:
        source = artifact if isinstance(artifact, str) else str(artifact.get("source"))
        path = PurePosixPath(workdir) / source
        if ".." in path.parts or not path.is_relative_to(workdir):
            raise TaskRowError(
                f"artifacts: {source!r} lies outside of {workdir}, and nothing there is kept",
                where=folder.where,
                fix=_LEAVE_OUT,
            )


def _without_canary(text: str) -> str:
    """The instruction without the marks at its beginning that tell data sets apart; no agent sees them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
        while lines and not lines[0].strip():
            del lines[0]
    return "\n".join(lines)


def digest_of(*paths: Path, put: bool = False) -> str:
    """SHA-256 of files and folders with their names, and of whether their owner may execute them.

    A program that lost this mode does not run. `__pycache__` does not count, nor is it put into sandboxes.
    `put`: files are as in a sandbox, where every `.sh` may be executed.
    """
    found = hashlib.sha256()
    for top in paths:
        for path in sorted([top, *top.rglob("*")]):
            if "__pycache__" in path.relative_to(top).parts:
                continue
            if path.is_symlink() or not path.is_file():
                content = str(path.readlink()).encode() if path.is_symlink() else b""
            else:
                content = path.read_bytes()
            ruled = path.exists() and not (put and path.suffix == ".sh")
            mode = path.lstat().st_mode & 0o100 if ruled else 0
            head = f"{path.relative_to(top.parent)}\0{mode}\0{len(content)}\0"
            found.update(head.encode("utf-8", "surrogateescape") + content)
    return found.hexdigest()
