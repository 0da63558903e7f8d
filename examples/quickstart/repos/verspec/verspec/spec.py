"""Requirements: several comparisons that must all hold."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from verspec.version import Version, VersionError

_CLAUSE = re.compile(r"(>=|<=|>|<|=|\^|~)?\s*v?(\d+)(\.\d+)?(\.\d+)?(-[0-9A-Za-z.-]+)?")

_COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Comparison:
    """One bound, such as ``>=1.2.0``."""

    symbol: str
    bound: Version

    def allows(self, version: Version) -> bool:
        """Return whether ``version`` is on the right side of the bound."""
        return _COMPARE[self.symbol](version, self.bound)


@dataclass(frozen=True)
class Spec:
    """A requirement."""

    text: str
    comparisons: tuple[Comparison, ...]

    def allows(self, version: Version) -> bool:
        """Return whether ``version`` meets all comparisons and the rule for pre-releases."""
        if version.prerelease and not any(
            item.bound.prerelease and item.bound.release == version.release for item in self.comparisons
        ):
            return False
        return all(item.allows(version) for item in self.comparisons)

    def __str__(self) -> str:
        return self.text


def parse_spec(text: str) -> Spec:
    """Read a requirement: clauses, separated by commas.

    Raises:
        VersionError: if a clause is malformed.
    """
    comparisons: list[Comparison] = []
    for clause in text.split(","):
        comparisons.extend(_parse_clause(clause.strip()))
    return Spec(text, tuple(comparisons))


def _parse_clause(clause: str) -> list[Comparison]:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise VersionError(f"not a requirement: {clause!r}")
    symbol, major, minor, patch, prerelease = match.groups()
    bound = Version.parse(f"{major}{minor or '.0'}{patch or '.0'}{prerelease or ''}")
    if symbol == "^":
        return [Comparison(">=", bound), Comparison("<", bound.next_breaking())]
    if symbol == "~":
        return [Comparison(">=", bound), Comparison("<", bound.next_minor())]
    return [Comparison(symbol or "=", bound)]
