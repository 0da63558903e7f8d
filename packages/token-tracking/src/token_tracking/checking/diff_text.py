"""A `Verification` for people: verdicts, then each difference with the text and the ids around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from token_tracking.checking.difference import Difference, Weight
from token_tracking.checking.drift import Drift
from token_tracking.checking.report import counted
from token_tracking.checking.verification import Row, Verification
from token_tracking.tokenizer import Tokenizer

ROWS = 24
"""More prompts than these are counted, and only those shown that are not equal."""
SHOWN = 3
"""Differences of one kind that are shown in full; the others are listed."""
_AROUND, _INSIDE, _TEXT = 2, 6, 44
_SIGNS: dict[Weight, str] = {"error": "✗", "warning": "!", "fine": "~"}
_COLOURS = {"error": 31, "warning": 33, "fine": 36, "equal": 32, "rewritten": 36, "broken": 31}
_TITLES: dict[Weight, str] = {
    "error": "faults: not what the template prints, or trained though no model wrote it",
    "warning": "warnings: perhaps not meant",
    "fine": "no fault: what a model wrote, in other ids or text than the template prints",
}


Line = Callable[[int, int], str]
"""A position and an id, to a line."""


class _Pen:
    def __init__(self, colour: bool):
        self._colour = colour

    def __call__(self, text: str, *codes: int) -> str:
        if not self._colour or not text:
            return text
        return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m"


def render(
    verification: Verification, tokenizer: Tokenizer, *, name: str, colour: bool, full: bool = False
) -> str:
    """Text for a terminal.

    Args:
        verification: what was found.
        tokenizer: of the ids.
        name: of the file.
        colour: whether escape sequences are wanted.
        full: show every difference, not the first few of a kind.
    """
    pen = _Pen(colour)
    rows = verification.rows
    count = {v: sum(row.verdict == v for row in rows) for v in ("equal", "rewritten", "broken")}
    said = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    head = pen(f" {verification.verdict} ", 1, 7, _COLOURS[verification.verdict])
    kinds = ", ".join(f"{number} {kind}" for kind, number in verification.counts.items())
    lines = [
        f"{head} {pen(name, 1)}: {counted(len(rows), 'prompt')}, {said or 'no turn'}{_rest(verification)}"
    ]
    lines += [f"  differences: {kinds}", ""] if kinds else [""]
    lines += _table(rows, pen)
    for weight in ("error", "warning", "fine"):
        found = [(s, d) for s in verification.drifts for d in s.differences if d.weight == weight]
        if found:
            lines += ["", pen(f"{_SIGNS[weight]} {_TITLES[weight]}", 1, _COLOURS[weight])]
            lines += _differences(found, tokenizer, pen, shown=len(found) if full else SHOWN)
    if verification.lines:
        lines += ["", pen("findings", 1), *(f"  {line}" for line in verification.lines)]
    lines += ["", *(pen(f"not seen here: {limit}", 2) for limit in verification.limits)]
    return "\n".join(lines) + "\n"


def _rest(verification: Verification) -> str:
    """What no prompt's row shows."""
    after = any(d.turn >= s.turns and d.weight == "error" for s in verification.drifts for d in s.differences)
    said = "; a fault after the last turn" if after else ""
    return said + ("; a turn is not finished" if verification.unfinished else "")


def _table(rows: Sequence[Row], pen: _Pen) -> Iterator[str]:
    shown = rows if len(rows) <= ROWS else [row for row in rows if row.verdict != "equal"]
    branches = len({row.branch for row in rows}) > 1
    if shown:
        yield pen(f"  {'branch  ' if branches else ''}turn   prompt  trained  verdict", 2)
    for row in shown[:ROWS]:
        branch = f"{row.branch:>6}  " if branches else ""
        trained = "-" if row.trained_tokens is None else f"{row.trained_tokens:,}"
        verdict = pen(f"{row.verdict:<9}", _COLOURS[row.verdict])
        notes = ", ".join(_visible(note) for note in row.notes)
        yield f"  {branch}{row.turn:>4} {row.prompt_tokens:>8,} {trained:>8}  {verdict}  {notes}".rstrip()
    if len(shown) > ROWS:
        yield f"  … and {len(shown) - ROWS} more that differ"
    if len(shown) < len(rows):
        yield f"  ({len(rows) - len(shown)} equal prompts are not shown)"


