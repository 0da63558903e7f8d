"""Answers, and the memory of the last ones: a request that is sent again is answered, not run again."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_KEPT = 64
_LARGEST_KEPT = 1 << 20


@dataclass(frozen=True)
class Reply:
    """A whole answer.

    Attributes:
        repeatable: Whether the same request may get it again.
    """

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    repeatable: bool = True

    @classmethod
    def json(cls, value: Any, status: int = 200) -> "Reply":
        """An answer in JSON."""
        return cls(json.dumps(value).encode(), status)


class Replies:
    """The answers of the last 64 request ids; a repetition waits while its first is still under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Reply] = OrderedDict()
        self._under_way: dict[str, threading.Event] = {}

    def once(
        self, request_id: str, produce: Callable[[], Reply | Iterable[bytes]]
    ) -> Reply | Iterable[bytes]:
        """The kept answer, or a new one."""
        while True:
            with self._lock:
                kept = self._kept.get(request_id)
                if kept is not None:
                    return kept
                ready = self._under_way.get(request_id)
                if ready is None:
                    ready = self._under_way[request_id] = threading.Event()
                    break
            ready.wait()
        try:
            reply = produce()
            if isinstance(reply, Reply) and reply.repeatable and len(reply.body) <= _LARGEST_KEPT:
                with self._lock:
                    self._kept[request_id] = reply
                    while len(self._kept) > _KEPT:
                        self._kept.popitem(last=False)
            return reply
        finally:
            with self._lock:
                del self._under_way[request_id]
            ready.set()
