"""What the two ends must agree on before a sample moves."""

from __future__ import annotations

from typing import NamedTuple

from trainer_bridge.bundle import FEATURE as BUNDLE
from trainer_bridge.codec import SCHEMA, SCHEMA_HASH
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import MAJOR, MINOR, Credit, Hello, Levels, Welcome

FEATURES: tuple[str, ...] = (BUNDLE,)
"""Optional behaviours this side has; a peer's unknown features are ignored."""
SCHEMAS: tuple[tuple[str, int], ...] = ((SCHEMA, SCHEMA_HASH),)

GREETINGS_BEFORE_REFUSAL = 8
"""So many greetings in a row that are not understood, or whose answer is not, and the peer speaks something
else; fewer may be damage on the way."""


class Agreed(NamedTuple):
    """What both ends speak."""

    minor: int
    schema: str
    features: tuple[str, ...]


def negotiate(hello: Hello) -> Agreed:
    """Pick minor version, schema and features for a HELLO.

    Raises:
        ProtocolError: nothing in common; the text says what each side has.
    """
    minor = min(MINOR, hello.minor_max)
    if minor < hello.minor_min:
        raise ProtocolError(
            ErrorCode.NO_COMMON_VERSION,
            f"{hello.name} needs protocol {MAJOR}.{hello.minor_min} or later, this receiver speaks up to "
            f"{MAJOR}.{MINOR}: upgrade trainer-bridge on the receiver's side",
        )
    ours = dict(SCHEMAS)
    for name, digest in hello.schemas:
        if ours.get(name) == digest:
            features = tuple(f for f in hello.features if f in FEATURES)
            return Agreed(minor, name, features)
    theirs = ", ".join(f"{name} ({digest:016x})" for name, digest in hello.schemas) or "none"
    mine = ", ".join(f"{name} ({digest:016x})" for name, digest in SCHEMAS)
    raise ProtocolError(
        ErrorCode.NO_COMMON_SCHEMA,
        f"{hello.name} sends schemas {theirs}; this receiver takes {mine}: "
        "install the same trainer-bridge on both sides",
    )


def welcome(
    hello: Hello,
    agreed: Agreed,
    *,
    receiver: bytes,
    config: ReceiverConfig,
    acks: tuple[Levels, ...],
    credit: Credit,
) -> Welcome:
    """The answer to a HELLO that is welcome.

    Args:
        hello: as it came.
        agreed: what was picked of it.
        receiver: 16 bytes, fresh for each start of the receiver.
        config: the receiver's.
        acks: what has arrived of this producer; empty for others.
        credit: the first.
    """
    return Welcome(
        session=hello.session,
        receiver=receiver,
        minor=agreed.minor,
        schema=agreed.schema,
        features=agreed.features,
        window=config.window,
        max_payload=config.max_payload_bytes,
        control_address="",
        acks=acks,
        sequence_limit=credit.sequence_limit,
        byte_limit=credit.byte_limit,
    )
