"""What a unified diff consists of."""

import re
from dataclasses import dataclass, replace

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_OPPOSITE = {"+": "-", "-": "+", " ": " "}


class PatchError(ValueError):
    """A diff that is malformed or does not fit its text."""


def split_lines(text: str) -> list[str]:
    """Cut a text into lines that keep their line ends; only a newline ends a line."""
    return _LINE.findall(text)


@dataclass(frozen=True)
class Hunk:
    """One block of changes.

    Attributes:
        old_start: number of its first line in the old text, counted from 1.
        new_start: the same in the new text.
        lines: pairs of ``" "``, ``"-"`` or ``"+"`` and the line with its line end.
    """

    old_start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]

    @property
    def old(self) -> list[str]:
        """The lines that must stand in the old text."""
        return [line for mark, line in self.lines if mark != "+"]

    @property
    def new(self) -> list[str]:
        """The lines that stand there afterwards."""
        return [line for mark, line in self.lines if mark != "-"]

    def reversed(self) -> "Hunk":
        """Return the hunk that undoes this one."""
        lines = tuple((_OPPOSITE[mark], line) for mark, line in self.lines)
        return Hunk(self.new_start, self.old_start, lines)


@dataclass(frozen=True)
class FilePatch:
    """All hunks of one file. A path is None where the diff says ``/dev/null``."""

    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...]

    def reversed(self) -> "FilePatch":
        """Return the patch that undoes this one."""
        return replace(
            self,
            old_path=self.new_path,
            new_path=self.old_path,
            hunks=tuple(hunk.reversed() for hunk in self.hunks),
        )
