"""What a refusal is about, and so whether sending the message again can mend it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from trainer_bridge.errors import ErrorCode

RefusalKind = Literal["damage", "content", "session"]
"""`damage`: the bytes that arrived are not those that were sent; another copy may arrive whole. `content`:
the hashes fit, so this is what was sent, and it will be refused again. `session`: not about one message."""

SESSION_ERRORS = 32
"""Error codes from here on end the session; those below concern one message."""

REFUSAL_KINDS: Mapping[ErrorCode, RefusalKind] = MappingProxyType(
    {
        ErrorCode.SHORT_HEAD: "damage",
        ErrorCode.BAD_MAGIC: "damage",
        ErrorCode.WRONG_MAJOR: "damage",
        ErrorCode.UNKNOWN_KIND: "content",
        ErrorCode.BAD_HEAD_HASH: "damage",
        ErrorCode.BAD_BODY: "content",
        ErrorCode.TOO_DEEP: "content",
        ErrorCode.WRONG_FRAME_COUNT: "damage",
        ErrorCode.TOO_LARGE: "content",
        ErrorCode.BAD_PAYLOAD_LENGTH: "damage",
        ErrorCode.BAD_PAYLOAD_HASH: "damage",
        ErrorCode.BAD_OFFSET: "content",
        ErrorCode.BAD_SHAPE: "content",
        ErrorCode.DUPLICATE_ARRAY: "content",
        ErrorCode.UNKNOWN_DTYPE: "content",
        ErrorCode.MISSING_ARRAY: "content",
        ErrorCode.UNKNOWN_ARRAY: "content",
        ErrorCode.BAD_SAMPLE: "content",
        ErrorCode.UNKNOWN_SCHEMA: "content",
        ErrorCode.BAD_SEQUENCE: "content",
        ErrorCode.NO_SESSION: "session",
        ErrorCode.NO_COMMON_VERSION: "session",
        ErrorCode.NO_COMMON_SCHEMA: "session",
        ErrorCode.FENCED: "session",
        ErrorCode.SUPERSEDED: "session",
        ErrorCode.WRONG_ROLE: "session",
        ErrorCode.WRONG_KEY: "session",
        ErrorCode.QUARANTINED: "session",
        ErrorCode.ROLE_NOT_ALLOWED: "session",
        ErrorCode.TOO_MANY_PRODUCERS: "session",
    }
)
"""Checks before a head's hash, the hashes themselves, and lengths that the head contradicts: damage. Whatever
is only looked at once a hash has vouched for it: content."""

_BY_NUMBER: dict[int, RefusalKind] = {int(code): kind for code, kind in REFUSAL_KINDS.items()}


def kind_of_refusal(code: int) -> RefusalKind:
    """The kind of an error code; a number of a newer peer is `content` below 32, else `session`."""
    known = _BY_NUMBER.get(code)
    if known is not None:
        return known
    return "content" if code < SESSION_ERRORS else "session"
