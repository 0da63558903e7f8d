"""Answers of the API server that are no success: a pod that was not created, a pod that is (not) missing.

One code stands for many causes: 403 is a quota, a policy, a missing object or a missing permission. The body
of an error is a Status object only sometimes: flow control, proxies and kubelets answer in plain text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from .diagnosis import Diagnosis, Evidence, diagnose
from .failure import FailureName

_FORBIDDEN: tuple[tuple[str, FailureName], ...] = (
    (r"exceeded quota", "quota_exceeded"),
    (r"failed quota|must specify", "limits_refused"),
    (r"because it is being terminated", "namespace_terminating"),
    (r"(maximum|minimum) .* usage per|limit to request ratio", "limits_refused"),
    (
        r"violates podsecurity|admission webhook .* denied|validatingadmissionpolicy|denied request",
        "policy_refused",
    ),
    (r"runtimeclass .*not found|no priorityclass|serviceaccount .*not found", "reference_missing"),
    (r"cannot (create|get|list|watch|patch|update|delete) resource", "permission_denied"),
)
_QUOTAS = frozenset({"resourcequotas", "clusterresourcequotas"})
_CODES: dict[int, FailureName] = {
    400: "spec_invalid",
    401: "credentials_refused",
    404: "namespace_missing",
    409: "name_taken",
    413: "request_too_large",
    422: "spec_invalid",
    429: "api_overloaded",
}


class _Cause(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""
    field: str = ""


class _Details(msgspec.Struct, frozen=True):
    name: str = ""
    kind: str = ""
    causes: tuple[_Cause, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """The API's own error object, or as much of it as the body has."""

    kind: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    details: _Details | None = None


def read_status(body: Mapping[str, Any] | bytes | str | None) -> Status:
    """Read an error's body; what is no Status (text, HTML, nothing) becomes one without a kind.

    Never fails: an error that hides the one it reports is of no use.
    """
    data: object = body
    if isinstance(body, bytes):
        data = body.decode("utf-8", "backslashreplace")
    if isinstance(data, str):
        text = data
        try:
            data = json.loads(text)
        except ValueError:
            return Status(message=text.strip())
        if not isinstance(data, dict):
            return Status(message=text.strip())
    if data is None:
        return Status()
    try:
        return msgspec.convert(data, Status)
    except msgspec.ValidationError:
        said = cast("Mapping[str, Any]", data).get("message") if isinstance(data, Mapping) else data
        return Status(message=str(said))


def classify_refusal(
    code: int,
    body: Mapping[str, Any] | bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Say why a pod was not created.

    Args:
        code: HTTP status, 400 or more; 0 when there was no answer at all (then `body` says what happened).
        body: As it came, or decoded.
        headers: Of the answer, for Retry-After.

    Returns:
        A diagnosis that is ``failing`` where trying again can help and ``failed`` otherwise.

    Note:
        After ``api_unavailable`` the pod may exist: look it up by name before creating another one.
    """
    status = read_status(body)
    failure, guess = _of_answer(code, status)
    source = f"HTTP {code}" if code else "no answer"
    said = " ".join(status.message.split())
    seen = [Evidence(f"{source} {status.reason}".rstrip(), said)]
    causes = status.details.causes if status.details else ()
    seen += [Evidence(f"cause {one.field or one.reason}".rstrip(), one.message) for one in causes]
    found = diagnose(failure, said or source, *seen, guess=guess)
    return msgspec.structs.replace(found, retry_after_s=_retry_after_s(headers or {}))


def says_pod_is_missing(code: int, body: Mapping[str, Any] | bytes | str | None) -> bool:
    """Whether an answer proves that a pod does not exist.

    Only the API server's own 404 about pods does. A kubelet that has just been restarted says 404 "pod does
    not exist" of a pod that runs, and a program behind pods/proxy has 404 pages of its own.
    """
    status = read_status(body)
    of_pods = status.details is not None and status.details.kind == "pods"
    return code == 404 and status.kind == "Status" and status.reason == "NotFound" and of_pods


def _of_answer(code: int, status: Status) -> tuple[FailureName, bool]:
    text = status.message.lower()
    if "trying to send message larger than max" in text or "too long: may not be more than" in text:
        return "request_too_large", False
    if code == 403:
        for pattern, failure in _FORBIDDEN:
            if re.search(pattern, text):
                return failure, False
        return "create_refused", True
    if code == 409 and status.reason == "Conflict":
        # Many pods at once in a namespace with a quota (kubernetes#67761): nothing was created, and a moment
        # later it works.
        of_quota = status.details is not None and status.details.kind in _QUOTAS
        return ("api_overloaded", False) if of_quota else ("create_refused", True)
    if code == 404 and not (status.details and status.details.kind == "namespaces"):
        return "create_refused", True
    if code in _CODES:
        return _CODES[code], False
    if code == 0 or code >= 500:
        return "api_unavailable", False
    return "create_refused", True


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header; its form as a date is not used by API servers."""
    said = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    return float(said) if said.isascii() and said.strip().isdigit() else None
