"""`Refusals`: who was turned away at HELLO, and why."""

from __future__ import annotations

from trainer_bridge.errors import ProtocolError
from trainer_bridge.messages import Hello

KEPT = 64
"""Names that are kept: peers choose them, so there must be an end."""


class Refusals:
    """Remembers refusals until their peer is welcome."""

    def __init__(self) -> None:
        self.standing: dict[str, str] = {}
        """Peers that have not been welcomed since: name -> why."""
        self._news: list[str] = []

    def add(self, hello: Hello, error: ProtocolError) -> None:
        """A HELLO was refused."""
        if len(self.standing) < KEPT:
            self.standing[hello.name] = error.detail
        self._news.append(f"{hello.role} {hello.name} was refused: {error}")

    def forgive(self, name: str) -> None:
        """A peer of this name is welcome."""
        self.standing.pop(name, None)

    def take_news(self) -> list[str]:
        """A text for each refusal since the last call."""
        news, self._news = self._news, []
        return news
