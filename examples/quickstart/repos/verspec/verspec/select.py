"""Choosing among many versions."""

from collections.abc import Iterable

from verspec.spec import Spec
from verspec.version import Version


def ordered(texts: Iterable[str]) -> list[str]:
    """Sort version texts from the oldest to the newest; equal ones keep their order."""
    return sorted(texts, key=Version.parse)


def newest(texts: Iterable[str], spec: Spec) -> str | None:
    """Return the newest version that ``spec`` allows, or None if it allows none of them."""
    allowed = [text for text in texts if spec.allows(Version.parse(text))]
    return max(allowed, key=Version.parse, default=None)
