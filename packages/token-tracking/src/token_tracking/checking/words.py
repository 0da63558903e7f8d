"""`Words`: where the model's words stand in each assistant turn of a layout."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.checking.layout import Piece
from token_tracking.template import ChatTemplate


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn, in tokens."""

    turn: int
    begin: int
    """Its header."""
    start: int
    """What the model wrote, after header and prefill."""
    end: int
    """One past its stop token, or past what there is."""
    stop: int | None
    """Its stop token. None: the turn is not closed."""


def words(ids: npt.NDArray[np.int32], pieces: Sequence[Piece], template: ChatTemplate) -> list[Words]:
    """The turns of a layout, in order."""
    found: dict[int, Words] = {}
    for piece in pieces:
        if piece.turn is None:
            continue
        start = piece.start + header_tokens(ids, piece, template)
        stop = piece.start if piece.closes else None
        known = found.get(piece.turn)
        if known is None:
            made = Words(turn=piece.turn, begin=piece.start, start=start, end=piece.end, stop=stop)
        else:
            first = start if piece.spoken else known.start
            made = msgspec.structs.replace(known, start=first, end=piece.end, stop=stop)
        found[piece.turn] = made
    return [found[turn] for turn in sorted(found)]


def header_tokens(ids: npt.NDArray[np.int32], piece: Piece, template: ChatTemplate) -> int:
    """Tokens at the start of a piece in a turn that are its header and prefill."""
    prefill, chars = template.facts.prefill, piece.spoken
    if piece.spoken and prefill and piece.text.startswith(prefill, piece.spoken):
        chars += len(prefill)
    count = 0
    while piece.start + count < piece.end and chars:
        part = ids[piece.start : piece.start + count + 1].tolist()
        if len(template.tokenizer.decode(part)) > chars:
            break
        count += 1
    return count


def spoken_text(pieces: Sequence[Piece], turn: int) -> str:
    """All that a turn says, without its header and its stop token."""
    own = [piece for piece in pieces if piece.turn == turn and not piece.closes]
    return "".join(piece.text[piece.spoken :] for piece in own)


def bare_leads(template: ChatTemplate) -> frozenset[str]:
    """What a harness may prefill in a turn: the marker that opens reasoning, or an empty pair; no blanks."""
    markers = template.facts.markers
    if markers.reasoning_open is None or markers.reasoning_close is None:
        return frozenset()
    runs = ([markers.reasoning_open], [markers.reasoning_open, markers.reasoning_close])
    return frozenset("".join(template.tokenizer.decode(run).split()) for run in runs)
