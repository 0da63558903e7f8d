"""Several DATA messages in one: what a message costs beside its bytes is paid once for all of them.

A socket call, a frame and a wake-up cost as much as tens of kilobytes of payload; 4096 tokens are 52.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.codec import Frames
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import encode_head
from trainer_bridge.messages import Bundle
from trainer_bridge.payload import Buffer, aligned, lay_together
from trainer_bridge.wire_types import BUNDLE_MESSAGES

FEATURE = "bundle"
"""Its name in HELLO and WELCOME."""
COPIED_BYTES = 1 << 17
"""Larger payloads are not copied into a bundle: what they cost is their bytes."""
COPIES_BYTES = 1 << 19
"""Payloads that were copied together, at most."""
HEADS_BYTES = 1 << 18
"""Heads of one bundle, at most."""
KEPT_ALIVE = 16
"""A view of one payload keeps its whole bundle in memory for as long as that rollout waits: the receiver
copies payloads that are less than this part of it,"""
ALWAYS_COPIED_BYTES = 1 << 14
"""and these."""


class Bundler:
    """Collects the messages that go out together: neighbours in memory (`draft_all`), or small ones.

    Args:
        most: bytes of payloads that the receiver takes in one frame.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._messages: list[Frames] = []
        self._addresses: list[int] = []
        """Where each payload lies; of messages that are small or have neighbours."""
        self._run = self._small = True
        """All are neighbours; all may be copied."""
        self._heads = 0
        self._end = 0

    def takes(self, frames: Frames) -> bool:
        """Take a message in, unless it cannot go out with those that are in."""
        head, payload = frames
        end = aligned(self._end) + len(payload)
        address = _address(payload)
        run = small = True
        if self._messages:
            last = self._messages[-1].payload
            run = (
                self._run
                and self._addresses[-1] + aligned(len(last)) == address
                and _owner(last) is _owner(payload)
            )
            small = self._small and len(payload) <= COPIED_BYTES and end <= COPIES_BYTES
            if (
                not (run or small)
                or len(self._messages) == BUNDLE_MESSAGES
                or self._heads + len(head) > HEADS_BYTES
                or end > self._most
            ):
                return False
        else:
            small = len(payload) <= COPIED_BYTES
        self._run, self._small = run, small
        self._messages.append(frames)
        self._addresses.append(address)
        self._heads += len(head)
        self._end = end
        return True

    def frames(self, pool: BlockPool) -> Sequence[Buffer]:
        """The message to send: the only one as it is, or a bundle."""
        if len(self._messages) == 1:
            return self._messages[0]
        if not self._run:
            return join(self._messages, pool)
        whole = memoryview(_owner(self._messages[0].payload)).cast("B")
        start = self._addresses[0] - _address(whole)
        return _head_of(self._messages), whole[start : start + self._end].toreadonly()


def join(messages: Sequence[Frames], pool: BlockPool) -> tuple[bytes, Buffer]:
    """The two frames of a bundle; the payloads are copied."""
    body, _ = lay_together([([payload], len(payload)) for _, payload in messages], pool)
    return _head_of(messages), body


def split(bundle: Bundle, frames: Sequence[Buffer]) -> Iterator[tuple[bytes, Buffer]]:
    """The head and the payload of each message, as they would have come alone.

    Raises:
        ProtocolError: there are not two frames, or the table does not give the second one's length. That is
            checked before the first message is given.
    """
    if len(frames) != 2:
        raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"BUNDLE of {len(frames)} frames, 2 are right")
    body = frames[1]
    at = 0
    for _, payload in bundle.items:
        at = aligned(at) + payload
    if at != len(body):
        raise ProtocolError(
            ErrorCode.BAD_PAYLOAD_LENGTH,
            f"a bundle of {len(bundle.items)} messages and {at} bytes, its body has {len(body)}",
        )
    return _messages(bundle, memoryview(body))


def _messages(bundle: Bundle, view: memoryview) -> Iterator[tuple[bytes, Buffer]]:
    at = 0
    for head, size in bundle.items:
        at = aligned(at)
        payload = view[at : at + size]
        small = size < ALWAYS_COPIED_BYTES or size * KEPT_ALIVE < len(view)
        yield head, bytes(payload) if small else payload
        at += size


def _head_of(messages: Sequence[Frames]) -> bytes:
    return encode_head(Bundle(tuple((head, len(payload)) for head, payload in messages)))


def _owner(payload: Buffer) -> Any:
    """The object whose memory it is."""
    return payload.obj if isinstance(payload, memoryview) else payload


def _address(payload: Buffer) -> int:
    return np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
