"""The seams of a rollout: what engines, environments, agents and runtimes look like to the flow.

They are met structurally: a provider from outside needs no import of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking import Conversation, GenerationRecord, Tokenizer
from token_tracking.sample import Sample, Scalar, Source, Status

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.errors import GraderError
from agent_flow.task import Task

Message = dict[str, object]


class ProviderContext(msgspec.Struct, frozen=True, kw_only=True):
    """What every provider is built with, beside its own configuration."""

    file: ConfigFile
    clock: Clock
    tokenizer: Tokenizer
    scratch: Path
    """A folder of this run that the provider may use; removed at the end of the run."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn asked of an engine."""

    rollout_id: str
    task_id: str
    member: int
    """Which rollout of its group, from zero."""
    turn: int
    """Turns of this rollout that were sampled before this one."""
    prompt_ids: npt.NDArray[np.int32]
    """Shape `[n]`: everything the model is to see, generation prompt included."""
    stop_ids: frozenset[int]
    temperature: float
    max_new_tokens: int


class Engine(Protocol):
    """Token ids in, token ids out."""

    source: Source
    """`sampled` by a model, or `replayed` from a recording."""

    def check(self, tasks: Sequence[Task]) -> None:
        """Called once before the first rollout, so that what cannot work is said before anything is started.

        Raises:
            UsageError: the engine cannot serve these tasks.
        """
        ...

    async def generate(self, request: GenerateRequest) -> GenerationRecord:
        """Sample one turn.

        Raises:
            EngineError: the engine failed; `retryable` says whether the rollout may start again.
        """
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        ...


class CommandOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a command in an environment gave."""

    exit_code: int | None
    """None: it was killed at its time-out."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


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


class EnvironmentProvider(Protocol):
    """Starts environments."""

    def open(self, repository: Path) -> AbstractAsyncContextManager[Environment]:
        """A fresh sandbox holding a working copy of the git repository; gone when the context ends.

        Raises:
            EnvError: it could not be started.
        """
        ...

    def session(self) -> AbstractAsyncContextManager[None]:
        """Entered once around all `open`s; its end stops whatever still lives."""
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        ...


class ModelTurns(Protocol):
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
            ContextFullError: the prompt leaves no room for an answer.
            EngineError: the engine failed.
            TokenError: what the engine gave contradicts itself.
        """
        ...


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's run ended."""

    exit_status: str
    """The scaffold's own word, such as `Submitted`; `Aborted` when it was cut from outside."""
    messages: tuple[Message, ...]
    """The scaffold's own history, for people."""


class AgentProvider(Protocol):
    """An agent scaffold."""

    tools: tuple[Mapping[str, object], ...]
    """Tool schemas that the chat template prints. Empty: none."""

    async def run(self, task: Task, model: ModelTurns, environment: Environment) -> AgentResult:
        """Work on a task until the scaffold ends by itself.

        Raises:
            RolloutError: something outside the scaffold failed.
        """
        ...

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        ...


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader found."""

    reward: float
    log: str
    """Everything the tests printed."""
    tests: Mapping[str, Literal["passed", "failed", "missing"]]
    """Every FAIL_TO_PASS and PASS_TO_PASS test."""


class Runtime(Protocol):
    """Where tasks get their repository, and how a patch is judged."""

    def load(self) -> tuple[Task, ...]:
        """Every task of the run, checked.

        Raises:
            TaskRowError: a row is malformed or its repository does not fit.
        """
        ...

    def repository(self, task: Task) -> Path:
        """A git repository whose HEAD is the task's base commit; not to be written to."""
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


class Rollout(msgspec.Struct, kw_only=True):
    """One rollout under way: what the three steps of a flow fill in one after the other."""

    rollout_id: str
    group_id: str
    member: int
    attempt: int
    task: Task
    conversation: Conversation
    repository: Path
    exit_status: str = ""
    messages: tuple[Message, ...] = ()
    patch: bytes = b""
    verdict: Verdict | None = None
    reward: float | None = None
    in_loss: bool = True
    in_baseline: bool = True
    status: Status = "completed"
    ungraded: GraderError | None = None
    """Why no verdict was reached although one was due."""


class AgentFlow(Protocol):
    """The three steps of a rollout, and what is told of it."""

    async def preprocess(
        self, rollout_id: str, group_id: str, member: int, attempt: int, task: Task
    ) -> Rollout:
        """Everything that needs no engine: repository, template, conversation."""
        ...

    async def generate(self, rollout: Rollout, *, on_turn: Callable[[], None]) -> None:
        """Run the agent; fills exit status, messages and patch."""
        ...

    async def reward(self, rollout: Rollout) -> None:
        """Judge; fills verdict, reward, flags and status."""
        ...

    def samples(self, rollout: Rollout) -> tuple[Sample, ...]:
        """The rollout as training samples: at least one.

        Raises:
            TokenError: nothing was sampled, or the conversation contradicts itself.
        """
        ...

    def provenance(self, rollout: Rollout) -> Mapping[str, Scalar]:
        """What produced the rollout."""
        ...

    def facts(self, rollout: Rollout, seconds: float) -> Mapping[str, str]:
        """What a person wants to know of it, for the top of its page."""
        ...
