"""A least-recently-used cache that is bounded by the weight of its values."""

from weightcache.cache import WeightCache
from weightcache.memoize import cached
from weightcache.stats import Stats

__all__ = ["Stats", "WeightCache", "cached"]
