"""Answers to requests to a launcher that are no success, and the errors that they stand for."""

import json
from typing import Any

from .errors import (
    AccessError,
    ClusterError,
    CommandRefusedError,
    FencedError,
    FileError,
    ResetRefusedError,
    ResultLostError,
    SandboxError,
    SandboxLostError,
    SessionError,
    TransferError,
)
from .kubernetes.admission import classify_refusal, read_status

_REX_FAILURE = 511
_ON_THE_WAY = frozenset({502, 503, 504})
_ERROR_TYPES: dict[str, type[SandboxError]] = {
    "auth": AccessError,
    "fenced": FencedError,
    "not-owner": FencedError,
    "request": CommandRefusedError,
    "transfer": TransferError,
    "archive": TransferError,
    "not-clean": ResetRefusedError,
    "busy": SandboxError,
    "answer-gone": ResultLostError,
    "cut-off": ResultLostError,
    "session-exists": SessionError,
    "session-missing": SessionError,
    "session-busy": SessionError,
    "session-closed": SessionError,
}


class NoAnswerError(SandboxLostError):
    """The answer was lost on the way: a request with an id may be sent again."""


class RexError(SandboxError):
    """What the launcher answered to a request of SWE-ReX's protocol.

    Attributes:
        class_path: The exception that it stands for.
        extra_info: What that one carries, for example the output until a time-out.
    """

    def __init__(self, message: str, *, class_path: str, extra_info: dict[str, Any]) -> None:
        super().__init__(message)
        self.class_path = class_path
        self.extra_info = extra_info


def error_of(body: bytes, status: int, where: str) -> SandboxError:
    """The error that an answer stands for.

    Args:
        body: As it came.
        status: HTTP status, 300 or more.
        where: Names the sandbox in the message.
    """
    try:
        answer: dict[str, Any] = json.loads(body)
        if status == _REX_FAILURE:
            return _rex_error(answer["swerexception"], where)
        code, message = answer["error"], answer["message"]
    except (ValueError, KeyError, TypeError):
        if status in (401, 403) and read_status(body).kind == "Status":
            # Not the launcher: the API server on the way to it, which will not change its mind.
            refused = classify_refusal(status, body)
            what = f"the way to {where}: HTTP {status}: {refused.failure}: {refused.why}"
            return ClusterError(what, diagnosis=refused, code=status)
        # A launcher says what is wrong; a bare 502 or 503 comes from something on the way to it.
        lost = NoAnswerError if status in _ON_THE_WAY else SandboxLostError
        return lost(f"{where} answered {status}", evidence=body[:2000].decode("utf-8", "replace"))
    if code == "os":
        return FileError(f"{where}: {message}", errno=answer["errno"])
    kind = _ERROR_TYPES.get(code)
    return kind(f"{where}: {message}") if kind else SandboxLostError(f"{where} failed: {message}")


def _rex_error(transfer: dict[str, Any], where: str) -> SandboxError:
    message, extra = str(transfer["message"]), dict(transfer["extra_info"])
    if "sandbox_error" in extra:
        kind = _ERROR_TYPES.get(extra["sandbox_error"], SandboxLostError)
        return kind(f"{where}: {message}")
    return RexError(message, class_path=str(transfer["class_path"]), extra_info=extra)
