"""`Listener`: calls a user's `on_event`, outlives what it raises, and knows who is inside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer_bridge.errors import CallbackError

log = logging.getLogger(__name__)

Event = TypeVar("Event")


class Listener(Generic[Event]):
    """A callback that cannot end the thread it is called in.

    Args:
        call: the user's. None: nobody listens.
        owner: whose it is, for the log.
    """

    def __init__(self, call: Callable[[Event], None] | None, owner: str) -> None:
        self._call = call
        self._owner = owner
        self.faults = 0
        """Exceptions that came out of it."""
        self._inside: int | None = None
        """The thread that is in it. None: none is."""

    def __bool__(self) -> bool:
        return self._call is not None

    def tell(self, event: Event) -> None:
        """Call it. What it raises is logged the first time, and counted."""
        if self._call is None:
            return
        self._inside = threading.get_ident()
        try:
            self._call(event)
        except Exception:
            if not self.faults:
                log.exception("on_event of %s raised; it goes on (counted from now on)", self._owner)
            self.faults += 1
        finally:
            self._inside = None

    def check_outside(self, call: str) -> None:
        """Say before `call` waits for the thread that calls back.

        Raises:
            CallbackError: this is that thread, and it would wait for itself.
        """
        if self._inside == threading.get_ident():
            raise CallbackError(
                f"{call} waits for the thread in which on_event of {self._owner} is called, and was called "
                "from it: set a flag there, and call it from another thread"
            )
