"""A lease: a deadline that its owner moves on. No clock and no thread in here; the caller tells the time."""


class Lease:
    """How long nobody needs to be heard of.

    Args:
        length_s: How long it lasts from the last renewal; None means for ever.
        now_s: Monotonic seconds.
    """

    def __init__(self, length_s: float | None, now_s: float) -> None:
        self.length_s = length_s
        self.renewed_s = now_s
        self._deadline_s = self._after(now_s)

    def renew(self, now_s: float) -> None:
        """Start it anew; it never becomes shorter by that."""
        self.renewed_s = now_s
        after_s = self._after(now_s)
        if self._deadline_s is None or after_s is None:
            self._deadline_s = after_s
        else:
            self._deadline_s = max(self._deadline_s, after_s)

    def change(self, length_s: float | None, now_s: float) -> None:
        """Give it another length, counted from now; it may become shorter."""
        self.length_s = length_s
        self.renewed_s = now_s
        self._deadline_s = self._after(now_s)

    @property
    def deadline_s(self) -> float | None:
        """When it runs out; None when it never does."""
        return self._deadline_s

    def _after(self, now_s: float) -> float | None:
        return None if self.length_s is None else now_s + self.length_s
