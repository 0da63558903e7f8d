"""What a cache has done so far."""

from dataclasses import dataclass


@dataclass
class Stats:
    """Counters since the cache was made. ``refused`` counts values heavier than the whole cache."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    expired: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 0.0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0
