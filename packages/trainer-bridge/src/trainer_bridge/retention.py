"""`Retention`: which committed records a store may delete."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.config import KeepCommitted
from trainer_bridge.errors import DamagedError
from trainer_bridge.session.watermark import Ranges, Watermark
from trainer_bridge.state_file import CheckpointsFile, load, save

FILE = "checkpoints.json"


class Mark(NamedTuple):
    """What a saved checkpoint holds."""

    done: dict[str, tuple[Ranges, ...]]
    """As it stands in the state."""
    watermark: Watermark


class Retention:
    """The rule of `ReceiverConfig.keep_committed`.

    What the saved checkpoints hold is in `checkpoints.json`: a receiver that is started again deletes what it
    would have deleted, and needs no more room than before.

    Args:
        folder: of the segments.
        keep: see `KeepCommitted`.
        checkpoints: how many checkpoints the trainer may go back to.

    Raises:
        SpoolError: the file is damaged, or cannot be read.
    """

    def __init__(self, folder: Path, keep: KeepCommitted, checkpoints: int) -> None:
        self.keep: KeepCommitted = keep
        self._checkpoints = checkpoints
        self._path = folder / FILE
        # Replaced, never changed: the store's thread reads it while the trainer's adds to it.
        self._marks = self._read() if keep == "checkpoint" else ()
        self.news = 0
        """Rises when records may have become free to go."""
        self._written = 0

    def saved(self, state: ReceiverState) -> None:
        """A checkpoint was saved. Saying it again changes nothing."""
        if self._marks and self._marks[-1].done == state.done:
            return
        self._marks = (*self._marks, Mark(state.done, state.watermark()))[-self._checkpoints :]
        self.news += 1

    def loaded(self, state: ReceiverState) -> None:
        """The trainer goes on from this checkpoint; those after it are void."""
        mine = state.watermark()
        before = [mark for mark in self._marks if mark.done != state.done]
        self._marks = tuple(mark for mark in before if not mine.lacks(mark.watermark))
        self.saved(state)

    def allows(self, done: Watermark) -> bool:
        """True: no checkpoint that the trainer may go back to needs one of these committed messages again."""
        if self.keep != "checkpoint":
            return self.keep == "none"
        marks = self._marks
        return len(marks) == self._checkpoints and not any(mark.watermark.lacks(done) for mark in marks)

    def save(self) -> None:
        """Write down what is new; from one thread.

        Raises:
            SpoolError: the disk does not take it.
        """
        news = self.news
        if self.keep == "checkpoint" and news != self._written:
            save(self._path, CheckpointsFile(saved=tuple(mark.done for mark in self._marks)))
            self._written = news

    def _read(self) -> tuple[Mark, ...]:
        file = load(self._path, CheckpointsFile)
        if file is None:
            return ()
        try:
            marks = tuple(Mark(done, Watermark.from_plain(done)) for done in file.saved)
        except ValueError as error:
            raise DamagedError(f"cannot read {self._path} ({error}): {file.advice}") from error
        return marks[-self._checkpoints :]
