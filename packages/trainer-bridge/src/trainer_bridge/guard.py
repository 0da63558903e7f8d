"""`Guard`: what one misbehaving peer may cost the others."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from trainer_bridge.config import ReceiverConfig

REMEMBERED = 1 << 14
"""Connections, and peers that sent something malformed, that are remembered; the first met go first."""


class Bucket(msgspec.Struct):
    """What one connection may still say."""

    tokens: float
    refilled_s: float


class Record(msgspec.Struct):
    """What was malformed of one peer."""

    malformed: int = 0
    since_s: float = 0.0
    banned_until_s: float = 0.0


class Guard:
    """Rate limit and quarantine.

    New samples are bounded by credit; everything else (greetings, reports, repetitions, noise) by a token
    bucket per connection: `messages_per_s`, one second's worth at once. Above that, messages are left unread
    until the bucket fills. A peer (a key, where there are keys, else a connection) that sends
    `malformed_limit` malformed messages within `quarantine_s` is left unread for `quarantine_s`.
    """

    def __init__(self, config: ReceiverConfig) -> None:
        self._rate = float(config.messages_per_s)
        self._malformed_limit = config.malformed_limit
        self._quarantine_s = config.quarantine_s
        self._buckets: OrderedDict[bytes, Bucket] = OrderedDict()
        self._records: OrderedDict[bytes | str, Record] = OrderedDict()
        self.unread = 0
        """Messages that were left unread, for either reason. What was in them is sent again later."""
        self.quarantines = 0

    def admits(self, connection: bytes, user: str, now_s: float) -> bool:
        """False: leave this message unread."""
        bucket = self._bucket(connection, now_s)
        if bucket.tokens < self._rate:
            bucket.tokens = min(bucket.tokens + (now_s - bucket.refilled_s) * self._rate, self._rate)
        bucket.refilled_s = now_s
        record = self._records.get(user or connection) if self._records else None
        if bucket.tokens < 1.0 or (record is not None and now_s < record.banned_until_s):
            self.unread += 1
            return False
        return True

    def charge(self, connection: bytes, now_s: float) -> None:
        """A message of this connection was something else than a new sample."""
        self._bucket(connection, now_s).tokens -= 1.0

    def malformed(self, connection: bytes, user: str, now_s: float) -> bool:
        """A message of this peer was malformed. True: it is in quarantine from now on."""
        record = self._records.get(user or connection)
        if record is None:
            record = self._records[user or connection] = Record()
            if len(self._records) > REMEMBERED:
                self._records.popitem(last=False)
        if now_s - record.since_s > self._quarantine_s:
            record.since_s, record.malformed = now_s, 0
        record.malformed += 1
        if record.malformed < self._malformed_limit:
            return False
        record.malformed = 0
        record.banned_until_s = now_s + self._quarantine_s
        self.quarantines += 1
        return True

    def _bucket(self, connection: bytes, now_s: float) -> Bucket:
        bucket = self._buckets.get(connection)
        if bucket is None:
            bucket = self._buckets[connection] = Bucket(tokens=self._rate, refilled_s=now_s)
            if len(self._buckets) > REMEMBERED:
                self._buckets.popitem(last=False)
        return bucket
