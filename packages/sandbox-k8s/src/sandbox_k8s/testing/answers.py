"""Answers of an API server that are no success, word for word as a real one gives them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

_EXPIRED_PAGE = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new "
    "list without the continue parameter, or use the continue token in this response to retrieve the "
    "remainder of the results. Continuing with the provided token results in an inconsistent list - objects "
    "that were created, modified, or deleted between the time the first chunk was returned and now may show "
    "up in the list."
)


class Cause(NamedTuple):
    """One fault of an object: ``reason``, ``message`` and ``field`` of a Status's cause."""

    reason: str
    message: str
    field: str


class RefusalError(Exception):
    """A request that was refused.

    Attributes:
        code: HTTP status.
        reason: Empty for the few answers that have none.
        details: None where the answer has no such field.
        continued: Token with which an expired list goes on.
        retry_after_s: Value of the Retry-After header; None for no header.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        continued: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = details
        self.continued = continued
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The ``Status`` object."""
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {} if self.continued is None else {"continue": self.continued},
            "status": "Failure",
            "message": str(self),
        }
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return {**status, "code": self.code}


def bad_request(message: str) -> RefusalError:
    """400."""
    return RefusalError(400, "BadRequest", message)


def not_found(plural: str, name: str) -> RefusalError:
    """404: no such object."""
    return RefusalError(
        404, "NotFound", f'{plural} "{name}" not found', details={"name": name, "kind": plural}
    )


def no_such_resource() -> RefusalError:
    """404: the path means nothing."""
    return RefusalError(404, "NotFound", "the server could not find the requested resource", details={})


def already_exists(plural: str, name: str) -> RefusalError:
    """409: the name is taken."""
    details = {"name": name, "kind": plural}
    return RefusalError(409, "AlreadyExists", f'{plural} "{name}" already exists', details=details)


def modified(plural: str, name: str) -> RefusalError:
    """409: a change named an older version."""
    message = (
        f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified; please apply '
        "your changes to the latest version and try again"
    )
    return RefusalError(409, "Conflict", message, details={"name": name, "kind": plural})


def precondition(kind: str, name: str, what: str, wanted: str, found: str) -> RefusalError:
    """409: a delete named another uid or an older version; ``what`` is as in the text."""
    message = (
        f'Operation cannot be fulfilled on {kind} "{name}": the {what} in the precondition ({wanted}) does '
        f"not match the {what} in record ({found}). The object might have been "
        + ("deleted and then recreated" if what == "UID" else "modified")
    )
    return RefusalError(409, "Conflict", message, details={"name": name, "kind": kind})


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> RefusalError:
    """422: all faults of an object at once."""
    texts = [f"{cause.field}: {cause.message}" for cause in causes]
    said = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details: dict[str, Any] = {"kind": kind, "causes": [cause._asdict() for cause in causes]}
    if name:
        details = {"name": name, **details}
    return RefusalError(422, "Invalid", f'{kind} "{name}" is invalid: {said}', details=details)


def unusable_patch() -> RefusalError:
    """422: a JSON patch whose test failed, or that names what is not there."""
    message = "the server rejected our request due to an error in our request"
    return RefusalError(422, "Invalid", message, details={})


def expired(asked: int, oldest: int) -> RefusalError:
    """410: a watch from a version that is forgotten."""
    return RefusalError(410, "Expired", f"too old resource version: {asked} ({oldest})")


def expired_page(continued: str | None) -> RefusalError:
    """410: a list of a version that is forgotten; the token leads to what is there now."""
    message = _EXPIRED_PAGE if continued else "The provided resource version is too old."
    return RefusalError(410, "Expired", message, continued=continued)


def version_too_large(asked: int, current: int) -> RefusalError:
    """504: a version that the server has not reached."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return RefusalError(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {asked}, current: {current}",
        details={"causes": causes, "retryAfterSeconds": 1},
        retry_after_s=1,
    )


def wrong_method() -> RefusalError:
    """405."""
    message = "the server does not allow this method on the requested resource"
    return RefusalError(405, "MethodNotAllowed", message, details={})


def unsupported_patch() -> RefusalError:
    """415: a PATCH of a media type that is no patch."""
    return RefusalError(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})
