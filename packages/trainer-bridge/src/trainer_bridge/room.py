"""`Room`: how much a store may still take."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Literal

Level = Literal["ample", "low", "full"]

LOW = 0.9
"""Of what there is for the store; above that, it is said."""


class Room:
    """The store's size against its quota and against what is free on its disk. Safe from any thread.

    Args:
        folder: on the disk in question.
        quota_bytes: see `ReceiverConfig.store_quota_bytes`.
        segment_bytes: room that is kept for the segment that is being written, so that what is full holds at
            least one segment that can be deleted.
    """

    def __init__(self, folder: Path, *, quota_bytes: int | None, segment_bytes: int) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._segment_bytes = segment_bytes
        self.level: Level = "ample"
        """`full`: the quota is used up; no more is to be asked for."""
        self.left_bytes = 0
        """Until the quota or the disk is full, whichever comes first."""
        self._lock = threading.Lock()
        self._text = ""
        self._news: deque[str] = deque()

    def measure(self, *, closed_bytes: int, open_bytes: int) -> None:
        """Look at the disk, and say it when the level has changed.

        Args:
            closed_bytes: of segments that are complete.
            open_bytes: of the one that is being written.
        """
        used = closed_bytes + open_bytes
        capacity = used + shutil.disk_usage(self._folder).free
        if self._quota_bytes is not None:
            capacity = min(capacity, self._quota_bytes)
        self.left_bytes = max(capacity - used, 0)
        if self._quota_bytes is not None and closed_bytes + self._segment_bytes > self._quota_bytes:
            level: Level = "full"
        else:
            level = "low" if used > LOW * capacity else "ample"
        with self._lock:
            if level != self.level:
                self.level = level
                self._say(used)

    @property
    def obstacle(self) -> str:
        """Why no more is asked for. Empty: more is."""
        return self._text if self.level == "full" else ""

    def take_news(self) -> list[str]:
        """What is to be told since the last call."""
        news: list[str] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def _say(self, used: int) -> None:
        of = "" if self._quota_bytes is None else f" of {self._quota_bytes} (store_quota_bytes)"
        self._text = f"the store {self._folder} has {used} bytes{of}"
        if self.level == "full":
            self._text += (
                ": senders get no more credit until segments are deleted; save a checkpoint, raise the "
                "quota, or change keep_committed"
            )
        elif self.level == "low":
            self._text += f", {self.left_bytes} more and it is full"
        else:
            self._text += ": there is room again"
        self._news.append(self._text)
