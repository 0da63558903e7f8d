"""What a field of a message may be: ranges, lengths, and the base of all bodies.

A peer may say anything. What is out of its bounds is refused before it is used, kept, or told to others.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_NUMBER = 2**63 - 1
"""Of a sequence number, a session, a count of bytes: whoever adds to it stays within 64 bits."""
MAX_TEXT = 1000
"""Characters of a text for people."""
MAX_NAME = 256
"""Characters of the name of a peer, or of a policy run."""
MAX_PLACE = 2048
"""Characters of the place of weights."""
MAX_EPOCHS = 4096
"""Epochs of one producer that HELLO may name."""
MAX_HOLES = 256
"""Ranges of numbers that never come which one REPORT may name."""
BUNDLE_MESSAGES = 64
"""DATA messages in one BUNDLE, at most."""

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U8 = Annotated[int, Meta(ge=0, le=255)]
Version = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Hash = Annotated[int, Meta(ge=0)]
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Token = Annotated[str, Meta(max_length=64)]
"""A word of the protocol: a schema's id, a feature, the name of an array."""
Features = Annotated[tuple[Token, ...], Meta(max_length=64)]


class Body(msgspec.Struct, array_like=True, frozen=True):
    """Base of all bodies."""
