"""`RolloutIndex`: which rollouts were taken, whatever the identity of the message that brought them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Verdict = Literal["new", "duplicate", "fenced"]

REMEMBER_DONE = 1 << 16
"""Rollouts done with that a checkpoint names, latest last; 1.7 MB of it at most."""


class RolloutIndex:
    """Latest attempt of each rollout seen, oldest forgotten first.

    A message carries all parts of one rollout, so (rollout id, attempt) decides for every part at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._attempts: dict[bytes, int] = {}
        self._done: dict[bytes, int] = {}
        self.forgotten = 0
        """Rollouts dropped from the index because it was full."""

    def judge(self, rollout_id: bytes, attempt: int) -> Verdict:
        """`duplicate`: this attempt was taken. `fenced`: a later attempt was taken, this one was given up."""
        held = self._attempts.get(rollout_id)
        if held is None or attempt > held:
            return "new"
        return "duplicate" if attempt == held else "fenced"

    def take(self, rollout_id: bytes, attempt: int) -> None:
        """Remember that this attempt was taken."""
        self._attempts.pop(rollout_id, None)
        self._attempts[rollout_id] = attempt
        if len(self._attempts) > self._capacity:
            del self._attempts[next(iter(self._attempts))]
            self.forgotten += 1

    def finish(self, rollout_id: bytes, attempt: int) -> None:
        """The consumer is done with this attempt."""
        self._done.pop(rollout_id, None)
        self._done[rollout_id] = attempt
        if len(self._done) > min(REMEMBER_DONE, self._capacity):
            del self._done[next(iter(self._done))]

    def restart(self) -> None:
        """Forget what was done: a checkpoint is loaded that says it itself."""
        self._done.clear()

    def done(self) -> Iterator[tuple[bytes, int]]:
        """(rollout id, attempt) of what the consumer is done with, oldest first, as far as remembered."""
        return iter(self._done.items())
