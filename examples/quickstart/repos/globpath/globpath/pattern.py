"""From a pattern to a regular expression."""

import re
from functools import lru_cache


class PatternError(ValueError):
    """A pattern that cannot be understood."""


@lru_cache(maxsize=512)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression whose ``fullmatch`` decides whether a path matches.

    Raises:
        PatternError: if the pattern is empty or absolute, has an empty component, uses ``**`` as a
            part of a component, or leaves a class open.
    """
    if not pattern or pattern.startswith("/"):
        raise PatternError(f"a pattern must be a relative path: {pattern!r}")
    components = pattern.split("/")
    if "" in components:
        raise PatternError(f"empty component in {pattern!r}")
    return re.compile("/".join(_component(text, pattern) for text in components), re.DOTALL)


def matches(path: str, pattern: str) -> bool:
    """Return whether the relative ``path`` matches ``pattern`` as a whole."""
    return compile_pattern(pattern).fullmatch(path) is not None


def _component(text: str, pattern: str) -> str:
    """Translate one component of ``pattern``."""
    if text == "**":
        return ".*"
    if "**" in text:
        raise PatternError(f"** must be a component of its own in {pattern!r}")
    parts: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "*":
            parts.append("[^/]*")
        elif char == "?":
            parts.append("[^/]")
        elif char == "[":
            expression, at = _char_class(text, at, pattern)
            parts.append(expression)
        else:
            parts.append(re.escape(char))
    return "".join(parts)


def _char_class(text: str, at: int, pattern: str) -> tuple[str, int]:
    """Translate a class whose ``[`` stands before ``at``; return it and the place after its ``]``."""
    negated = text.startswith("!", at)
    start = at + negated
    end = text.find("]", start + 1)  # a "]" in the first place is a member, as in the shell
    if end < 0:
        raise PatternError(f"unclosed class in {pattern!r}")
    members = text[start:end].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
    if members.startswith("]"):
        members = "\\" + members
    return ("(?!/)[^" if negated else "[") + members + "]", end + 1
