"""The cache itself.

One ``OrderedDict`` holds the entries from the least to the most recently used one, and one integer
holds their weight together, so that no operation has to walk over all entries.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from weightcache.stats import Stats

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class _Entry(Generic[V]):
    value: V
    weight: int
    expires_at: float | None


def _one(value: object) -> int:
    return 1


class WeightCache(Generic[K, V]):
    """A mapping that forgets.

    Args:
        capacity: the weight that all entries together may have.
        weigh: gives the weight of a value, at least 0. By default every value weighs 1.
        ttl_s: seconds after which an entry counts as absent; None means never.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        capacity: int,
        *,
        weigh: Callable[[V], int] = _one,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self.capacity = capacity
        self.stats = Stats()
        self._weigh = weigh
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._weight = 0

    @property
    def weight(self) -> int:
        """Weight of all entries together, never more than ``capacity``."""
        return self._weight

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """Keys from the least to the most recently used one, expired ones included."""
        return iter(self._entries)

    def get(self, key: K, default: V | None = None) -> V | None:
        """Return the value of ``key`` and mark it as just used; ``default`` if it is absent."""
        entry = self._entries.get(key)
        if entry is not None and self._is_expired(entry):
            self._drop(key)
            self.stats.expired += 1
            entry = None
        if entry is None:
            self.stats.misses += 1
            return default
        self._entries.move_to_end(key)
        self.stats.hits += 1
        return entry.value

    def put(self, key: K, value: V) -> bool:
        """Store ``value`` as the most recently used entry, evicting others to make room.

        Returns:
            False if the value is heavier than the whole cache. Then it is not stored, and an
            older value of the key is gone too: it would be stale.
        """
        weight = self._weigh(value)
        if weight < 0:
            raise ValueError(f"weight of {key!r} is negative: {weight}")
        if weight > self.capacity:
            self.discard(key)
            self.stats.refused += 1
            return False
        expires_at = None if self._ttl_s is None else self._clock() + self._ttl_s
        self._entries[key] = _Entry(value, weight, expires_at)
        self._entries.move_to_end(key)
        self._weight += weight
        self._make_room()
        return True

    def discard(self, key: K) -> bool:
        """Forget ``key``; return whether it was there."""
        if key not in self._entries:
            return False
        self._drop(key)
        return True

    def clear(self) -> None:
        """Forget everything but the statistics."""
        self._entries.clear()
        self._weight = 0

    def _is_expired(self, entry: _Entry[V]) -> bool:
        return entry.expires_at is not None and self._clock() >= entry.expires_at

    def _drop(self, key: K) -> None:
        self._weight -= self._entries.pop(key).weight

    def _make_room(self) -> None:
        while self._weight > self.capacity and self._entries:
            self._drop(next(iter(self._entries)))
            self.stats.evicted += 1
