"""Reading unified diffs, plain or as git writes them."""

import re

from patchlet.model import FilePatch, Hunk, PatchError, split_lines

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def parse_patch(text: str) -> list[FilePatch]:
    """Return the files of a diff in order. Lines between files (git's headers) are skipped.

    Raises:
        PatchError: if a header is malformed or a hunk is cut off.
    """
    lines = split_lines(text)
    files: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            old_path, new_path = _path(lines[at]), _path(lines[at + 1])
            hunks, at = _parse_hunks(lines, at + 2)
            if not hunks:
                raise PatchError(f"no hunks for {new_path or old_path}")
            files.append(FilePatch(old_path, new_path, tuple(hunks)))
        else:
            at += 1
    return files


def _path(header: str) -> str | None:
    """Read a ``---`` or ``+++`` line; a tab begins a time stamp, and git puts ``a/`` or ``b/`` in front."""
    path = header[4:].rstrip("\r\n").split("\t")[0]
    if path == "/dev/null":
        return None
    return path[2:] if path.startswith(("a/", "b/")) else path


def _parse_hunks(lines: list[str], at: int) -> tuple[list[Hunk], int]:
    hunks: list[Hunk] = []
    while at < len(lines) and lines[at].startswith("@@"):
        hunk, at = _parse_hunk(lines, at)
        hunks.append(hunk)
    return hunks, at


def _parse_hunk(lines: list[str], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        raise PatchError(f"line {at + 1}: not a hunk header: {lines[at].rstrip()!r}")
    old_left = int(match[2] or 1)
    new_left = int(match[4] or 1)
    header, body = at + 1, []
    at += 1
    while at < len(lines) and (old_left or new_left or lines[at].startswith("\\")):
        mark, line = lines[at][0], lines[at][1:]
        if mark == "\\":  # "\ No newline at end of file" is not a line of either text
            at += 1
            continue
        if mark == "\n":  # some mail programs strip the blank of an empty context line
            mark, line = " ", "\n"
        if mark not in " -+":
            break
        old_left -= mark != "+"
        new_left -= mark != "-"
        body.append((mark, line))
        at += 1
    if old_left or new_left:
        raise PatchError(f"line {header}: the hunk is cut off or its counts are wrong")
    return Hunk(int(match[1]), int(match[3]), tuple(body)), at
