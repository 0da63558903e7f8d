"""`RolloutIndex`: which rollouts were taken, whatever the identity of the message that brought them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Verdict = Literal["new", "duplicate", "fenced"]

REMEMBER_DONE = 1 << 16
"""Rollouts done with that a checkpoint names, latest last; 1.7 MB of it at most."""
_TRAINED = 1


class RolloutIndex:
    """Latest attempt of each rollout seen, oldest forgotten first.

    A message carries all parts of one rollout, so (rollout id, attempt) decides for every part at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Attempt x 2, and 1 if any attempt was trained on: one number per rollout, of which there are many.
        self._attempts: dict[bytes, int] = {}
        self._done: dict[bytes, int] = {}
        self.forgotten = 0
        """Rollouts dropped from the index because it was full."""

    def judge(self, rollout_id: bytes, attempt: int) -> Verdict:
        """`duplicate`: this attempt was taken. `fenced`: a later attempt was taken, this one was given up."""
        held = self._attempts.get(rollout_id)
        if held is None or attempt > held >> 1:
            return "new"
        return "duplicate" if attempt == held >> 1 else "fenced"

    def is_trained(self, rollout_id: bytes) -> bool:
        """True: some attempt of it was trained on, as far as remembered."""
        return bool(self._attempts.get(rollout_id, 0) & _TRAINED)

    def take(self, rollout_id: bytes, attempt: int) -> None:
        """Remember that this attempt was taken."""
        trained = self._attempts.pop(rollout_id, 0) & _TRAINED
        self._attempts[rollout_id] = attempt << 1 | trained
        if len(self._attempts) > self._capacity:
            del self._attempts[next(iter(self._attempts))]
            self.forgotten += 1

    def finish(self, rollout_id: bytes, attempt: int, *, trained: bool) -> None:
        """The consumer is done with this attempt: trained on, or dropped."""
        flag = (self._done.pop(rollout_id, 0) & _TRAINED) | trained
        self._done[rollout_id] = attempt << 1 | flag
        if len(self._done) > min(REMEMBER_DONE, self._capacity):
            del self._done[next(iter(self._done))]
        held = self._attempts.get(rollout_id)
        if held is not None:
            self._attempts[rollout_id] = held | flag

    def restart(self) -> None:
        """Forget what was done: a checkpoint is loaded that says it itself."""
        self._done.clear()
        for rollout_id, held in self._attempts.items():
            self._attempts[rollout_id] = held & ~_TRAINED

    def done(self) -> Iterator[tuple[bytes, int]]:
        """(rollout id, attempt) of what the consumer is done with, oldest first, as far as remembered."""
        return ((rollout_id, held >> 1) for rollout_id, held in self._done.items())

    def dropped(self) -> Iterator[bytes]:
        """Those of `done` that were never trained on."""
        return (rollout_id for rollout_id, held in self._done.items() if not held & _TRAINED)
