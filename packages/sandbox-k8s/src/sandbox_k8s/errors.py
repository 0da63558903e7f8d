"""Everything that can go wrong, one type per boundary, each with whose fault it is and whether to try again.

::

    SandboxError
        ConfigError               a setting or a spec makes no sense
        BackendUnavailableError   the back end is not there on this machine
        SandboxStartError         a sandbox did not come up
        SandboxNotFoundError      a handle leads nowhere
        SandboxLostError          a sandbox that was there is gone or silent
        FencedError               another worker owns the sandbox now
        AccessError               the key does not fit
        ClusterError              the Kubernetes API refused a request or did not answer
        CommandRefusedError       a command cannot even be tried
        FileError                 a file inside cannot be read or written (`errno` says why)
        TransferError             bytes that arrived are not the bytes that were sent
        ResetRefusedError         a used sandbox cannot be made as good as new
        SessionError              a session is missing, busy, or its shell has ended
"""

from errno import ENOENT
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .kubernetes.diagnosis import Diagnosis

Fault = Literal["infra", "image", "task", "agent"]


class SandboxError(Exception):
    """Base of all errors of this package.

    Attributes:
        fault: Whose it is. Only ``agent`` and ``task`` may ever count against a rollout.
        retryable: Whether the same call (for a lost sandbox: a new sandbox) can succeed.
        evidence: What was seen, for the log: a log tail, an answer's body. Empty when there is nothing to
            add.
    """

    fault: Fault = "infra"
    retryable: bool = False

    def __init__(self, message: str, *, evidence: str = "") -> None:
        super().__init__(message)
        self.evidence = evidence

    def __str__(self) -> str:
        """The message, and the evidence on lines of its own."""
        message = str(self.args[0])
        return f"{message}\n{self.evidence.rstrip()}" if self.evidence else message


class ConfigError(SandboxError):
    """A setting, a spec or a handle makes no sense; the message names the field and what it may be."""

    fault: Fault = "task"


class BackendUnavailableError(SandboxError):
    """The back end that was asked for is not there."""


class DiagnosedError(SandboxError):
    """An error about a pod, whose signs may tell what was wrong.

    Attributes:
        diagnosis: What was wrong, and then whose fault it is and whether to try again; None when nothing is
            known, and for a sandbox that is no pod.
    """

    def __init__(self, message: str, *, evidence: str = "", diagnosis: "Diagnosis | None" = None) -> None:
        super().__init__(message, evidence=evidence)
        self.diagnosis = diagnosis
        if diagnosis is not None and diagnosis.details is not None:
            self.fault = diagnosis.details.fault
            self.retryable = diagnosis.details.retryable


class SandboxStartError(DiagnosedError):
    """A sandbox did not come up; nothing of it is left. The evidence is its log's end or its pod's signs."""

    retryable: bool = True


class SandboxNotFoundError(SandboxError):
    """There is no such sandbox: it was stopped, its lease ran out, or it lives on another machine."""


class SandboxLostError(DiagnosedError):
    """The sandbox does not answer any more. What ran in it is lost; its result is not a failed task."""

    retryable: bool = True


class FencedError(SandboxError):
    """Another worker attached to the sandbox and owns it now. Leave it alone."""


class AccessError(SandboxError):
    """The run key does not fit this sandbox."""


class ClusterError(DiagnosedError):
    """The Kubernetes API refused a request, or did not answer.

    Attributes:
        code: HTTP status; 0 when there was no answer.
    """

    def __init__(self, message: str, *, diagnosis: "Diagnosis", code: int) -> None:
        super().__init__(message, evidence=diagnosis.evidence_text, diagnosis=diagnosis)
        self.code = code


class CommandRefusedError(SandboxError):
    """The command cannot be tried: its directory is missing, or it holds a NUL byte."""

    fault: Fault = "agent"


class FileError(SandboxError):
    """A file inside the sandbox cannot be read or written.

    Attributes:
        errno: The system's number, for example `errno.ENOENT`; None when the cause has none.
    """

    fault: Fault = "agent"

    def __init__(self, message: str, *, errno: int | None = None, evidence: str = "") -> None:
        super().__init__(message, evidence=evidence)
        self.errno = errno

    @property
    def missing(self) -> bool:
        """Whether the file simply is not there."""
        return self.errno == ENOENT


class TransferError(SandboxError):
    """What arrived is not what was sent; nothing was written at the target."""

    retryable: bool = True


class ResetRefusedError(SandboxError):
    """A sandbox cannot be marked as clean, or could not be brought back to that; start a new one.

    Attributes:
        differences: What was not as it had been, at most 20 lines; empty when it was not even tried.
        stopped: Whether the sandbox was stopped. If not, it lives on as it was and is still yours, or its end
            was not confirmed and its lease ends it: then there are differences.
    """

    retryable: bool = True

    def __init__(self, message: str, *, differences: tuple[str, ...] = (), evidence: str = "") -> None:
        super().__init__(message, evidence=evidence or "\n".join(differences))
        self.differences = differences
        self.stopped = False


class ResultLostError(SandboxError):
    """A request was carried out, or begun, and its result is lost; the sandbox lives.

    The connection was cut in the middle of a command, which was ended then, or the answer was lost on the way
    and the launcher does not keep it any more. Nothing was carried out twice.
    """


class SessionError(SandboxError):
    """A session is missing or busy, or its shell has ended (``exit``, or a stuck command)."""

    fault: Fault = "agent"
