"""`Flights`: what is on the wire of one connection without an acknowledgement, and when it is sent again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from trainer_bridge.config import Timing
from trainer_bridge.seqset import SeqSet

REFUSALS_BEFORE_DROP = 3
"""A message whose content the receiver refuses is sent so often; then it is given up."""


class _Flight(msgspec.Struct):
    """A message that was sent and is not acknowledged as received."""

    nbytes: int
    due_s: float
    """When it is sent again if nothing is heard of it."""
    queued: bool = False
    """It waits in line to be sent again."""
    refused: int = 0
    """Refusals of its content."""
    damaged: int = 0
    """Copies of it that arrived damaged."""


class Flights:
    """Messages by number, rising; a message that is sent again keeps its place.

    Args:
        timing: how long to wait for an acknowledgement, and how the waits after damage grow.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._flights: dict[int, _Flight] = {}
        self._again: deque[int] = deque()
        self.nbytes = 0
        self.resent = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, seq: int) -> bool:
        return seq in self._flights

    def clear(self) -> None:
        """The connection is gone, and everything on it."""
        self._flights.clear()
        self._again.clear()
        self.nbytes = 0

    def next_again(self) -> int | None:
        """The message that is to be sent again now. None: there is none."""
        while self._again:
            if self._again[0] in self._flights:
                return self._again[0]
            self._again.popleft()
        return None

    def mark_sent(self, seq: int, nbytes: int, now_s: float) -> bool:
        """A message was sent. True: for the first time on this connection."""
        due_s = now_s + self._timing.resend_s
        if self._again and self._again[0] == seq:
            self._again.popleft()
            flight = self._flights[seq]
            flight.due_s, flight.queued = due_s, False
            self.resent += 1
            return False
        self._flights[seq] = _Flight(nbytes, due_s)
        self.nbytes += nbytes
        return True

    def not_sent(self, seqs: Sequence[int]) -> None:
        """The transport did not take these after all: they come next."""
        for seq in seqs:
            self._flights[seq].queued = True
        self._again.extendleft(reversed(seqs))
        self.resent -= len(seqs)  # sending them will count them

    def land(self, seq: int) -> None:
        """Nothing more is to be done about a message."""
        flight = self._flights.pop(seq, None)
        if flight is not None:
            self.nbytes -= flight.nbytes

    def land_all(self, received: SeqSet, settled: SeqSet) -> None:
        """As `land`, for everything in either set."""
        highest = max(received.highest, settled.highest)
        landed: list[int] = []
        for seq in self._flights:  # rising, so that one acknowledgement costs what it acknowledges
            if seq > highest:
                break
            if seq in received or seq in settled:
                landed.append(seq)
        for seq in landed:
            self.land(seq)

    def refuse(self, seq: int) -> bool:
        """The receiver refuses what a message says. True: for the last time, it is to be given up."""
        flight = self._flights[seq]
        if flight.queued:
            return False  # the same refusal twice, or one of an earlier sending
        flight.refused += 1
        if flight.refused >= REFUSALS_BEFORE_DROP:
            return True
        self._queue(seq, flight)
        return False

    def damage(self, seq: int, now_s: float) -> int:
        """A copy of a message arrived damaged: another one goes out, after a wait that grows each time.

        Returns:
            How many copies of it did.
        """
        flight = self._flights[seq]
        if flight.queued:
            return flight.damaged
        flight.damaged += 1
        if flight.damaged == 1:
            self._queue(seq, flight)
        else:
            wait_s = self._timing.heartbeat_s * 2.0 ** min(flight.damaged - 2, 32)
            flight.due_s = now_s + min(wait_s, self._timing.resend_s)
        return flight.damaged

    def find_overdue(self, now_s: float) -> None:
        """Put everything in line that has waited for long enough."""
        for seq, flight in self._flights.items():
            if now_s >= flight.due_s and not flight.queued:
                self._queue(seq, flight)

    def _queue(self, seq: int, flight: _Flight) -> None:
        flight.queued = True
        self._again.append(seq)