def _differences(
    found: Sequence[tuple[Drift, Difference]], tokenizer: Tokenizer, pen: _Pen, *, shown: int
) -> Iterator[str]:
    kinds = dict.fromkeys(difference.kind for _, difference in found)
    for kind in kinds:
        same = [(sequence, d) for sequence, d in found if d.kind == kind]
        for sequence, difference in same[:shown]:
            place = f"in turn {difference.turn}" if difference.in_turn else _before(sequence, difference)
            yield ""
            yield f"  {pen(kind, 1, _COLOURS[difference.weight])} {place}, {_where(difference)}"
            yield f"    {_visible(difference.what)}"
            yield from _excerpt(sequence, difference, tokenizer, pen)
        if len(same) > shown:
            places = ", ".join(str(d.ids[0]) for _, d in same[shown : shown + 8])
            more = " …" if len(same) > shown + 8 else ""
            yield pen(
                f"    … {len(same) - shown} more {kind}, at token {places}{more} (--full shows them)", 2
            )


def _before(sequence: Drift, difference: Difference) -> str:
    return "after the last turn" if difference.turn >= sequence.turns else f"before turn {difference.turn}"


def _where(difference: Difference) -> str:
    at, there = difference.ids[0], difference.template[0]
    return f"token {at}" if at == there or difference.template == (0, 0) else f"token {at} (render: {there})"


def _excerpt(sequence: Drift, difference: Difference, tokenizer: Tokenizer, pen: _Pen) -> Iterator[str]:
    if difference.kind == "control_token_in_text":
        return
    ours, theirs = difference.ids, difference.template
    ids, render = sequence.ids, sequence.template
    only_ids = difference.template == (0, 0) and difference.ids != (0, 0)
    yield ""
    for label, array, (low, high), code in (
        ("render", render, theirs, 32),
        ("file", ids, ours, 31),
    ):
        if label == "render" and only_ids:
            continue
        before = _end(tokenizer.decode(array[max(low - 16, 0) : low].tolist()))
        after = _start(tokenizer.decode(array[high : high + 16].tolist()))
        middle = _middle(tokenizer.decode(array[low:high].tolist()))
        marked = pen(middle, 1, 7, code) if middle else pen("∅", 1, code)
        yield f"    {label:<7}{pen(before, 2)}⟦{marked}⟧{pen(after, 2)}"
    yield ""
    yield pen(f"      {'render':>8} {'file':>8}  {'id':>7}  text", 2)
    yield from _tokens(sequence, ours, theirs, tokenizer, pen, only_ids=only_ids)


def _tokens(
    sequence: Drift,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    tokenizer: Tokenizer,
    pen: _Pen,
    *,
    only_ids: bool,
) -> Iterator[str]:
    ids, render = sequence.ids, sequence.template

    def line(sign: str, there: int | None, at: int | None, token: int, *codes: int) -> str:
        left = "" if there is None else f"{there:,}"
        right = "" if at is None else f"{at:,}"
        return pen(
            f"    {sign} {left:>8} {right:>8}  {token:>7}  {_visible(tokenizer.decode([token]))}", *codes
        )

    around = range(-min(_AROUND, ours[0]), 0)
    for step in around:
        at = ours[0] + step
        yield line(" ", None if only_ids else theirs[0] + step, at, int(ids[at]), 2)
    if not only_ids:
        yield from _run(render, theirs, lambda n, token: line("-", n, None, token, 32))
    yield from _run(ids, ours, lambda n, token: line("*" if only_ids else "+", None, n, token, 31))
    for step in range(min(_AROUND, len(ids) - ours[1])):
        at = ours[1] + step
        there = None if only_ids or theirs[1] + step >= len(render) else theirs[1] + step
        yield line(" ", there, at, int(ids[at]), 2)


def _run(array: npt.NDArray[np.int32], span: tuple[int, int], line: Line) -> Iterator[str]:
    low, high = span
    shown = range(low, high) if high - low <= _INSIDE + 2 else range(low, low + _INSIDE)
    for at in shown:
        yield line(at, int(array[at]))
    if len(shown) < high - low:
        yield f"      … {high - low - len(shown):,} more tokens"


def _visible(text: str) -> str:
    shown = text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


def _end(text: str) -> str:
    shown = _visible(text)
    return shown if len(shown) <= _TEXT else f"…{shown[-_TEXT:]}"


def _start(text: str) -> str:
    shown = _visible(text)
    return shown if len(shown) <= _TEXT else f"{shown[:_TEXT]}…"


def _middle(text: str) -> str:
    shown = _visible(text)
    return shown if len(shown) <= 2 * _TEXT else f"{shown[:_TEXT]} … {shown[-_TEXT:]}"
