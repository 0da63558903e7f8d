"""`GroupCommit`: one disk flush for many records, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

GROUP_RECORDS = 32
GROUP_DELAY_S = 0.005
"""A flush starts when so many records wait, or so long after the first of them."""


class GroupCommit:
    """Flushes soon after records were written, and tells how far the disk has come.

    Args:
        flush: makes everything written so far durable; may raise.
        done: called in the flushing thread with the position up to which everything is durable.
        name: of the thread.
    """

    def __init__(self, *, flush: Callable[[], None], done: Callable[[int], None], name: str) -> None:
        self._flush = flush
        self._done = done
        self._changed = threading.Condition()
        self._written = 0
        self._requests = 0
        self._flushed = 0
        self._requests_done = 0
        self._urgent = False
        self._closing = False
        self.failure: Exception | None = None
        """What `flush` raised; the thread has ended then."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def written(self, position: int) -> None:
        """Records up to this position were written and want a flush."""
        with self._changed:
            if position > self._written:
                self._written = position
                self._changed.notify_all()

    def request(self) -> None:
        """Something other than records wants a flush."""
        with self._changed:
            self._requests += 1
            self._changed.notify_all()

    def wait(self, position: int) -> None:
        """Return when everything up to this position is durable.

        Raises:
            Exception: what `flush` raised.
        """
        with self._changed:
            self._written = max(self._written, position)
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushed >= position or self.failure is not None)
            if self.failure is not None:
                raise self.failure

    def close(self) -> None:
        """Flush what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                self._changed.wait_for(self._is_group, timeout=GROUP_DELAY_S)
                position, requests, self._urgent = self._written, self._requests, False
            try:
                self._flush()
                self._done(position)
            except Exception as error:
                with self._changed:
                    self.failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._flushed, self._requests_done = position, requests
                self._changed.notify_all()

    @property
    def _waiting(self) -> bool:
        return self._written > self._flushed or self._requests > self._requests_done

    def _is_group(self) -> bool:
        return self._urgent or self._closing or self._written - self._flushed >= GROUP_RECORDS
