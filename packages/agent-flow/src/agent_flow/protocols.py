"""The seams of a rollout: what engines, environments, agents, runtimes and flows look like to each other.

They are met structurally: a provider from outside needs no import of this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking import GenerationRecord, Tokenizer
from token_tracking.sample import Scalar, Source

from agent_flow.agents.state import AgentState
from agent_flow.clock import Clock
from agent_flow.config import ConfigFile, SamplingConfig
from agent_flow.rollout import Message, Mode, Rollout, Verdict
from agent_flow.task import Task


class ProviderContext(msgspec.Struct, frozen=True, kw_only=True):
    """What every provider is built with, beside its own configuration."""

    file: ConfigFile
    clock: Clock
    tokenizer: Tokenizer
    scratch: Path
    """A folder of this run that the provider may use; removed at the end of the run."""
    mode: Mode | None = None
    """What its rollouts are for. None: nothing is said of it, as where a provider is only looked at."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn asked of an engine."""

    rollout_id: str
    attempt: int
    task_id: str
    member: int
    """Which rollout of its group, from zero."""
    turn: int
    """Turns of this rollout that were sampled before this one."""
    prompt_ids: npt.NDArray[np.int32]
    """Shape `[n]`: everything the model is to see, generation prompt included."""
    stop_ids: frozenset[int]
    sampling: SamplingConfig
    max_new_tokens: int
    """What is left of `sampling.max_new_tokens` for this turn."""


class Engine(Protocol):
    """Token ids in, token ids out."""

    source: Source
    """`sampled` by a model, or `replayed` from a recording."""

    def session(self) -> AbstractAsyncContextManager[None]:
        """Entered once around all calls of `generate`; its end closes what the engine holds.

        Raises:
            UsageError: there is no such engine, or it cannot serve this run.
        """
        ...

    def check(self, tasks: Sequence[Task]) -> None:
        """Called once before the first rollout, so that what cannot work is said before anything is started.

        Raises:
            UsageError: the engine cannot serve these tasks.
        """
        ...

    async def generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        """Sample one turn.

        One record, or several where the weights changed on the way: each goes on where the one before it
        ended, and all but the last have the finish reason `abort`.

        Raises:
            EngineError: the engine failed; `retryable` says whether the rollout may start again, `partial`
                holds what it had sampled.
        """
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance; `policy_run` is that of the weights, if they have one."""
        ...


@runtime_checkable
class Counting(Protocol):
    """An engine that counts what it does, such as calls and retries."""

    def stats(self) -> Mapping[str, int]:
        """What was counted since the start, by name; a run's summary shows it."""
        ...


class CommandOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a command in an environment gave."""

    exit_code: int | None
    """None: it was killed at its time-out."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


class EnvironmentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a task wants of a sandbox."""

    repository: Path | None = None
    """A git repository of this machine of which a working copy is put into the sandbox; HEAD is the base
    commit. None: it is in the image."""
    image: str = ""
    """Container image. Empty: the environment's own."""
    workdir: str = ""
    """The repository's folder in the image; unused with `repository`."""
    base_commit: str = ""
    """The commit that an agent starts from, of which its patch is a change."""
    plain: bool = False
    """The folder need not be a git repository: where it is none, a patch is a change of what lies in it when
    the agent starts, and no `.git` is made in it."""
    purpose: Literal["agent", "grader"] = "agent"


class Environment(Protocol):
    """A started sandbox with the task's repository in it."""

    workdir: str
    """The repository inside the sandbox."""

    async def execute(
        self, command: Sequence[str], *, timeout_s: float, cwd: str | None = None
    ) -> CommandOutput:
        """Run an argument vector.

        Raises:
            EnvError: the sandbox is lost or gave no answer. A command's own failure is an exit code.
        """
        ...

    async def read(self, path: str) -> bytes:
        """A file's bytes, exactly."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file's bytes, exactly."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder of this machine into the sandbox, modes and links kept."""
        ...

    async def download(self, source: str, target: Path) -> None:
        """Copy a folder of the sandbox to this machine, modes and links kept."""
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance: back end, image digest."""
        ...


class EnvironmentProvider(Protocol):
    """Starts environments."""

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A fresh sandbox; gone when the context ends.

        Raises:
            EnvCreateError: it could not be started.
        """
        ...

    def session(self) -> AbstractAsyncContextManager[None]:
        """Entered once around all `open`s; its end stops whatever still lives.

        Raises:
            UsageError: no sandbox can be started here.
        """
        ...


