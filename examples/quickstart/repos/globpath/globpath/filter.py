"""Ordered lists of patterns."""

from collections.abc import Iterable

from globpath.pattern import compile_pattern


class PathFilter:
    """Includes and excludes, of which the last one that matches a path decides.

    Args:
        patterns: in order; a leading ``!`` makes an exclusion.
        default: what holds for a path that no pattern matches.
    """

    def __init__(self, patterns: Iterable[str], *, default: bool = False) -> None:
        self.patterns = tuple(patterns)
        self.default = default
        self._rules = [
            (compile_pattern(pattern.removeprefix("!")), not pattern.startswith("!")) for pattern in self.patterns
        ]

    def __call__(self, path: str) -> bool:
        """Return whether ``path`` is selected."""
        for expression, included in reversed(self._rules):
            if expression.fullmatch(path):
                return included
        return self.default

    def explain(self, path: str) -> str | None:
        """Return the pattern that decides about ``path``, or None if the default does."""
        for pattern, (expression, _) in zip(reversed(self.patterns), reversed(self._rules), strict=True):
            if expression.fullmatch(path):
                return pattern
        return None
