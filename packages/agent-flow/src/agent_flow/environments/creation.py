"""The line between a sandbox that never came up and one that failed later."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from agent_flow.errors import EnvCreateError, EnvError


@contextmanager
def creating() -> Generator[None]:
    """What fails within is a failed creation: cause, fault and evidence stay as they are.

    Raises:
        EnvCreateError: in the place of any other `EnvError`, and of what this machine's disk fails at.
    """
    try:
        yield
    except EnvCreateError:
        raise
    except EnvError as error:
        raise EnvCreateError(
            error.cause, error.message, fault=error.fault, retryable=error.retryable, evidence=error.evidence
        ) from error
    except OSError as error:
        raise EnvCreateError("files", str(error), retryable=True, evidence=repr(error)) from error
