"""What the launcher did and for whom: bounded, in memory, the judge of who owned the sandbox when."""

from collections import deque
from dataclasses import dataclass
from typing import Any

KEPT = 4096


@dataclass(slots=True)
class Entry:
    """One line of the log.

    Attributes:
        number: Counts from 1; a gap at the front means that older lines made room.
        at_s: The launcher's monotonic seconds.
        what: ``command``, ``session``, ``read``, ``write`` (each begins, and has an ``end``), ``end``,
            ``fence`` (the number is in force), ``fenced`` (nothing of older owners runs any more: the
            answer), ``lease`` (its length changed), ``refused`` (requests of somebody who is not the owner),
            ``over``.
        epoch: The caller's; None for a caller that knows no epochs.
        owner: The epoch in force.
        of: For ``end`` the number of what ended, for ``fenced`` of the ``fence``; else 0.
        request_id: As the caller named the request; None when it did not.
        times: How many requests a ``refused`` line stands for; 1 for every other line.
    """

    number: int
    at_s: float
    what: str
    epoch: int | None
    owner: int
    of: int = 0
    request_id: str | None = None
    times: int = 1


class Log:
    """The last `KEPT` lines, written under the lock that also changes the owner: their order is the truth."""

    def __init__(self, kept: int = KEPT) -> None:
        self._entries: deque[Entry] = deque()
        self._kept = kept
        self._refused: dict[tuple[int | None, int], Entry] = {}
        self._last = 0

    def add(
        self,
        at_s: float,
        what: str,
        epoch: int | None,
        owner: int,
        *,
        of: int = 0,
        request_id: str | None = None,
    ) -> int:
        """Write a line; returns its number."""
        self._last += 1
        self._entries.append(Entry(self._last, at_s, what, epoch, owner, of, request_id))
        if len(self._entries) > self._kept:
            gone = self._entries.popleft()
            if gone.what == "refused":
                del self._refused[gone.epoch, gone.owner]
        return self._last

    def refused(self, at_s: float, epoch: int | None, owner: int) -> None:
        """Write that somebody was refused: one line for all such requests of one epoch under one owner.

        A zombie that asks again and again would else push out what the log is kept for.
        """
        line = self._refused.get((epoch, owner))
        if line is not None:
            line.times += 1
            return
        self.add(at_s, "refused", epoch, owner)
        self._refused[epoch, owner] = self._entries[-1]

    def after(self, number: int) -> list[dict[str, Any]]:
        """The lines above a number, the oldest first, as JSON objects."""
        names = Entry.__slots__
        return [
            {name: getattr(entry, name) for name in names}
            for entry in list(self._entries)
            if entry.number > number
        ]
