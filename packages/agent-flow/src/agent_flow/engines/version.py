"""The weight version of an engine: `POLICY_RUN/n`, in the one place that reads and writes it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from token_tracking.sample import MAX_VERSION, UNKNOWN_VERSION

logger = logging.getLogger(__name__)


class VersionReader:
    """Reads what engines name as their weights. One for all engines of a run, so that it counts for all."""

    def __init__(self, policy_run: str) -> None:
        """Empty `policy_run`: none is known yet, and every version counts as unknown."""
        self.policy_run = policy_run
        self._unknown: Counter[str] = Counter()

    @property
    def unknown(self) -> Mapping[str, int]:
        """How often what was read was no version of this policy run, by the text up to its last `/`."""
        return self._unknown

    def text(self, version: int) -> str:
        """What an engine is told when it is given weights `version`, `0 <= version < 2**31`."""
        return f"{self.policy_run}/{version}"

    def read(self, text: str) -> int:
        """The trainer's count.

        Returns:
            `0 <= version < 2**31`. -2 for everything else: another policy run, `default` (an engine that was
            started and never updated), or a text of somebody else's. It is counted, and logged once for each
            policy run; any staleness rule refuses it.
        """
        version = self.number(text)
        if version is not None:
            return version
        source = text.rpartition("/")[0] or text
        self._unknown[source] += 1
        if self._unknown[source] == 1:
            logger.warning(
                "an engine names its weights %r, which is no version of policy run %r: its tokens count as "
                "sampled under unknown weights",
                text,
                self.policy_run,
            )
        return UNKNOWN_VERSION

    def number(self, text: str) -> int | None:
        """The same without counting, for who only compares. None: no version of this policy run."""
        run, _, digits = text.rpartition("/")
        if not self.policy_run or run != self.policy_run or not (digits.isascii() and digits.isdigit()):
            return None
        # As `text` writes it: "07" was written by somebody else. Ten digits hold every version.
        if len(digits) > 10 or str(int(digits)) != digits or int(digits) > MAX_VERSION:
            return None
        return int(digits)
