"""Errors for people: what was wrong, where, what to do, in one line; and the exit code."""

from collections.abc import Generator
from contextlib import contextmanager

from sandbox_k8s.errors import (
    AccessError,
    BackendUnavailableError,
    ClusterError,
    CommandRefusedError,
    ConfigError,
    DiagnosedError,
    SandboxError,
)
from sandbox_k8s.kubernetes.explain import in_words

from .text import printable

EXIT_USAGE = 2
EXIT_INFRA = 3
EXIT_NOT_FOUND = 4
EXIT_TIMED_OUT = 124
_MISTAKES = (ConfigError, AccessError, BackendUnavailableError, CommandRefusedError)


def one_line(problem: SandboxError) -> str:
    """The message without the evidence, and the advice of a pod's failure class."""
    message = printable(str(problem.args[0]))
    if isinstance(problem, ClusterError) or not isinstance(problem, DiagnosedError):
        return message
    details = None if problem.diagnosis is None else problem.diagnosis.details
    return message if details is None else f"{message}. {details.advice}"


def exit_code(problem: SandboxError) -> int:
    """2 for what the caller has to change, 3 for what failed."""
    if isinstance(problem, ClusterError):
        return EXIT_INFRA if problem.retryable else EXIT_USAGE
    return EXIT_USAGE if isinstance(problem, _MISTAKES) else EXIT_INFRA


@contextmanager
def of_cluster(at: str) -> Generator[None]:
    """Say of refusals and silence of the API server which one it was, why in plain words, and what to do.

    Args:
        at: Which context, server and namespace.
    """
    try:
        yield
    except ClusterError as problem:
        if problem.diagnosis is None:
            raise
        said = f"{at}: {in_words(problem)}; {_what_to_do(problem)}"
        raise ClusterError(said, diagnosis=problem.diagnosis, code=problem.code) from problem


def _what_to_do(problem: ClusterError) -> str:
    """Of the class's advice, which is for creates, only what fits any request."""
    failure = None if problem.diagnosis is None else problem.diagnosis.failure
    if failure == "permission_denied":
        return "sandbox-k8s doctor says which rights are missing, sandbox-k8s manifests rbac has them all"
    if failure == "credentials_refused":
        return "renew the token or certificate of the kubeconfig"
    if problem.code == 0 and "certificate" in in_words(problem):
        return "the certificate authority of the kubeconfig is not this server's"
    if problem.code == 0:
        return "check the address, and that the cluster is up"
    return "try again" if problem.retryable else "see sandbox-k8s doctor"
