"""One bucket per key, for as long as it matters."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from ratekeeper.bucket import BucketState, TokenBucket

K = TypeVar("K", bound=Hashable)


class KeyedLimiter(Generic[K]):
    """Gives every key a bucket of its own.

    A full bucket is the same as none, so ``prune`` may forget it. It runs by itself whenever the
    number of buckets has doubled since the last time, so memory follows the number of busy keys.
    """

    def __init__(self, rate: float, burst: float, *, clock: Callable[[], float] = time.time) -> None:
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._buckets: dict[K, TokenBucket] = {}
        self._prune_at = 1024

    def __len__(self) -> int:
        return len(self._buckets)

    def allow(self, key: K, count: float = 1) -> bool:
        """Take ``count`` tokens from the bucket of ``key``; return whether they were there."""
        return self._bucket(key).take(count)

    def wait_s(self, key: K, count: float = 1) -> float:
        """Return the seconds after which ``allow`` would be true, if nobody else asks."""
        return self._bucket(key).wait_s(count)

    def prune(self) -> int:
        """Forget full buckets; return how many there were."""
        full = [key for key, bucket in self._buckets.items() if bucket.is_full]
        for key in full:
            del self._buckets[key]
        return len(full)

    def state(self) -> dict[K, BucketState]:
        """Return what ``restore`` needs; full buckets are left out."""
        self.prune()
        return {key: bucket.state() for key, bucket in self._buckets.items()}

    def restore(self, states: Mapping[K, BucketState]) -> None:
        """Go on from saved states; keys that are not named keep their buckets."""
        for key, state in states.items():
            self._bucket(key).restore(state)

    def _bucket(self, key: K) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._prune_at:
                self.prune()
                self._prune_at = max(1024, 2 * len(self._buckets))
            bucket = self._buckets[key] = TokenBucket(self.rate, self.burst, clock=self._clock)
        return bucket
