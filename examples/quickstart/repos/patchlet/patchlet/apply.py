"""Applying a parsed diff to a text."""

from patchlet.model import FilePatch, Hunk, PatchError, split_lines


def apply_patch(patch: FilePatch, text: str, *, max_offset: int = 200) -> str:
    """Return ``text`` with all hunks applied.

    Args:
        patch: one file's part of a diff.
        text: the old text; empty for a file that the patch creates.
        max_offset: how many lines a hunk may stand away from where the diff says.

    Raises:
        PatchError: if a hunk does not fit. The text is never changed half.
    """
    lines = split_lines(text)
    result: list[str] = []
    done = 0  # lines of the old text that were copied or replaced
    drift = 0  # how far the last hunk stood from its place
    for number, hunk in enumerate(patch.hunks, 1):
        old = hunk.old
        # A hunk without old lines names the line that it follows.
        wanted = hunk.old_start - 1 if old else hunk.old_start
        at = _find(lines, old, wanted + drift, done, max_offset)
        if at is None:
            raise PatchError(_explain(number, hunk, lines, wanted))
        drift = at - wanted
        result += lines[done:at]
        result += hunk.new
        done = at + len(old)
    return "".join(result + lines[done:])


def _find(lines: list[str], old: list[str], near: int, lowest: int, max_offset: int) -> int | None:
    """Return the place closest to ``near`` where ``old`` stands, not below ``lowest``."""
    for offset in range(max_offset + 1):
        for at in (near - offset, near + offset):
            if lowest <= at <= len(lines) - len(old) and lines[at : at + len(old)] == old:
                return at
    return None


def _explain(number: int, hunk: Hunk, lines: list[str], wanted: int) -> str:
    """Name the first line that differs at the place where the hunk should stand."""
    for index, expected in enumerate(hunk.old, wanted):
        found = lines[index] if 0 <= index < len(lines) else None
        if found != expected:
            return f"hunk {number} does not fit: line {index + 1} should be {expected!r}, but is {found!r}"
    return f"hunk {number} does not fit: it overlaps the hunk before it"
