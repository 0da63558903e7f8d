"""`ToolCall`: one tool call as a model wrote it."""

from __future__ import annotations

import msgspec

Span = tuple[int, int]
"""Start and end of a piece in the completion's ids, its markers included."""

NOT_CLOSED = "the tool call was not closed"
"""Error of a call that was cut off, or that another one interrupts."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call as the model wrote it."""

    id: str
    """Verbatim where the template prints ids; else `call_0`, `call_1`, … by position, so that a completion
    always parses to the same ids."""
    name: str
    """Empty if it could not be read."""
    arguments: str
    """JSON text of the arguments: verbatim in JSON forms, else made of the values, numbers as written. All
    text of the call if it could not be read."""
    error: str | None = None
    """What is wrong with the call. None: name and arguments are well-formed and fit the tool's schema as far
    as it decides how they are read."""
    span: Span = (0, 0)
    """Calls that stand in one list share its markers: the first begins with the opening one, the last ends
    with the closing one, and the text between two belongs to the first."""
