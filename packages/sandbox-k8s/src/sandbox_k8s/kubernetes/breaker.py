"""Images that cannot be had: after a few failures of the same kind, further starts fail at once.

Otherwise a warm pool or a refill loop starts sandboxes of a missing image for ever (daytonaio/daytona#3289).
A state machine without I/O and without a clock.
"""

import msgspec

from .diagnosis import Diagnosis
from .failure import FailureName

PERMANENT: frozenset[FailureName] = frozenset(
    {"image_name_invalid", "image_not_found", "image_auth", "image_architecture"}
)
"""What no further try changes, until somebody changes the image or the credentials."""

_LIMITED: FailureName = "image_rate_limit"


class _Breaker(msgspec.Struct):
    """What is known of one image.

    Attributes:
        failures: In a row.
        last: The newest of them.
        open_until_s: Starts fail at once until then, and after it but for one; None while it is closed.
        probing: One start is under way to find out.
    """

    last: Diagnosis
    failures: int = 0
    open_until_s: float | None = None
    probing: bool = False


class ImageBreakers:
    """One breaker per image. Times are those of any one clock, in seconds.

    Args:
        after: Permanent failures in a row that open the breaker of their image.
        open_s: How long it stays open, before one start may find out whether it is better now.
        rate_limit_s: The same for a registry that limits pulls and does not say for how long; once is enough.
    """

    def __init__(self, after: int, open_s: float, rate_limit_s: float) -> None:
        self._after = after
        self._open_s = open_s
        self._rate_limit_s = rate_limit_s
        self._breakers: dict[str, _Breaker] = {}

    def refusal(self, image: str, now_s: float) -> Diagnosis | None:
        """Why a start of that image is pointless now; None when it may go ahead."""
        breaker = self._breakers.get(image)
        if breaker is None or breaker.open_until_s is None:
            return None
        return breaker.last if now_s < breaker.open_until_s or breaker.probing else None

    def begin(self, image: str, now_s: float) -> Diagnosis | None:
        """The same, and a start that may go ahead does: it must report `succeeded`, `failed` or `unknown`."""
        refused = self.refusal(image, now_s)
        breaker = self._breakers.get(image)
        if refused is None and breaker is not None and breaker.open_until_s is not None:
            breaker.probing = True
        return refused

    def opens_s(self, image: str, now_s: float) -> float:
        """Seconds until a start of that image is tried again."""
        breaker = self._breakers.get(image)
        until_s = None if breaker is None else breaker.open_until_s
        return 0.0 if until_s is None else max(0.0, until_s - now_s)

    def succeeded(self, image: str) -> None:
        """A sandbox of it came up."""
        self._breakers.pop(image, None)

    def failed(self, image: str, found: Diagnosis, now_s: float) -> bool:
        """A start of it failed; True when that opened its breaker."""
        if found.failure not in PERMANENT and found.failure != _LIMITED:
            self.unknown(image)
            return False
        breaker = self._breakers.setdefault(image, _Breaker(last=found))
        was_open = breaker.open_until_s is not None
        breaker.last = found
        breaker.failures += 1
        breaker.probing = False
        if found.failure == _LIMITED:
            breaker.open_until_s = now_s + (found.retry_after_s or self._rate_limit_s)
        elif was_open or breaker.failures >= self._after:
            breaker.open_until_s = now_s + self._open_s
        return not was_open and breaker.open_until_s is not None

    def unknown(self, image: str) -> None:
        """A start of it was cancelled, or failed for another reason: the next one may find out."""
        breaker = self._breakers.get(image)
        if breaker is not None:
            breaker.probing = False
