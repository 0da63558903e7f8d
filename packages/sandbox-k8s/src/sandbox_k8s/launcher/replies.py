"""Answers, and the memory of them: a request that is sent again is answered, never carried out again.

That a request was carried out is remembered for as long as its sender may send it again, which the sender
says. Answers are remembered while there is room for them; whoever asks again for one that made room, or was
too large, hears that it is gone. So memory has two bounds: 8 MiB of answers, and 32,768 requests of some 200
bytes each. When all of those may still come again, a new one is refused before anything is begun: nothing is
forgotten for it.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .clock import monotonic_s

_MOST_BYTES = 8 << 20
_MOST_REQUESTS = 1 << 15
_FIRST_LOOK = 1 << 10
_OVERHEAD = 512


class AnswerGoneError(Exception):
    """The request was carried out, and its answer is not kept any more."""


class TooManyRequestsError(Exception):
    """No further request can be remembered at the moment; nothing was begun."""


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"

    @classmethod
    def json(cls, value: Any, status: int = 200) -> "Reply":
        """An answer in JSON."""
        return cls(json.dumps(value).encode(), status)


Answer = Reply | Generator[bytes]


@dataclass(frozen=True)
class Asked:
    """What makes two requests one: the same path, of the same owner (None for a guest), under the same id."""

    path: str
    epoch: int | None
    request_id: str

    def digest(self) -> bytes:
        """The same in 16 bytes."""
        text = f"{self.epoch} {self.path} {self.request_id}"
        return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()


class Replies:
    """What was carried out, and the answers; a repetition waits while its first is still under way.

    Args:
        most_bytes: Of all kept answers together.
        most_requests: That are remembered at once.
        now_s: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        most_bytes: int = _MOST_BYTES,
        most_requests: int = _MOST_REQUESTS,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._most_bytes = most_bytes
        self._most_requests = most_requests
        self._now_s = now_s
        self._lock = threading.Lock()
        self._until_s: dict[bytes, float] = {}
        self._answers: OrderedDict[bytes, Reply] = OrderedDict()
        self._size = 0
        self._look_at = min(_FIRST_LOOK, most_requests)
        self._under_way: dict[bytes, threading.Event] = {}

    def once(
        self, asked: Asked, keep_s: float, produce: Callable[[], Answer], allowed: Callable[[], object]
    ) -> Answer:
        """The kept answer, or a new one.

        Args:
            asked: The request.
            keep_s: How long after its answer it may come again.
            produce: Carries it out. When it raises nothing was begun, and the request may come anew.
            allowed: Raises when the caller must not see a kept answer (any more).

        Raises:
            AnswerGoneError: It was carried out before.
            TooManyRequestsError: It was not carried out.
        """
        key = asked.digest()
        while True:
            with self._lock:
                if key in self._until_s:
                    kept = self._answers.get(key)
                    break
                ready = self._under_way.get(key)
                if ready is None:
                    self._make_room()
                    self._under_way[key] = threading.Event()
            if ready is None:
                return self._carry_out(key, keep_s, produce)
            ready.wait()
        allowed()
        if kept is None:
            raise AnswerGoneError(
                f"request {asked.request_id} was carried out; its answer was too large to keep, or made room "
                "for later ones"
            )
        return kept

    def _carry_out(self, key: bytes, keep_s: float, produce: Callable[[], Answer]) -> Answer:
        try:
            answer = produce()
            with self._lock:
                self._until_s[key] = self._now_s() + keep_s
                if isinstance(answer, Reply):
                    self._keep(key, answer)
            return answer
        finally:
            with self._lock:
                ready = self._under_way.pop(key)
            ready.set()

    def _keep(self, key: bytes, answer: Reply) -> None:
        if len(answer.body) + _OVERHEAD > self._most_bytes:
            return
        self._answers[key] = answer
        self._size += len(answer.body) + _OVERHEAD
        while self._size > self._most_bytes:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._size -= len(answer.body) + _OVERHEAD

    def _make_room(self) -> None:
        if len(self._until_s) + len(self._under_way) < self._look_at:
            return
        now_s = self._now_s()
        for key in [key for key, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[key]
            self._drop(key)
        known = len(self._until_s) + len(self._under_way)
        if known >= self._most_requests:
            raise TooManyRequestsError(
                f"{known} requests may still be sent again, and no more can be remembered; nothing was begun"
            )
        self._look_at = min(max(_FIRST_LOOK, 2 * known), self._most_requests)