class Model(Protocol):
    """The model as an agent sees it: a history of messages in, the next assistant message out."""

    def prepare(self, messages: Sequence[Message]) -> GenerateRequest:
        """Turn the agent's whole history into token ids. Slow on long texts: call it off the event loop.

        Raises:
            TokenError: the history cannot be turned into token ids.
        """
        ...

    async def sample(self, request: GenerateRequest) -> tuple[Message, str]:
        """Sample what `prepare` asked for. Returns the assistant message and the finish reason.

        Raises:
            GenerationAborted: the turn was cut; the conversation holds what there was, and `prepare` with the
                same history goes on in it. A `BaseException`: for scaffolds in threads (`agents`).
            ContextFullError: the prompt leaves no room for an answer.
            EngineError: the engine failed.
            TokenError: what the engine gave contradicts itself.
        """
        ...

    async def ask(self, messages: Sequence[Message]) -> Message:
        """`prepare` in a thread, then `sample`: for agents that live on the event loop.

        Raises as they do, but for an abort: that is an `EngineError` here.
        """
        ...


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's run ended."""

    exit_status: str
    """The scaffold's own word, such as `Submitted`; `Aborted` when it was cut from outside."""
    messages: tuple[Message, ...]
    """The scaffold's own history, for people."""
    state: AgentState | None = None
    """Of an aborted run: from which `run` goes on, in any process that has the conversation and the sandbox.
    None: it ended, or was cut where it cannot go on (within a command, whose effect nobody knows)."""
    produced_by: Mapping[str, Scalar] = {}
    """For the rollout's provenance: what is of this run alone, such as what it cost."""


class AgentProvider(Protocol):
    """An agent scaffold."""

    tools: tuple[Mapping[str, object], ...]
    """Tool schemas that the chat template prints. Empty: none."""

    async def run(
        self, task: Task, model: Model, environment: Environment, state: AgentState | None = None
    ) -> AgentResult:
        """Work on a task until the scaffold ends by itself.

        Args:
            task: What to do.
            model: Over the rollout's conversation; with `state`, over the one that was saved with it.
            environment: A fresh sandbox; with `state`, the one that was left.
            state: Of an aborted run that is to go on. None: begin.

        Raises:
            RolloutError: something outside the scaffold failed.
        """
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        ...


class Runtime(Protocol):
    """Where tasks come from, what their sandboxes hold, and how a patch is judged."""

    def load(self) -> tuple[Task, ...]:
        """Every task of the run, checked.

        Raises:
            TaskRowError: a row is malformed or its repository does not fit.
        """
        ...

    def environment(self, task: Task) -> EnvironmentSpec:
        """What the sandboxes of a task hold."""
        ...

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Judge a patch in a fresh environment.

        Raises:
            GraderError: no verdict could be reached (never a reward of 0).
        """
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        ...


class AgentFlow(Protocol):
    """The three steps of a rollout. `Rollout` says what they fill in."""

    tools: tuple[Mapping[str, object], ...]
    """Tool schemas that the chat template prints. Empty: none."""

    def load(self) -> tuple[Task, ...]:
        """Every task of the run, checked.

        Raises:
            TaskRowError: a row is malformed.
        """
        ...

    def session(self) -> AbstractAsyncContextManager[None]:
        """Entered once around all rollouts.

        Raises:
            UsageError: what the flow needs is not there.
        """
        ...

    async def preprocess(self, rollout: Rollout) -> None:
        """Everything that needs no engine.

        Raises:
            RolloutError: of this and the two below: the rollout cannot go on.
        """
        ...

    async def generate(self, rollout: Rollout, model: Model) -> None:
        """Run the agent; fills exit status, messages and artifacts."""
        ...

    async def reward(self, rollout: Rollout) -> None:
        """Judge; fills verdict, reward, flags and status."""
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        ...
