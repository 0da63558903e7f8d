"""One semantic version: parsing, printing and precedence (semver.org 2.0.0, clauses 9 to 11)."""

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

_NUMBER = r"0|[1-9]\d*"
_IDENTIFIER = r"[0-9A-Za-z-]+"
_VERSION = re.compile(
    rf"v?({_NUMBER})\.({_NUMBER})\.({_NUMBER})"
    rf"(?:-({_IDENTIFIER}(?:\.{_IDENTIFIER})*))?"
    rf"(?:\+({_IDENTIFIER}(?:\.{_IDENTIFIER})*))?",
    re.ASCII,
)


class VersionError(ValueError):
    """A text that is not a semantic version, or not a requirement on one."""


@total_ordering
@dataclass(frozen=True, eq=False)
class Version:
    """A version. Build metadata is kept for printing; it plays no part in equality and order."""

    major: int
    minor: int
    patch: int
    prerelease: tuple[str, ...] = ()
    build: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Read ``1.2.3-rc.1+build.5``; a leading ``v`` is allowed, as git tags have it.

        Raises:
            VersionError: if the text is anything else.
        """
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            raise VersionError(f"not a semantic version: {text!r}")
        major, minor, patch, prerelease, build = match.groups()
        identifiers = tuple(prerelease.split(".")) if prerelease else ()
        for identifier in identifiers:
            if identifier.isdigit() and identifier != "0" and identifier.startswith("0"):
                raise VersionError(f"number with leading zeros in the pre-release of {text!r}")
        return cls(int(major), int(minor), int(patch), identifiers, tuple(build.split(".")) if build else ())

    @property
    def release(self) -> tuple[int, int, int]:
        """Major, minor and patch."""
        return (self.major, self.minor, self.patch)

    def next_breaking(self) -> "Version":
        """Return the first release that may break users of this one."""
        if self.major:
            return Version(self.major + 1, 0, 0)
        if self.minor:
            return Version(0, self.minor + 1, 0)
        return Version(0, 0, self.patch + 1)

    def next_minor(self) -> "Version":
        """Return the first release of the next minor series."""
        return Version(self.major, self.minor + 1, 0)

    def _precedence(self) -> tuple[Any, ...]:
        # A release comes after all of its pre-releases, so False < True does what is needed.
        return (self.release, not self.prerelease, self.prerelease)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return self._precedence() == other._precedence()

    def __lt__(self, other: "Version") -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return self._precedence() < other._precedence()

    def __hash__(self) -> int:
        return hash(self._precedence())

    def __str__(self) -> str:
        text = f"{self.major}.{self.minor}.{self.patch}"
        if self.prerelease:
            text += "-" + ".".join(self.prerelease)
        if self.build:
            text += "+" + ".".join(self.build)
        return text
