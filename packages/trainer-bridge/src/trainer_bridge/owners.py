"""`Owners`: which key speaks for which producer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.state_file import OwnersFile

PRODUCERS_PER_KEY = 4096
"""Producer ids that one key can own; one more, and it loses that for which it said HELLO the longest ago. So
a key can push out nobody's ids but its own."""


class Owners:
    """The first key that says HELLO for a producer id owns it, until the key leaves the allow-list.

    `claim` and `take_file` may be called from different threads.

    Args:
        kept: what an earlier receiver wrote down. None: nothing.
        changed: called by `claim` when there is something to write down. None: nobody writes; all is
            forgotten with this object.
    """

    def __init__(self, kept: OwnersFile | None = None, changed: Callable[[], None] | None = None) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._news = False
        self._producers: dict[str, dict[bytes, None]] = {}
        """Key -> its producers; the last one that said HELLO stands last."""
        if kept is not None:
            for user, producers in kept.keys.items():
                self._producers[user] = dict.fromkeys(bytes.fromhex(each) for each in producers)
        self._owners = {each: user for user, producers in self._producers.items() for each in producers}

    def keep_only(self, users: Collection[str]) -> None:
        """Whoever is not named here has left the allow-list, and owns nothing any more."""
        with self._lock:
            for user in [user for user in self._producers if user not in users]:
                for producer in self._producers.pop(user):
                    del self._owners[producer]

    def claim(self, producer: bytes, user: str) -> None:
        """A key says that it speaks for a producer.

        Raises:
            ProtocolError: the producer belongs to another key.
        """
        with self._lock:
            owner = self._owners.setdefault(producer, user)
            if owner != user:
                raise ProtocolError(
                    ErrorCode.WRONG_KEY,
                    f"producer {producer.hex()} belongs to key {owner}, not {user}: give every worker a "
                    f"spool and a key of its own; if {user} replaces {owner}, take {owner} out of the "
                    "receiver's allow-list and restart the receiver",
                )
            mine = self._producers.setdefault(user, {})
            known = producer in mine
            mine.pop(producer, None)
            mine[producer] = None
            if known:
                return
            self._news = True
            if len(mine) > PRODUCERS_PER_KEY:
                oldest = next(iter(mine))
                del mine[oldest], self._owners[oldest]
        if self._changed is not None:
            self._changed()

    def take_file(self) -> OwnersFile | None:
        """What is to be written down. None: nothing new since the last call."""
        with self._lock:
            if not self._news:
                return None
            self._news = False
            named = self._producers.items()
            return OwnersFile(keys={user: tuple(each.hex() for each in mine) for user, mine in named})
