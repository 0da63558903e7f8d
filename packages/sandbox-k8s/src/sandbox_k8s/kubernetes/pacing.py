"""How many starts are under way at once: more while they succeed, half as many when the cluster says no.

Additive increase, multiplicative decrease, as in TCP: the limit doubles per round until the first sign of
overload and grows by one per round afterwards. A state machine without I/O and without a clock.
"""

from collections import deque

_LONGEST_PAUSE_S = 60.0
_SLOW_FACTOR = 4.0
_SLOW_AT_LEAST_S = 1.0
_WEIGHT = 0.1
_FORGET = 1.002


class Turn:
    """One start that waits for its turn, or has it.

    Attributes:
        admitted_s: Since when it has it; None while it waits.
        over: It was given back.
    """

    def __init__(self) -> None:
        self.admitted_s: float | None = None
        self.over = False


class Pacer:
    """Decides which starts go ahead, first come, first served. Times are those of any one clock, in seconds.

    Args:
        first: The limit to begin with.
        most: The limit never grows above it.

    Attributes:
        limit: Starts that may be under way at once; its whole part counts, at least 1.
        in_flight: Starts that are under way.
        paused_until_s: None goes ahead before.
        slowdowns: How often the limit was halved.
    """

    def __init__(self, first: int, most: int) -> None:
        self.limit = float(min(first, most))
        self.in_flight = 0
        self.paused_until_s = float("-inf")
        self.slowdowns = 0
        self._most = float(most)
        self._doubles_below = self._most
        self._cut_s = float("-inf")
        self._waiting: deque[Turn] = deque()
        self._fastest_s: float | None = None
        self._usual_s = 0.0

    @property
    def waiting(self) -> int:
        """Starts that wait."""
        return len(self._waiting)

    def ask(self) -> Turn:
        """Join the queue."""
        turn = Turn()
        self._waiting.append(turn)
        return turn

    def admit(self, now_s: float, most: int) -> list[Turn]:
        """Let in those whose turn it is, at most so many."""
        let_in: list[Turn] = []
        while self._waiting and self._free() and now_s >= self.paused_until_s and len(let_in) < most:
            turn = self._waiting.popleft()
            turn.admitted_s = now_s
            self.in_flight += 1
            let_in.append(turn)
        return let_in

    def wake_s(self) -> float | None:
        """When to call `admit` again although nothing happened; None when there is no need."""
        return self.paused_until_s if self._waiting and self._free() else None

    def give_back(self, turn: Turn) -> None:
        """A start is over, well or not, or wants no turn any more; said again, it changes nothing."""
        if turn.over:
            return
        turn.over = True
        if turn.admitted_s is None:
            self._waiting.remove(turn)
        else:
            self.in_flight -= 1

    def succeeded(self, turn: Turn) -> None:
        """A sandbox came up. The limit grows only if it was what held others up."""
        busy = self._waiting or self.in_flight >= int(self.limit)
        if turn.admitted_s is None or turn.admitted_s < self._cut_s or not busy:
            return
        step = 1.0 if self.limit < self._doubles_below else 1.0 / self.limit
        self.limit = min(self._most, self.limit + step)

    def overloaded(self, begun_s: float, now_s: float, retry_after_s: float | None = None) -> bool:
        """Something that began then shows that it is too much; True when the limit was halved.

        What began before the last time that the limit was halved says nothing new, but a wait that the
        server asks for always counts, for a minute at most: then a start finds out whether it is better.
        """
        if retry_after_s is not None:
            self.paused_until_s = max(self.paused_until_s, now_s + min(retry_after_s, _LONGEST_PAUSE_S))
        if begun_s < self._cut_s:
            return False
        self._cut_s = now_s
        self.limit = max(1.0, self.limit / 2)
        self._doubles_below = self.limit
        self.slowdowns += 1
        return True

    def answered(self, seconds: float, now_s: float) -> bool:
        """The API server took so long for a create; True when that was so much that the limit was halved."""
        if self._fastest_s is None:
            self._fastest_s = self._usual_s = seconds
            return False
        self._fastest_s = min(seconds, self._fastest_s * _FORGET)
        self._usual_s += _WEIGHT * (seconds - self._usual_s)
        if self._usual_s <= _SLOW_FACTOR * self._fastest_s + _SLOW_AT_LEAST_S:
            return False
        slowed = self.overloaded(now_s - seconds, now_s)
        if slowed:
            self._usual_s = self._fastest_s
        return slowed

    def _free(self) -> bool:
        return self.in_flight < int(self.limit)
