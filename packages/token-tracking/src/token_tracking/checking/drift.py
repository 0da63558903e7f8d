"""`Drift`: token ids that someone holds against those of the template's render, each difference with a name.

Control tokens are the frame: both sides are cut there and laid side by side, so that one lost newline is one
difference and not a thousand. What the model wrote may differ, for its ids are the record; what the template
wrote may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.checking.blocks import Block
from token_tracking.checking.difference import Difference
from token_tracking.checking.layout import Header, Piece, layout
from token_tracking.checking.mask_faults import mask_faults
from token_tracking.checking.verify import TurnView, Verdict
from token_tracking.checking.words import words
from token_tracking.template import ChatTemplate

Ids = npt.NDArray[np.int32]
WINDOW = 60
"""Pieces that are searched for a place where two sequences agree again."""


class Drift(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Two sequences and what is different."""

    ids: Ids
    template: Ids
    """Ids of the render."""
    differences: tuple[Difference, ...]
    turns: int
    """Assistant turns in the render, a waiting generation prompt among them."""
    spans: tuple[tuple[int, int], ...]
    """Of each turn in `ids`: where the model's words begin and the turn ends."""

    def verdict(self, turn: int | None = None) -> Verdict:
        """Of a turn and what is new in the prompt that it answers, or of the whole (None)."""
        found = [d.weight for d in self.differences if turn is None or d.concerns(turn)]
        return "broken" if "error" in found else "rewritten" if found else "equal"


def drift(
    ids: Ids,
    render: Ids,
    template: ChatTemplate,
    *,
    mask: npt.NDArray[np.uint8] | None = None,
    said: Callable[[int], TurnView | None] | None = None,
) -> Drift:
    """Compare.

    Args:
        ids: the ids in question, int32 `[n]`.
        render: ids of the template's render.
        template: knows stop tokens and how a turn begins.
        mask: loss mask of `ids`, `[n]`: 1 where a token is trained. None: not known.
        said: the message of a turn, in a file of which nobody knows that its ids were sampled. None: the ids
            in turns were recorded as they were sampled, and the mask with them.
    """
    header = Header.of(template)
    ours, theirs = layout(ids, template, header, mask), layout(render, template, header)
    found: list[Difference] = []
    for a, b in _blocks(ours, theirs):
        if len(a) == len(b) == 1 and ours[a[0]].key == theirs[b[0]].key:
            found += _same_text(ids, render, ours[a[0]], theirs[b[0]])
        else:
            found += Block(ours, theirs, a, b, template, said).differences()
    found = [_trimmed(difference, ids, render) for difference in found]
    if mask is not None:
        found += mask_faults(ids, ours, mask, template, ours=said is None)
    turns = 1 + max((piece.turn for piece in theirs if piece.turn is not None), default=-1)
    spans = tuple((turn.start, turn.end) for turn in words(ids, ours, template))
    return Drift(ids=ids, template=render, differences=tuple(found), turns=turns, spans=spans)


def _trimmed(difference: Difference, ids: Ids, render: Ids) -> Difference:
    """Without the ids at both ends that are the same."""
    (low, high), (there, end) = difference.ids, difference.template
    while low < high and there < end and ids[low] == render[there]:
        low, there = low + 1, there + 1
    while low < high and there < end and ids[high - 1] == render[end - 1]:
        high, end = high - 1, end - 1
    return msgspec.structs.replace(difference, ids=(low, high), template=(there, end))


def _blocks(ours: Sequence[Piece], theirs: Sequence[Piece]) -> Iterator[tuple[range, range]]:
    """Pieces side by side: one and one that say the same, or a run of each that do not."""
    i = j = 0
    while i < len(ours) or j < len(theirs):
        if i < len(ours) and j < len(theirs) and ours[i].key == theirs[j].key:
            yield range(i, i + 1), range(j, j + 1)
            i, j = i + 1, j + 1
            continue
        steps = ((step, total - step) for total in range(1, WINDOW) for step in range(total + 1))
        over, under = next(
            ((di, dj) for di, dj in steps if _meet(ours, theirs, i + di, j + dj)),
            (len(ours) - i, len(theirs) - j),
        )
        yield range(i, i + over), range(j, j + under)
        i, j = i + over, j + under


def _meet(ours: Sequence[Piece], theirs: Sequence[Piece], i: int, j: int) -> bool:
    """Whether two pieces and more agree from here on, a text with words in it among them, or all the rest."""
    if i > len(ours) or j > len(theirs):
        return False
    words = False
    for count, (a, b) in enumerate(zip(ours[i:], theirs[j:], strict=False), 1):
        if a.key != b.key:
            return False
        words = words or bool(not a.control and a.text.strip())
        if words and count > 1:
            return True
    return len(ours) - i == len(theirs) - j


def _same_text(ids: Ids, render: Ids, ours: Piece, theirs: Piece) -> list[Difference]:
    if np.array_equal(ids[ours.start : ours.end], render[theirs.start : theirs.end]):
        return []
    spoken = theirs.turn is not None and len(theirs.text) > theirs.spoken
    what = (
        "the text in other ids than the tokenizer gives: a model samples such ids, they are the record"
        if spoken
        else "the text is the template's, its ids are not: it was encoded in pieces"
    )
    return [
        Difference(
            kind="sampled_ids" if spoken else "template_ids",
            what=what,
            turn=theirs.turn or 0,
            in_turn=spoken,
            ids=(ours.start, ours.end),
            template=(theirs.start, theirs.end),
        )
    ]
