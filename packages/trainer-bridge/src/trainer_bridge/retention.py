"""`Retention`: which committed records a store may delete."""

from __future__ import annotations

from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.config import KeepCommitted
from trainer_bridge.session.watermark import Watermark


class Retention:
    """The rule of `ReceiverConfig.keep_committed`.

    Which checkpoints were saved is not kept over restarts: after one, the checkpoint that was loaded counts
    as the first, and nothing goes until there are `checkpoints` of them.

    Args:
        keep: see `KeepCommitted`.
        checkpoints: how many checkpoints the trainer may go back to.
    """

    def __init__(self, keep: KeepCommitted, checkpoints: int) -> None:
        self.keep: KeepCommitted = keep
        self._checkpoints = checkpoints
        self._latest: ReceiverState | None = None
        # Replaced, never changed: the store's thread reads it while the trainer's adds to it.
        self._marks: tuple[Watermark, ...] = ()
        self.news = 0
        """Rises when records may have become free to go."""

    def saved(self, state: ReceiverState) -> None:
        """A checkpoint was saved. Saying it again changes nothing."""
        if self._latest is not None and self._latest.done == state.done:
            return
        self._latest = state
        self._marks = (*self._marks, state.watermark())[-self._checkpoints :]
        self.news += 1

    def loaded(self, state: ReceiverState) -> None:
        """The trainer goes on from this checkpoint; those after it are void."""
        self._latest = None
        self._marks = ()
        self.saved(state)

    def allows(self, done: Watermark) -> bool:
        """True: no checkpoint that the trainer may go back to needs one of these committed messages again."""
        if self.keep != "checkpoint":
            return self.keep == "none"
        marks = self._marks
        return len(marks) == self._checkpoints and not any(mark.lacks(done) for mark in marks)
