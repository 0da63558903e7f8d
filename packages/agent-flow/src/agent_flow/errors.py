"""Everything this package raises, one flat tree named by the boundary that was crossed.

Every failure of a rollout carries a `cause` (a short stable word that counters use), a `fault` (who is to
blame), `retryable` and `evidence` (text for a person). Environments, engines and delivery translate their
library's errors into these; flow, outcome and worker see nothing else.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from token_tracking import GenerationRecord

Fault = Literal["infra", "image", "task", "agent"]


def text_of(value: object) -> str:
    """Text that every file and screen takes: bytes decoded, halves of surrogate pairs replaced.

    It never raises: what says why a rollout ended must not end the run.
    """
    try:
        if isinstance(value, bytes | bytearray):
            return bytes(value).decode("utf-8", "replace")
        text = str.__str__(value) if isinstance(value, str) else str(value)
        return text.encode("utf-8", "replace").decode()
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


class AgentFlowError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(AgentFlowError, ValueError):
    """What the user gave cannot work: what is wrong, where, and what to do. The CLI exits with code 2."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        fix = f"\n  try: {self.fix}" if self.fix else ""
        return f"{where}{self.what}{fix}"


class ConfigError(UsageError):
    """The run's configuration file: a missing file, an unknown key, a wrong type, a value out of range."""


class ProviderError(UsageError):
    """A provider's name is unknown, or what it needs is not installed."""


class TaskRowError(UsageError):
    """A row of the task file is malformed or contradicts its repository."""


class RecordingError(UsageError):
    """A recording for the `replay` engine is missing or malformed."""


class RolloutError(AgentFlowError):
    """One rollout could not go on. Subclasses name the boundary; nothing of this is ever a reward of 0."""

    boundary: str = "flow"

    def __init__(
        self, cause: str, message: str, *, fault: Fault = "infra", retryable: bool = False, evidence: str = ""
    ) -> None:
        # Of a response's body or a process's output: bytes, or text that no file takes.
        message, evidence = text_of(message), text_of(evidence)
        super().__init__(cause, message, fault, retryable, evidence)
        self.cause = cause
        self.message = message
        self.fault: Fault = fault
        self.retryable = retryable
        self.evidence = evidence

    def __str__(self) -> str:
        return f"{self.boundary}/{self.cause}: {self.message}"

    @property
    def reason(self) -> str:
        """What counters group by, such as `environment/start`."""
        return f"{self.boundary}/{self.cause}"


class EngineError(RolloutError):
    """The inference engine refused, failed, or answered something that cannot be true."""

    boundary = "engine"
    partial: tuple[GenerationRecord, ...] = ()
    """What it had sampled of the turn before it failed: records with the finish reason `abort`."""


class EnvError(RolloutError):
    """The sandbox could not be started, was lost, or gave no answer."""

    boundary = "environment"


class EnvCreateError(EnvError):
    """No sandbox came up that a task could use, so nothing of an agent or a grader has run in one.

    `EnvironmentProvider.open` raises it before its block begins; what fails later is another `EnvError`.
    """


class AgentError(RolloutError):
    """The agent scaffold raised something that is not one of its own exit statuses."""

    boundary = "agent"


class ContextFullError(RolloutError):
    """The prompt leaves the engine no room for a token: a limit that the agent ran into, no failure."""

    boundary = "agent"

    def __init__(self, message: str) -> None:
        super().__init__("context_full", message, fault="agent")


class GraderError(RolloutError):
    """The grader could not come to a verdict."""

    boundary = "grader"


class PatchApplyError(GraderError):
    """The agent's patch does not apply to its base: neither a right nor a wrong solution."""


class TokenError(RolloutError):
    """The conversation's tokens could not be kept exact."""

    boundary = "tokens"


class StageTimeoutError(RolloutError):
    """A step of the flow took longer than its limit; the agent works in `generate` alone.

    `cut_in` says what was waited for then, such as `a sandbox`: no fault of the agent's. Empty: nothing.
    """

    def __init__(self, stage: str, limit_s: float, cut_in: str = "") -> None:
        waiting = f", and then still waiting for {cut_in}" if cut_in else ""
        super().__init__(
            f"{stage}_timeout",
            f"longer than worker.{stage}_timeout_s = {limit_s:g} s{waiting}",
            fault="agent" if stage == "generate" and not cut_in else "infra",
        )


class JournalError(AgentFlowError):
    """A journal cannot be read or written, or its events break the law."""


class DeliveryError(AgentFlowError):
    """Samples cannot reach the trainer: what is unacknowledged, and where it lies."""


class GenerationAborted(BaseException):
    """Generation was cut from outside, inside a scaffold's call.

    A `BaseException`, so that no `except Exception` of a scaffold turns an abort into an exit status. It
    exists only between the model adapter and the agent adapter, which turns it into a returned value.
    """

    def __init__(self, records: tuple[GenerationRecord, ...] = ()) -> None:
        super().__init__(records)
        self.records = records
        """What was sampled of the turn before the cut; the conversation holds it too, as an open turn."""


@contextmanager
def unwrapped() -> Generator[None]:
    """Raise what a task group raised as if there were no group: an error of ours first, or the only one.

    Several foreign errors stay a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        ours = [error for error in leaves if isinstance(error, AgentFlowError)]
        if ours or len(leaves) == 1:
            raise (ours or leaves)[0] from None
        raise


def _leaves(error: BaseException) -> Generator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
