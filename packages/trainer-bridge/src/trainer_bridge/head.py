"""The head frame of every message: 8 fixed bytes, a msgpack body, 8 bytes of hash.

0  "TB"                     2 bytes
2  major, minor             1 byte each
4  kind, flags              1 byte each, flags are 0
6  reserved                 2 bytes, 0
8  body                     msgpack array, its fields by position
-8 xxh3_64 of all before    little endian
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from trainer_bridge.config import MAX_HEAD_BYTES
from trainer_bridge.errors import ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.messages import BODIES, KINDS, MAJOR, MINOR, Kind, Message
from trainer_bridge.payload import Buffer

MAGIC = b"TB"
FIXED_BYTES = 8
HASH_BYTES = 8

_FIXED = struct.Struct("<2sBBBBH")
_HASH = struct.Struct("<Q")
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()
}
_KINDS = {int(kind): kind for kind in Kind}


def encode_head(message: Message, *, minor: int = MINOR) -> bytes:
    """The head frame of a message.

    Raises:
        UnsendableError: a value in the body cannot be written as msgpack, or the head is too large.
    """
    try:
        body = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsendableError(f"{type(message).__name__}: {error}") from error
    if len(body) + FIXED_BYTES + HASH_BYTES > MAX_HEAD_BYTES:
        raise UnsendableError(
            f"the metadata of this message is {len(body)} bytes, at most {MAX_HEAD_BYTES} fit; "
            "put large values into a file and its name into `extra`"
        )
    start = _FIXED.pack(MAGIC, MAJOR, minor, KINDS[type(message)], 0, 0) + body
    return start + _HASH.pack(xxhash.xxh3_64_intdigest(start))


def decode_head(head: Buffer) -> Message:
    """The message in a head frame.

    Raises:
        ProtocolError: with the code of the first rule that the bytes break.
    """
    size = len(head)
    if size < FIXED_BYTES + HASH_BYTES:
        raise ProtocolError(
            ErrorCode.SHORT_HEAD, f"{size} bytes, at least {FIXED_BYTES + HASH_BYTES} are needed"
        )
    magic, major, minor, kind_byte, flags, reserved = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise ProtocolError(ErrorCode.BAD_MAGIC, f"begins with {bytes(magic)!r}, not {MAGIC!r}")
    if major != MAJOR:
        raise ProtocolError(
            ErrorCode.WRONG_MAJOR, f"protocol {major}.{minor}, this side speaks {MAJOR}.{MINOR}"
        )
    if size > MAX_HEAD_BYTES:
        raise ProtocolError(ErrorCode.TOO_LARGE, f"head of {size} bytes, at most {MAX_HEAD_BYTES} are taken")
    view = memoryview(head)
    (digest,) = _HASH.unpack_from(head, size - HASH_BYTES)
    if xxhash.xxh3_64_intdigest(view[: size - HASH_BYTES]) != digest:
        raise ProtocolError(ErrorCode.BAD_HEAD_HASH, "the head's bytes do not match its hash")
    kind = _KINDS.get(kind_byte)
    if kind is None or flags or reserved:
        raise ProtocolError(ErrorCode.UNKNOWN_KIND, f"kind {kind_byte}, flags {flags}, reserved {reserved}")
    try:
        return _DECODERS[kind].decode(view[FIXED_BYTES : size - HASH_BYTES])
    except RecursionError as error:
        raise ProtocolError(ErrorCode.TOO_DEEP, f"the body of {kind.name} is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(ErrorCode.BAD_BODY, f"the body of {kind.name}: {error}") from error
