"""`Member`: one rollout in the receiver's hands."""

from __future__ import annotations

import msgspec

from trainer_bridge.codec import Data, Frames
from trainer_bridge.messages import DataHead
from trainer_bridge.session.peers import Accepted, Identity
from trainer_bridge.staleness import Age


class Member(msgspec.Struct, eq=False, gc=False):
    """A message that was accepted and is not done with: it waits, or is leased."""

    identity: Identity
    rollout_id: bytes
    group_id: bytes
    attempt: int
    group_size: int
    """As the sender said; 0: it did not."""
    nbytes: int
    position: int
    """Its place in the store; 0 without one."""
    data: Data | None
    """None: it lies in the store only, until it is handed out."""
    frames: Frames | None = None
    """As they came, for other ranks. None: they lie in the store."""
    restored: bool = False
    """An earlier process stored it."""
    nacks: int = 0
    age: Age | None = None
    """What staleness needs. None: not looked at yet."""

    @classmethod
    def arrived(cls, accepted: Accepted, frames: Frames, position: int) -> Member:
        """From a message that just came."""
        head = accepted.data.head
        return cls(
            accepted.identity,
            head.rollout_id,
            head.group_id,
            head.attempt,
            head.group_size,
            accepted.nbytes,
            position,
            accepted.data,
            frames,
        )

    @classmethod
    def stored(cls, identity: Identity, head: DataHead, *, nbytes: int, position: int) -> Member:
        """From a record of the store."""
        return cls(
            identity,
            head.rollout_id,
            head.group_id,
            head.attempt,
            head.group_size,
            nbytes,
            position,
            None,
            restored=True,
        )
