"""`Layout`: a token sequence cut at its control tokens, with the assistant turns in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.control import ControlTokens
from token_tracking.errors import TemplateError
from token_tracking.messages import Message
from token_tracking.template import ChatTemplate

_QUESTION: Message = {"role": "user", "content": "qzuserq"}


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One control token, or the tokens between two of them."""

    start: int
    end: int
    control: bool
    text: str
    turn: int | None
    """Assistant turn that it belongs to, counted from zero. None: it is prompt."""
    spoken: int = 0
    """In a turn: characters at its start that are the turn's header, not what the model writes."""
    closes: bool = False
    """The stop token of its turn."""

    @property
    def key(self) -> tuple[bool, str]:
        """Equal for pieces that say the same."""
        return (self.control, self.text)


class Header(msgspec.Struct, frozen=True):
    """How an assistant turn begins: the control tokens and texts of the generation prompt, prefill aside."""

    parts: tuple[tuple[bool, str], ...]

    @classmethod
    def of(cls, template: ChatTemplate) -> Header | None:
        """None: the template prints no generation prompt after a user message, or none of its own tokens."""
        try:
            prompt = template.render([_QUESTION], add_generation_prompt=True)
            start = template.render([_QUESTION], add_generation_prompt=False)
        except TemplateError:
            return None
        if not prompt.startswith(start):
            return None
        text = prompt.removeprefix(start).removesuffix(template.facts.prefill)
        parts: list[tuple[bool, str]] = []
        at = 0
        for low, high in ControlTokens(template.tokenizer, "keep").find(text):
            parts += [(False, text[at:low])] if low > at else []
            parts.append((True, text[low:high]))
            at = high
        parts += [(False, text[at:])] if at < len(text) else []
        return cls(tuple(parts)) if any(control for control, _ in parts) else None


def layout(
    ids: npt.NDArray[np.int32],
    template: ChatTemplate,
    header: Header | None,
    mask: npt.NDArray[np.uint8] | None = None,
) -> list[Piece]:
    """Cut ids at their control tokens and find the assistant turns by their headers.

    A turn without stop token ends where a message of another role begins, unless `mask` says that the token
    which begins messages was sampled.
    """
    tokenizer = template.tokenizer
    special = np.isin(ids, np.array(sorted(tokenizer.special_ids), np.int32))
    borders = sorted(
        {0, len(ids), *np.flatnonzero(special).tolist(), *(np.flatnonzero(special) + 1).tolist()}
    )
    raw = [
        Piece(
            start=low,
            end=high,
            control=bool(special[low]),
            text=tokenizer.decode(ids[low:high].tolist()),
            turn=None,
        )
        for low, high in pairwise(borders)
    ]
    stops = {tokenizer.decode([stop]) for stop in template.stop_ids}
    if header is None:
        return raw
    sampled = {piece.start for piece in raw if mask is not None and mask[piece.start : piece.end].any()}
    return _with_turns(raw, header, stops, sampled)


def _with_turns(
    pieces: Sequence[Piece], header: Header, stops: Collection[str], sampled: Collection[int]
) -> list[Piece]:
    made: list[Piece] = []
    turn, inside, at = -1, False, 0
    replace = msgspec.structs.replace
    while at < len(pieces):
        piece = pieces[at]
        begun = 0 if inside else _begins(pieces, at, header)
        if begun:
            turn, inside = turn + 1, True
            *before, (control, text) = header.parts
            made += [replace(p, turn=turn, spoken=len(p.text)) for p in pieces[at : at + len(before)]]
            at += len(before)
            if at < len(pieces):
                spoken = len(pieces[at].text) if control else len(text)
                made.append(replace(pieces[at], turn=turn, spoken=spoken))
                at += 1
            continue
        other = piece.key == header.parts[0] and piece.text not in stops and piece.start not in sampled
        if inside and other and not _begins(pieces, at, header):
            inside = False
        closes = inside and piece.control and piece.text in stops
        made.append(replace(piece, turn=turn if inside else None, closes=closes))
        inside = inside and not closes
        at += 1
        if closes and _begins(pieces, at - 1, header):
            # A stop token that is the header's first token belongs to both turns.
            inside, turn = True, turn + 1
    return made


def _begins(pieces: Sequence[Piece], at: int, header: Header) -> bool:
    shown = pieces[at : at + len(header.parts)]
    *before, (control, text) = header.parts
    if len(shown) < len(header.parts) or [p.key for p in shown[:-1]] != before:
        return False
    last = shown[-1]
    return last.key == (control, text) if control else not last.control and last.text.startswith(text)
