"""`ReadCall`: what the reader of a form found in the text of a call."""

from __future__ import annotations

import msgspec


class ReadCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader found."""

    name: str
    arguments: str
    """JSON text of an object; all text of the call if it could not be read."""
    id: str | None = None
    """None: the form prints no ids."""
    error: str | None = None
    whole: bool = True
    """The text is in the form, from its first word to its last, whatever is wrong with a value."""
    end: int = 0
    """Where the call ends in a text that holds a list of calls; 0 otherwise."""
    others: tuple[ReadCall, ...] = ()
    """The further calls of the list that this one begins."""


class MalformedCallError(ValueError):
    """The text is not a call in the form."""

    def __init__(self, why: str, *, name: str = "", arguments: str | None = None):
        super().__init__(why)
        self.name = name
        self.arguments = arguments
