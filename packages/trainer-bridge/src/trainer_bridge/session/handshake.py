"""What the two ends must agree on before a sample moves."""

from __future__ import annotations

from trainer_bridge.codec import SCHEMA, SCHEMA_HASH
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import MAJOR, MINOR, Hello

FEATURES: tuple[str, ...] = ()
"""Optional behaviours this side has. The first version has none; a peer's unknown features are ignored."""
SCHEMAS: tuple[tuple[str, int], ...] = ((SCHEMA, SCHEMA_HASH),)


def negotiate(hello: Hello) -> tuple[int, str, tuple[str, ...]]:
    """Pick minor version, schema and features for a HELLO.

    Raises:
        ProtocolError: nothing in common; the text says what each side has.
    """
    if len(hello.peer) != 16:
        raise ProtocolError(ErrorCode.BAD_BODY, f"HELLO: peer id of {len(hello.peer)} bytes, 16 are needed")
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
            return minor, name, features
    theirs = ", ".join(f"{name} ({digest:016x})" for name, digest in hello.schemas) or "none"
    mine = ", ".join(f"{name} ({digest:016x})" for name, digest in SCHEMAS)
    raise ProtocolError(
        ErrorCode.NO_COMMON_SCHEMA,
        f"{hello.name} sends schemas {theirs}; this receiver takes {mine}: "
        "install the same trainer-bridge on both sides",
    )
