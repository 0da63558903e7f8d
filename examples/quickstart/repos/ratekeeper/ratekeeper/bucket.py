"""One token bucket."""

import time
from collections.abc import Callable
from typing import NamedTuple


class BucketState(NamedTuple):
    """What has to be saved of a bucket: its tokens at an instant of the wall clock, in seconds."""

    tokens: float
    updated_at: float


class TokenBucket:
    """Holds up to ``burst`` tokens and gets ``rate`` new ones per second.

    Nothing runs in the background: the tokens that are due are added when somebody asks.

    Args:
        rate: tokens per second.
        burst: what the bucket can hold; it starts full.
        clock: the wall clock in seconds.
    """

    def __init__(self, rate: float, burst: float, *, clock: Callable[[], float] = time.time) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError(f"rate and burst must be positive, not {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._updated_at = clock()

    @property
    def tokens(self) -> float:
        """Tokens that are in the bucket now, from 0 to ``burst``."""
        self._refill()
        return self._tokens

    @property
    def is_full(self) -> bool:
        """Whether the bucket is as good as a new one."""
        return self.tokens >= self.burst

    def take(self, count: float = 1) -> bool:
        """Take ``count`` tokens if they are there; return whether they were.

        Raises:
            ValueError: if the bucket could never hold so many.
        """
        self._check(count)
        self._refill()
        if self._tokens < count:
            return False
        self._tokens -= count
        return True

    def wait_s(self, count: float = 1) -> float:
        """Return the seconds after which ``count`` tokens will be there, 0.0 if they are."""
        self._check(count)
        self._refill()
        return max(0.0, (count - self._tokens) / self.rate)

    def state(self) -> BucketState:
        """Return what ``restore`` needs."""
        self._refill()
        return BucketState(self._tokens, self._updated_at)

    def restore(self, state: BucketState) -> None:
        """Go on from a saved state; the time since then counts."""
        self._tokens = min(self.burst, state.tokens)
        self._updated_at = state.updated_at

    def _check(self, count: float) -> None:
        if not 0 < count <= self.burst:
            raise ValueError(f"cannot take {count} tokens from a bucket of {self.burst}")

    def _refill(self) -> None:
        now = self._clock()
        due = (now - self._updated_at) * self.rate
        self._tokens = min(self.burst, self._tokens + due)
        self._updated_at = now
