"""Rate limits with token buckets."""

from ratekeeper.bucket import BucketState, TokenBucket
from ratekeeper.limiter import KeyedLimiter
from ratekeeper.rate import parse_rate

__all__ = ["BucketState", "KeyedLimiter", "TokenBucket", "parse_rate"]
