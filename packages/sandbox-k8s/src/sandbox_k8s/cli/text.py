"""Lines for people: tables, durations, one fact per line."""

import sys
from collections.abc import Sequence


def say(what: str, answer: str) -> None:
    """One fact."""
    sys.stdout.write(f"{what:15} {printable(answer)}\n")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns, two spaces between them."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def duration(seconds: float) -> str:
    """A duration in its two largest units: ``40 s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02}h"


def printable(text: str) -> str:
    """On one line, with no control sequence: what containers and servers wrote reaches a terminal."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in " ".join(text.split()))
