"""How sandboxes of a provider ended."""

from __future__ import annotations


class Stops:
    """Counts over a provider's life. Each sandbox that came up is in exactly one of them."""

    def __init__(self) -> None:
        self.done = 0
        """Confirmed their end."""
        self.failed = 0
        """Did not; their lease or their longest lifetime ends them."""
