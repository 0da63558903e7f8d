"""Several small DATA messages in one: what a message costs beside its bytes is paid once for all of them.

A socket call, a frame and a wake-up cost as much as tens of kilobytes of payload; 4096 tokens are 52.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.codec import Frames
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import encode_head
from trainer_bridge.messages import Bundle
from trainer_bridge.payload import ALIGNMENT, Buffer
from trainer_bridge.wire_types import BUNDLE_MESSAGES

FEATURE = "bundle"
"""Its name in HELLO and WELCOME."""
BUNDLE_BYTES = 1 << 19
"""A bundle's body, at most."""
BUNDLED_BYTES = 1 << 17
"""Larger messages travel alone: what they cost is their bytes."""

_PADDING = bytes(ALIGNMENT)


def takes(frames: Frames, count: int, nbytes: int) -> bool:
    """Whether a message may join a bundle that holds `count` messages of `nbytes` together."""
    size = frames.nbytes + 2 * ALIGNMENT
    return count < BUNDLE_MESSAGES and size <= BUNDLED_BYTES and nbytes + size <= BUNDLE_BYTES


def join(messages: Sequence[Frames], pool: BlockPool) -> tuple[Buffer, Buffer]:
    """The two frames of a bundle; the messages are copied."""
    pieces: list[Buffer] = []
    at = 0
    for message in messages:
        for piece in message:
            size = len(piece)
            end = at + size
            pieces.append(piece)
            at = _aligned(end)
            if at > end:
                pieces.append(_PADDING[: at - end])
    items = tuple((len(head), len(payload)) for head, payload in messages)
    body = pool.join(pieces, at) if at >= pool.smallest else b"".join(pieces)
    return encode_head(Bundle(items)), body


def split(bundle: Bundle, frames: Sequence[Buffer]) -> Iterator[tuple[Buffer, Buffer]]:
    """The head and the payload of each message, as they would have come alone.

    Raises:
        ProtocolError: there are not two frames, or the table does not give the second one's length. That is
            checked before the first message is given.
    """
    if len(frames) != 2:
        raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"BUNDLE of {len(frames)} frames, 2 are right")
    body = frames[1]
    at = 0
    for head, payload in bundle.items:
        at = _aligned(_aligned(at + head) + payload)
    if at != len(body):
        raise ProtocolError(
            ErrorCode.BAD_PAYLOAD_LENGTH,
            f"a bundle of {len(bundle.items)} messages and {at} bytes, its body has {len(body)}",
        )
    return _messages(bundle, memoryview(body))


def _messages(bundle: Bundle, view: memoryview) -> Iterator[tuple[Buffer, Buffer]]:
    at = 0
    for head, payload in bundle.items:
        middle = _aligned(at + head)
        # Copied: a view would keep the whole bundle in memory as long as one small rollout of it waits.
        yield bytes(view[at : at + head]), bytes(view[middle : middle + payload])
        at = _aligned(middle + payload)


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
