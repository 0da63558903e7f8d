"""What `agent-flow doctor` looks at, part by part. Each check stands alone; see `doctor.Examination`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import anyio
import anyio.lowlevel
import msgspec
from token_tracking import Tokenizer, load_tokenizer
from token_tracking.errors import TokenTrackingError

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile, EvalConfig
from agent_flow.doctor import Check, NotCheckedError, Say
from agent_flow.environments.repository import build_repository
from agent_flow.errors import AgentFlowError, ConfigError, ProviderError
from agent_flow.eval_section import check_eval, eval_file, evaluation_only
from agent_flow.parts import Parts
from agent_flow.probe import absolute, look_inside, said, tell_template, tool_names, writable
from agent_flow.protocols import (
    AgentFlow,
    AgentProvider,
    Engine,
    EnvironmentProvider,
    EnvironmentSpec,
    ProviderContext,
    Runtime,
)
from agent_flow.providers import (
    BRINGS_MODEL,
    load_agent,
    load_engine,
    load_environments,
    load_flow,
    load_runtime,
)
from agent_flow.runtimes.grader import own_environments
from agent_flow.task import Task
from agent_flow.templates import Templates

T = TypeVar("T")

_OURS = ("agent-flow", "token-tracking", "sandbox-k8s", "trainer-bridge")
_THEIRS = (
    "mini-swe-agent",
    "sweagent",
    "swebench",
    "sglang",
    "kubernetes",
    "aiohttp",
    "tokenizers",
    "msgspec",
)


class Checkup:
    """The parts of a run as far as they could be built, each with nothing but what it needs."""

    def __init__(self, file: ConfigFile, clock: Clock, scratch: Path | OSError) -> None:
        self._evaluation_only = evaluation_only(file)
        self._file = eval_file(file) if self._evaluation_only else file
        self._clock = clock
        self._scratch = scratch
        self._tokenizer: Tokenizer | None = None
        self._engine: Engine | None = None
        self._agent: AgentProvider | None = None
        self._environments: EnvironmentProvider | None = None
        self._runtime: Runtime | None = None
        self._flow: AgentFlow | None = None
        self._tasks: tuple[Task, ...] | None = None

    def checks(self) -> Sequence[tuple[str, Check]]:
        """In the order in which they build on each other."""
        return (
            ("packages", self.packages),
            ("config", self.config),
            ("disk", self.disk),
            ("tokenizer", self.tokenizer),
            ("agent", self.agent),
            ("grader", self.grader),
            ("flow", self.flow),
            ("tasks", self.tasks),
            ("template", self.template),
            ("engine", self.engine),
            ("sandbox", self.sandbox),
            *(() if self._evaluation_only else (("bridge", self.bridge),)),
            *((("eval", self.eval),) if self._file.run.eval != EvalConfig() else ()),
        )

    async def packages(self, say: Say) -> None:
        """Python and the packages that matter."""
        found = {name: version for name in (*_OURS, *_THEIRS) if (version := _version(name))}
        python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        say.ok(f"{python}; {', '.join(f'{name} {version}' for name, version in found.items())}")

    async def config(self, say: Say) -> None:
        """Which providers the file names."""
        run = self._file.run
        sections: dict[str, Mapping[str, object]] = {
            "flow": run.flow,
            "engine": run.engine,
            "agent": run.agent,
            "environment": run.environment,
            "runtime": run.runtime,
        }
        named = [
            f"{kind} {section['provider']}" for kind, section in sections.items() if "provider" in section
        ]
        only = f"; evaluation only: agent-flow eval {self._file.path}" if self._evaluation_only else ""
        say.ok(f"{self._file.path}: {', '.join(named)}{only}")

    async def disk(self, say: Say) -> None:
        """Whether there is room to write, in the run folder and in the temporary one."""
        writable(absolute(self._file.run.run_dir), "run_dir", say)
        if isinstance(self._scratch, OSError):
            say.fail(f"no temporary folder: {self._scratch}", "set TMPDIR to a folder that you may write to")
        else:
            writable(self._scratch.parent, "temporary folder", say)

    async def tokenizer(self, say: Say) -> None:
        """Load it as a run does."""
        name = self._file.run.model.tokenizer
        path = self._file.resolve(name)
        where = self._file.where(("model", "tokenizer"))
        try:
            loaded = load_tokenizer(path if path.exists() else name)
        except TokenTrackingError as error:
            raise ConfigError(str(error), where=where) from error
        self._tokenizer = loaded
        say.ok(f"{loaded.name}: {loaded.vocab_size:,} ids, by {loaded.backend} ({loaded.backend_reason})")

    async def agent(self, say: Say) -> None:
        """Build the scaffold."""
        if self._unused(self._file.run.agent):
            raise NotCheckedError(f"the flow {self._flow_name()!r} has no [agent]")
        self._agent = load_agent(self._context())
        say.ok(f"{said(self._agent.describe(), 'agent')}; tools: {tool_names(self._agent.tools)}")

    async def grader(self, say: Say) -> None:
        """Build the runtime, and say what it will run."""
        if self._unused(self._file.run.runtime):
            raise NotCheckedError(f"the flow {self._flow_name()!r} has no [runtime]")
        self._runtime = load_runtime(self._context())
        say.ok(said(self._runtime.describe(), "grader"))

    async def flow(self, say: Say) -> None:
        """Build the flow, which builds its own parts."""
        if self._flow_name() == "swe":
            self._need_parts()
        self._flow = load_flow(self._context("flow"))
        about = said(self._flow.describe(), "flow")
        say.ok(f"{self._flow_name()}{f', {about}' if self._flow_name() != 'swe' and about else ''}")

    def _need_parts(self) -> None:
        """What is broken of these is told by their own checks, and not a second time by the flow's."""
        if self._agent is None or self._runtime is None:
            raise NotCheckedError("it needs its agent and its runtime, see above")
        try:
            self._environments = load_environments(self._context())
        except AgentFlowError:
            raise NotCheckedError("it needs its environment, see sandbox below") from None

    async def tasks(self, say: Say) -> None:
        """Read every row."""
        source = self._runtime or _needed(self._flow, "neither runtime nor flow could be built")
        tasks = self._tasks = source.load()
        each = self._file.run.tasks.rollouts_per_task
        where, first = self._file.run.tasks.path, tasks[0].instance_id
        say.ok(f"{len(tasks)} of {where}, the first is {first}; rollouts_per_task {each}")

    async def template(self, say: Say) -> None:
        """Compile the chat template for the flow's tools and every set of arguments that tasks give it."""
        if self._tokenizer is None:
            raise NotCheckedError("there is no tokenizer, see above")
        tools = self._flow.tools if self._flow else self._agent.tools if self._agent else ()
        templates = Templates(self._context(), tools)
        given = self._file.run.model.chat_template_kwargs
        users: dict[str, list[Task]] = {}
        for task in self._tasks or (Task(instance_id="none", problem_statement="none"),):
            variables = {**given, **task.chat_template_kwargs}
            users.setdefault(json.dumps(variables, sort_keys=True), []).append(task)
        for variables, tasks in users.items():
            await anyio.lowlevel.checkpoint()
            how = f" with {variables} for {len(tasks)} tasks" if len(users) > 1 or variables != "{}" else ""
            text = f"{self._file.run.model.chat_template}{how}, tools: {tool_names(tools)}"
            tell_template(text, templates.of(tasks[0]).describe(), say)
        if self._tasks is None:
            say.warn("compiled without the tasks' own arguments: there are no tasks, see above")

    async def engine(self, say: Say) -> None:
        """Build it, let it look at the tasks, and open its session."""
        if self._evaluation_only and self._file.run.agent.get("provider") in BRINGS_MODEL:
            raise NotCheckedError("none is asked: the agent brings a model of its own")
        engine = self._engine = load_engine(self._context())
        if self._tasks is not None:
            engine.check(self._tasks)
        async with engine.session():
            about = said(engine.describe(), "engine")
        say.ok(f"{about}; its tokens are {engine.source}")
        if self._tasks is None:
            say.warn("whether it can serve the tasks was not looked at: there are none, see above")

    async def sandbox(self, say: Say) -> None:
        """Start one as for the first task, and one of the graders' own where they have such."""
        if self._unused(self._file.run.environment):
            raise NotCheckedError(f"the flow {self._flow_name()!r} has no [environment]")
        environments = self._environments = load_environments(self._context())
        spec, of = self._spec()
        await _try_sandbox(environments, spec, of, say)
        graders = None if self._runtime is None else own_environments(self._runtime)
        if graders is not None:
            spec = msgspec.structs.replace(spec, purpose="grader")
            await _try_sandbox(graders, spec, f"{of}, of the graders' own", say)

    async def bridge(self, say: Say) -> None:
        """Ask the trainer for an answer, or start the receiver that a run would start."""
        scratch = self._folder()
        try:
            from agent_flow.delivery import Delivery  # the only file that loads trainer_bridge
        except ModuleNotFoundError as error:
            raise ProviderError(
                f"samples are delivered through a package that is not installed: {error.name}",
                fix="pip install 'agent-flow[bridge]'",
            ) from error
        trainer = self._file.run.trainer
        delivery = Delivery(trainer, scratch / "spool", scratch / "receiver", say.warn)
        try:
            async with anyio.create_task_group() as group:
                try:
                    await delivery.start(group)
                finally:
                    with anyio.CancelScope(shield=True):
                        await delivery.close(0.0, hurry=anyio.Event())
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await delivery.close_pipes()
        if trainer.address:
            say.ok(f"the trainer at {trainer.address} answers")
        else:
            say.ok(
                f"no trainer.address: a run starts a receiver of its own; one answered at {delivery.address}"
            )

    async def eval(self, say: Say) -> None:
        """What `[eval]` says otherwise, as far as `agent-flow eval` gets before its first rollout."""
        check_eval(self._file)
        _needed(self._flow, "it needs a flow")
        file = eval_file(self._file)
        if file.run.engine.get("provider") != "none":
            _needed(self._engine, "it needs an engine")
        context = msgspec.structs.replace(self._context("eval"), file=file, mode="eval")
        parts = Parts(context)
        tasks = parts.flow.load()
        parts.engine.check(tasks)
        for task in tasks:
            await anyio.lowlevel.checkpoint()
            parts.templates.of(task)
        run = context.file.run
        say.ok(
            f"{len(tasks)} of {run.tasks.path}, the first is {tasks[0].instance_id}; rollouts_per_task "
            f"{run.tasks.rollouts_per_task}; {said(parts.flow.describe(), 'flow')}"
        )

    def _context(self, folder: str = "") -> ProviderContext:
        """What providers are built with; without a tokenizer, one that says so to whoever uses it."""
        return ProviderContext(
            file=self._file,
            clock=self._clock,
            tokenizer=self._tokenizer or cast("Tokenizer", _NoTokenizer()),
            scratch=self._folder(folder),
            mode="eval" if self._evaluation_only else None,
        )

    def _folder(self, name: str = "") -> Path:
        if isinstance(self._scratch, OSError):
            raise NotCheckedError("there is no temporary folder, see above")
        folder = self._scratch / name
        folder.mkdir(exist_ok=True)
        return folder

    def _flow_name(self) -> object:
        return self._file.run.flow.get("provider")

    def _unused(self, section: Mapping[str, object]) -> bool:
        return not section and self._flow_name() != "swe"

    def _spec(self) -> tuple[EnvironmentSpec, str]:
        """What the first task wants of a sandbox; without tasks, an almost empty repository."""
        if self._runtime is not None and self._tasks:
            return self._runtime.environment(self._tasks[0]), f"for {self._tasks[0].instance_id}"
        source = self._folder("empty")
        (source / "README").write_text("agent-flow doctor\n", encoding="utf-8")
        repository = self._folder() / "doctor"
        commit = build_repository(source, repository, "doctor")
        return EnvironmentSpec(
            repository=repository, base_commit=commit
        ), "for a repository of the doctor's own"


class _NoTokenizer:
    """Stands where the tokenizer could not be loaded, so that parts that do without are still looked at."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotCheckedError("it needs the tokenizer, see above")


async def _try_sandbox(environments: EnvironmentProvider, spec: EnvironmentSpec, of: str, say: Say) -> None:
    """Start one, run `true` and git in it, and stop it."""
    began_s = anyio.current_time()
    async with environments.session():
        async with environments.open(spec) as environment:
            started_s = anyio.current_time() - began_s
            about = said(environment.describe(), "environment")
            ready = await look_inside(environment, spec, say)
            stopping_s = anyio.current_time()
        stopped_s = anyio.current_time() - stopping_s
    if ready:
        say.ok(f"{about}, {of}: started in {started_s:.1f} s, stopped in {stopped_s:.1f} s; {ready}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _needed(part: T | None, why: str) -> T:
    if part is None:
        raise NotCheckedError(f"{why}, see above")
    return part
