"""Our errors as SWE-ReX's: what its users catch keeps working, and so does catching ours."""

import builtins

from swerex import exceptions
from swerex.exceptions import DeploymentStartupError, SwerexException

from sandbox_k8s.answers import RexError
from sandbox_k8s.errors import (
    AccessError,
    ConfigError,
    FencedError,
    SandboxError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxStartError,
)


class K8sError(SandboxError, SwerexException):
    """Any error of this package that has no class below; its cause is ours."""


class K8sStartupError(SandboxStartError, DeploymentStartupError):
    """A sandbox did not come up; nothing of it is left."""


class K8sLostError(SandboxLostError, SwerexException):
    """The sandbox does not answer any more. What ran in it is lost."""


class K8sNotFoundError(SandboxNotFoundError, SwerexException):
    """A handle leads nowhere: its sandbox has ended."""


class K8sFencedError(FencedError, SwerexException):
    """Another worker attached to the sandbox and owns it now."""


class K8sAccessError(AccessError, SwerexException):
    """The run key does not fit this sandbox."""


class K8sConfigError(ConfigError, SwerexException):
    """The settings make no sense for this place, or the client behind them is closed."""


_SAME: tuple[tuple[type[SandboxError], type[SandboxError]], ...] = (
    (SandboxNotFoundError, K8sNotFoundError),
    (FencedError, K8sFencedError),
    (AccessError, K8sAccessError),
    (ConfigError, K8sConfigError),
    (SandboxError, K8sError),
)


def as_swerex(problem: SandboxError) -> Exception:
    """The error for one of ours that SWE-ReX's users know as well."""
    message, evidence = str(problem.args[0]), problem.evidence
    if isinstance(problem, RexError):
        return _named(problem)
    if isinstance(problem, SandboxStartError):
        return K8sStartupError(message, evidence=evidence, diagnosis=problem.diagnosis)
    if isinstance(problem, SandboxLostError):
        return K8sLostError(message, evidence=evidence, diagnosis=problem.diagnosis)
    kind = next(kind for ours, kind in _SAME if isinstance(problem, ours))
    same = kind(message, evidence=evidence)
    same.fault, same.retryable = problem.fault, problem.retryable
    return same


def _named(problem: RexError) -> Exception:
    """The exception that the launcher names.

    Only SWE-ReX's own and Python's built-in ones: the stock client imports whatever module the other side
    says, which is for the sandbox to choose.
    """
    module, _, name = problem.class_path.rpartition(".")
    places = {"swerex.exceptions": vars(exceptions), "builtins": vars(builtins)}
    kind = places[module].get(name) if module in places else None
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = SwerexException
    message = str(problem.args[0])
    try:
        raised = kind(message)
    except TypeError:  # UnicodeDecodeError and the like are not made of one message
        raised = SwerexException(f"{name}: {message}")
    vars(raised)["extra_info"] = problem.extra_info
    return raised
