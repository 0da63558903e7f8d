"""`Section`: a titled table whose cells tell template text from prose, laid out for people.

Three layouts: plain text, Markdown (GitHub's tables) and a terminal with `rich`.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from importlib import util
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from rich.text import Text

Kind = Literal["prose", "template", "content", "ids"]
PLAIN_WIDTH = 100
_NARROW = 16
LEGEND = "⏎ newline   ⇥ tab   ␣ blank at an end   ‹…› content of a message"

_STYLES: dict[Kind, str] = {"prose": "", "template": "cyan", "content": "italic magenta", "ids": "dim"}
_BLANKS = re.compile(r"^ +| +$|(?<=\n) +| +(?=\n)")


class Piece(msgspec.Struct, frozen=True):
    """Some text of a cell and what it is: `template` is verbatim, `content` stands for message text."""

    text: str
    kind: Kind = "prose"


Cell = tuple[Piece, ...]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    title: str
    columns: tuple[str, ...] = ()
    """Empty: the rows are names and values."""
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """Stands under the title."""


def prose(text: str) -> Cell:
    """A cell of prose."""
    return (Piece(text),) if text else ()


def verbatim(text: str) -> Cell:
    """A cell of template text."""
    return (Piece(text, "template"),) if text else ()


def numbers(ids: Iterable[int]) -> Cell:
    """A cell of token ids."""
    text = " ".join(map(str, ids))
    return (Piece(text, "ids"),) if text else ()


def readable(text: str) -> str:
    """Template text on one line, with its blanks to be seen."""
    text = _BLANKS.sub(lambda match: "␣" * len(match[0]), text)
    return text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")


def shown(piece: Piece) -> str:
    """A piece as all layouts show it, without mark-up."""
    if piece.kind == "template":
        return readable(piece.text)
    return f"‹{piece.text}›" if piece.kind == "content" else piece.text


def plain(sections: Sequence[Section], *, width: int | None = None) -> str:
    """Text without colours, wrapped at `width`; None: at `$COLUMNS`, the terminal's width, or 100."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns if width is None else width
    lines: list[str] = []
    for section in sections:
        lines += ["", section.title, "-" * len(section.title)]
        lines += textwrap.wrap(section.note, width)
        texts = [["".join(map(shown, cell)) for cell in row] for row in section.rows]
        head = [list(section.columns)] if section.columns else []
        lines += _aligned([*head, *texts], width)
    return "\n".join([*lines[1:], "", LEGEND]) + "\n"


def _aligned(rows: list[list[str]], width: int) -> list[str]:
    widths = _widths([max(map(len, column)) for column in zip(*rows, strict=True)], width)
    lines: list[str] = []
    for row in rows:
        cells = [
            textwrap.wrap(text, size, break_on_hyphens=False) or [""]
            for text, size in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "  ".join(f"{part:<{size}}" for part, size in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return lines


def _widths(wanted: list[int], width: int) -> list[int]:
    """Columns that fit together: the last one gives way first, then the widest."""
    widths = list(wanted)
    spare = width - 2 * (len(widths) - 1)
    widths[-1] = min(widths[-1], max(spare - sum(widths[:-1]), _NARROW))
    while sum(widths) > spare and max(widths) > _NARROW:
        widths[widths.index(max(widths))] -= 1
    return widths


def markdown(sections: Sequence[Section], *, level: int = 2) -> str:
    """GitHub's Markdown; `level` is that of the sections' headings."""
    blocks: list[str] = []
    for section in sections:
        blocks.append(f"{'#' * level} {section.title}")
        if section.note:
            blocks.append(section.note)
        columns = section.columns or ("", "")
        lines = [_row(columns), _row(["---"] * len(columns))]
        lines += [_row(map(cell_markdown, row)) for row in section.rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def cell_markdown(cell: Cell) -> str:
    """One cell in Markdown."""
    return " ".join(marked for piece in cell if (marked := _marked(piece)))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(piece: Piece) -> str:
    text = shown(piece).replace("|", "\\|").strip()
    if piece.kind in ("prose", "ids"):
        return re.sub(r"([<*_`\[])", r"\\\1", text)
    if piece.kind == "content":
        return f"*{text}*"
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def draw(sections: Sequence[Section]) -> bool:
    """Print to the terminal with `rich`; False, and nothing is printed: it is not installed."""
    if util.find_spec("rich") is None:
        return False
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False)
    for section in sections:
        console.print(f"\n{section.title}", style="bold", markup=False)
        if section.note:
            console.print(Padding(section.note, (0, 0, 0, 2)), style="dim", markup=False)
        table = Table(
            box=SIMPLE_HEAD if section.columns else None,
            show_header=bool(section.columns),
            show_edge=False,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for column in section.columns or ("", ""):
            table.add_column(column, overflow="fold", no_wrap=column == "loss mask")
        for row in section.rows:
            table.add_row(*map(_styled, row))
        console.print(Padding(table, (0, 0, 0, 2)))
    console.print(f"\n{LEGEND}", style="dim", markup=False)
    return True


def _styled(cell: Cell) -> Text:
    from rich.text import Text

    return Text.assemble(*((shown(piece), _STYLES[piece.kind]) for piece in cell))
