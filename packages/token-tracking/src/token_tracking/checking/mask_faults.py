"""Loss masks against the structure of a conversation: what is trained and should not be, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from token_tracking.checking.difference import Difference, Kind, short
from token_tracking.checking.layout import Piece
from token_tracking.template import ChatTemplate


def mask_faults(
    ids: npt.NDArray[np.int32], pieces: Sequence[Piece], mask: npt.NDArray[np.uint8], template: ChatTemplate
) -> Iterator[Difference]:
    """Trained tokens that the template wrote, and trained turns whose stop token is not trained.

    Args:
        ids: int32 `[n]`.
        pieces: their layout. Without any turn in it nothing can be said.
        mask: loss mask, `[n]`.
        template: knows what a generation prompt prefills.
    """
    if all(piece.turn is None for piece in pieces):
        return
    turn, trained = 0, False
    for piece in pieces:
        here = mask[piece.start : piece.end]
        written = len(here) if piece.turn is None else header_tokens(ids, piece, template)
        if bool(here[:written].any()):
            trained_here = np.flatnonzero(here[:written])
            low, high = piece.start + int(trained_here[0]), piece.start + int(trained_here[-1]) + 1
            text, count = template.tokenizer.decode(ids[low:high].tolist()), len(trained_here)
            what = f"{count} of the prompt's tokens have loss mask 1: {short(text)}"
            if piece.turn is not None:
                what += " begins the turn, no model wrote it (thinking-machines-lab/tinker-cookbook#864)"
            yield _found("mask_on_template", what, turn, (low, high), in_turn=False)
        if piece.closes and piece.turn is not None:
            if trained and not bool(here.any()):
                what = f"the turn is trained, its stop token {piece.text} is not (THUDM/slime#1490)"
                yield _found("stop_untrained", what, piece.turn, (piece.start, piece.end), in_turn=True)
            turn, trained = piece.turn + 1, False
        elif piece.turn is not None:
            turn, trained = piece.turn, trained or bool(here[written:].any())


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


def _found(kind: Kind, what: str, turn: int, ids: tuple[int, int], *, in_turn: bool) -> Difference:
    return Difference(kind=kind, what=what, turn=turn, in_turn=in_turn, ids=ids, template=(0, 0))
