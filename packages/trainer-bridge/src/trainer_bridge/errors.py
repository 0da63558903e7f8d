"""Everything this package raises, one flat tree, and the closed list of wire error codes."""

from __future__ import annotations

import enum


class ErrorCode(enum.IntEnum):
    """Why a message or a session was refused: the `code` of an ERROR message and of `ProtocolError`.

    1 to 31 concern one message, 32 and above the session. Numbers are part of the wire protocol
    (`docs/wire-protocol.md`, section "Error codes") and are never given a second meaning.
    """

    SHORT_HEAD = 1
    BAD_MAGIC = 2
    WRONG_MAJOR = 3
    UNKNOWN_KIND = 4
    BAD_HEAD_HASH = 5
    BAD_BODY = 6
    TOO_DEEP = 7
    WRONG_FRAME_COUNT = 8
    TOO_LARGE = 9
    BAD_PAYLOAD_LENGTH = 10
    BAD_PAYLOAD_HASH = 11
    BAD_OFFSET = 12
    BAD_SHAPE = 13
    DUPLICATE_ARRAY = 14
    UNKNOWN_DTYPE = 15
    MISSING_ARRAY = 16
    UNKNOWN_ARRAY = 17
    BAD_SAMPLE = 18
    UNKNOWN_SCHEMA = 19
    BAD_SEQUENCE = 20
    NO_SESSION = 32
    NO_COMMON_VERSION = 33
    NO_COMMON_SCHEMA = 34
    FENCED = 35
    SUPERSEDED = 36
    WRONG_ROLE = 37
    WRONG_KEY = 38
    QUARANTINED = 39
    ROLE_NOT_ALLOWED = 40
    TOO_MANY_PRODUCERS = 41


MAX_DETAIL = 500
"""Characters of a refusal's text, which may quote what was refused: it is logged, kept, and sent back."""

_REASONS = {int(code): code.name.lower() for code in ErrorCode}


def reason_of(code: int) -> str:
    """Name of an error code, as counters and logs show it; an unknown number stays one."""
    return _REASONS.get(code, f"code_{code}")


class BridgeError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(BridgeError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class AddressError(ConfigError):
    """An address cannot be parsed, bound, or used without keys."""


class ConnectError(BridgeError, ConnectionError):
    """The named peer did not answer HELLO in time, or has been away for too long."""


class AuthError(ConnectError):
    """The peer is there, and the two do not know each other's keys (or only one of them has any)."""


class RefusedError(BridgeError):
    """The peer answered, and said no: another version or schema, or a newer owner of this identity."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
        """An `ErrorCode`, or the plain number if the peer is newer than this package."""


class ProtocolError(BridgeError):
    """Received bytes are not a valid message. Nothing of the message was used."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        if len(detail) > MAX_DETAIL:
            detail = detail[: MAX_DETAIL - 3] + "..."
        super().__init__(f"{code.name.lower()}: {detail}")
        self.code = code
        self.detail = detail


class UnsendableError(BridgeError, ValueError):
    """A sample, or a set of samples, cannot be put on the wire as it is (the text says which field)."""


class SpoolError(BridgeError, OSError):
    """A spool or store folder cannot be opened, locked, read or written."""


class DamagedError(SpoolError):
    """Something in a spool or store is damaged or missing (the text says what, where, and what to do)."""


class NotDurableError(SpoolError):
    """The samples were taken over and will be sent, but the disk did not confirm them (durability `sync`)."""


class BackpressureError(BridgeError, TimeoutError):
    """The sender is full (unsettled samples, or the spool's quota) and stayed full for `timeout_s`."""


class ForkedError(BridgeError, RuntimeError):
    """A sender or receiver was used in a child process that was forked after it was opened."""


class CallbackError(BridgeError, RuntimeError):
    """Inside `on_event`, which runs in a sender's or receiver's own thread, a call waited for that thread."""


class ClosedError(BridgeError, RuntimeError):
    """A sender or receiver was used after `close()`."""


class StepAbortedError(BridgeError, RuntimeError):
    """A step that data-parallel ranks share is void for all of them: one was lost, or gave it back.

    Its rollouts come again: drop its gradients and call `next_batch` again on every rank (with a new process
    for a rank that was lost, or a smaller `world`). A rank whose optimizer has stepped on it already goes
    back to its last checkpoint, or trains on these rollouts twice.
    """


class StuckError(BridgeError, RuntimeError):
    """Nothing can come any more, whatever the time: the text names who holds what."""


class BatchError(BridgeError, ValueError):
    """Samples cannot be made into the batch that was asked for (the text says which rollout, and why)."""


class TorchMissingError(BridgeError, ImportError):
    """Tensors were asked for, and torch is not installed."""


class TrainerMissingError(BridgeError, ImportError):
    """An adapter's trainer, or something that it imports, is not installed in this environment."""


class NoDataError(BridgeError, TimeoutError):
    """No complete training step arrived in time."""
