"""What the SDK of E2B raises, and what the services behind it answer, as `EnvError`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import httpx
import msgspec
from e2b import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    RateLimitException,
    SandboxException,
    TimeoutException,
)
from e2b.exceptions import (
    FileNotFoundException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
)

from agent_flow.errors import EnvError, Fault


async def of_envd(response: httpx.Response) -> None:
    """A refusal of `/files` is about the path if envd says so: a proxy has 404 for a route that is gone.

    The SDK keeps of the body what would serve as a message, whoever wrote it.

    Raises:
        EnvError: it is somebody else's.
    """
    if response.status_code not in (400, 404) or not response.request.url.path.endswith("/files"):
        return
    body = await response.aread()
    try:
        msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:
        said = f"{response.status_code}: {body[:2000].decode('utf-8', 'replace')}"
        why = "something between here and the sandbox answered"
        raise EnvError("unreachable", why, retryable=True, evidence=said) from None


class _Refusal(msgspec.Struct):
    """`Error` of spec/envd/envd.yaml of e2b-dev/infra."""

    code: int
    message: str


@contextmanager
def translated(cause: str, *, template: str = "", path: str = "") -> Generator[None]:
    """What the SDK, or what it stands on, raises as `EnvError`."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        raise _failure(cause, error, template=template, path=path) from error


_KINDS: tuple[tuple[type[Exception], str, str, bool], ...] = (
    (AuthenticationException, "auth", "the API key was refused", False),
    (RateLimitException, "rate_limit", "the service was asked too often", True),
    (ServiceBusyException, "no_capacity", "the service has no room", True),
    (NotEnoughSpaceException, "no_space", "the sandbox's disk is full", True),
    (SandboxNotRunningException, "lost", "the sandbox is gone: it was stopped, or its lease ended", True),
    (SandboxNotFoundException, "lost", "the sandbox is gone: it was stopped, or its lease ended", True),
    (TimeoutException, "unreachable", "no answer, or the connection broke", True),
)
"""Which error of the SDK, cause, message, and whether another try may help. First match wins."""


def _failure(cause: str, error: Exception, *, template: str, path: str) -> EnvError:
    evidence = f"{type(error).__name__}: {error}"
    if path and isinstance(error, (FileNotFoundException, InvalidArgumentException)):
        return EnvError("file", f"{path!r} cannot be used", fault="agent", evidence=evidence)
    for kind, name, message, retryable in _KINDS:
        if isinstance(error, kind):
            return EnvError(name, message, retryable=retryable, evidence=evidence)
    status = error.status_code if isinstance(error, SandboxException) else None
    if status is not None and 400 <= status < 500:
        return _refusal(cause, status, evidence, template)
    if isinstance(error, InvalidArgumentException):
        return EnvError(cause, "the request was refused", evidence=evidence)
    return EnvError("service" if status else cause, "the service failed", retryable=True, evidence=evidence)


def _refusal(cause: str, status: int, evidence: str, template: str) -> EnvError:
    """Of a start: 400, 403 and 404 are about the template where they say so."""
    if template and status in (400, 403, 404) and "template" in evidence.lower():
        names = {403: "image_auth", 404: "image_not_found", 400: "image_name_invalid"}
        fault: Fault = "image"
        why = f"the template {template!r} cannot be started"
        return EnvError(names[status], why, fault=fault, evidence=evidence)
    if status == 403:
        return EnvError("auth", "the service refuses this account", evidence=evidence)
    if status == 404:
        return EnvError("service", "the service is not where it was", retryable=True, evidence=evidence)
    retryable = status in (408, 409, 425)
    return EnvError(cause, f"the service refused the call ({status})", retryable=retryable, evidence=evidence)
