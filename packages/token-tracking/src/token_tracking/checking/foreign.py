"""A file of another trainer: its ids and loss mask against the template's render of its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.checking.difference import Difference
from token_tracking.checking.document import Document
from token_tracking.checking.drift import Drift, drift
from token_tracking.checking.layout import Header, Piece, layout
from token_tracking.checking.padding import Padding
from token_tracking.checking.verification import Row, Verification
from token_tracking.checking.verify import TurnView
from token_tracking.checking.words import spoken_text
from token_tracking.errors import TemplateError, TokenTrackingError
from token_tracking.template import ChatTemplate

Ids = npt.NDArray[np.int32]
LIMIT = (
    "a turn that somebody decoded and encoded again looks like any other: compare it with the ids that the "
    "engine returned"
)
_TOOLS = (
    "; it is the system part that differs: were other tools (--tools FILE.json) or template variables "
    "(--kwargs) given when the ids were made?"
)


def verify_document(document: Document, template: ChatTemplate, where: str) -> Verification:
    """Compare another trainer's ids with the template's render of its messages.

    A file whose last message is no answer may end with a generation prompt or without one.

    Raises:
        TokenTrackingError: an id is not the tokenizer's, or the template refuses the messages.
    """
    size = template.tokenizer.vocab_size
    bad = next((at for at, i in enumerate(document.token_ids) if not 0 <= i < size), None)
    if bad is not None:
        raise TokenTrackingError(
            f"{where}: token_ids[{bad}] is {document.token_ids[bad]}, the tokenizer's ids are 0..{size - 1}: "
            "give the tokenizer that made the ids"
        )
    comparison = _Comparison(document, template)
    prompt = document.messages[-1].get("role") != "assistant"
    found = comparison.made(generate=prompt)
    if prompt and _errors(found):
        ended = comparison.made(generate=False)
        if _errors(ended) < _errors(found):
            found, prompt = ended, False
    rows = tuple(_rows(found, document, prompt))
    return Verification(kind="document", rows=rows, drifts=(found,), limits=(LIMIT,))


class _Comparison:
    """One file, compared with renders of its messages with and without a generation prompt."""

    def __init__(self, document: Document, template: ChatTemplate):
        self.messages = document.messages
        self.template = template
        self.ids = np.array(document.token_ids, np.int32)
        mask = document.loss_mask
        self.mask = None if mask is None else np.array(mask, np.uint8)
        self.control = template.control("escape" if template.tokenizer.splits_at_specials else "keep")
        self.header = Header.of(template)

    def made(self, *, generate: bool) -> Drift:
        """The differences from one render."""
        marked = self.template.render_marked(self.messages, self.control, generate=generate)
        found = self._drift(self.control.encode_array(marked), generate=generate)
        if self.control.unmark(marked) == marked:
            return found
        plain = self._drift(
            self.template.tokenizer.encode_array(self.control.unmark(marked)), generate=generate
        )
        if _errors(plain) >= _errors(found):
            return found
        return msgspec.structs.replace(plain, differences=(_spelled(found), *plain.differences))

    def _drift(self, render: Ids, *, generate: bool) -> Drift:
        first = int(render[0]) if len(render) else -1
        inner = Padding.of(self.ids, self.mask, self.template, first)
        mask = None if self.mask is None else self.mask[inner.start : inner.end]
        pieces = layout(render, self.template, self.header)
        said = self._said(pieces, generate=generate)
        ids = self.ids[inner.start : inner.end]
        found = drift(ids, render, self.template, mask=mask, said=said)
        moved = _hinted(
            [_moved(d, inner.start) for d in found.differences], pieces, self.messages, self.template
        )
        return msgspec.structs.replace(
            found,
            ids=self.ids,
            differences=(*moved, *inner.differences(self.ids, self.template, found.turns)),
            spans=tuple((low + inner.start, high + inner.start) for low, high in found.spans),
        )

    def _said(self, pieces: Sequence[Piece], *, generate: bool) -> Callable[[int], TurnView | None]:
        """The message of each turn, if every assistant message of the file is one turn of the render."""
        answers = [index for index, m in enumerate(self.messages) if m.get("role") == "assistant"]
        turns = len({piece.turn for piece in pieces} - {None}) - generate
        if turns != len(answers):
            return lambda _: None
        return lambda turn: self._view(answers[turn]) if turn < len(answers) else None

    def _view(self, index: int) -> TurnView:
        try:
            marked = self.template.render_marked(self.messages[: index + 1], self.control, generate=False)
        except TemplateError:
            return TurnView(message=self.messages[index], first_print=None)
        # Only the last turn: a file of many turns has many of these.
        start = marked.rfind("".join(text for _, text in self.header.parts)) if self.header else -1
        if start < 0:
            return TurnView(message=self.messages[index], first_print=None)
        pieces = layout(self.control.encode_array(marked[start:]), self.template, self.header)
        return TurnView(message=self.messages[index], first_print=spoken_text(pieces, 0))


def _errors(found: Drift) -> int:
    return sum(difference.weight == "error" for difference in found.differences)


def _moved(difference: Difference, by: int) -> Difference:
    low, high = difference.ids
    return msgspec.structs.replace(difference, ids=(low + by, high + by)) if by else difference


def _hinted(
    differences: Sequence[Difference],
    pieces: Sequence[Piece],
    messages: Sequence[dict[str, Any]],
    template: ChatTemplate,
) -> list[Difference]:
    """The first fault with a hint, if it lies in the system part: in the first message, where tools stand."""
    ends = template.closings.close_ids
    names = {template.tokenizer.decode([i]) for i in ends}
    end = next((p.end for p in pieces if p.turn is not None or (p.control and p.text in names)), 0)
    faults = [d for d in differences if d.weight == "error" and d.template != (0, 0) and not d.in_turn]
    first = min(faults, key=lambda d: d.template, default=None)
    system = messages[0].get("role") in ("system", "developer")
    if first is None or first.template[0] >= end or not (system or first.kind == "special_tokens"):
        return list(differences)
    hinted = msgspec.structs.replace(first, what=first.what + _TOOLS)
    return [hinted if d is first else d for d in differences]


def _spelled(escaped: Drift) -> Difference:
    first = next(difference for difference in escaped.differences if difference.weight == "error")
    what = (
        "a control token spelled in message text became a control id, which no model wrote: a tool that "
        "prints one ends its own message (huggingface/transformers#29279)"
    )
    return msgspec.structs.replace(first, kind="control_token_in_text", what=what)


def _rows(found: Drift, document: Document, prompt: bool) -> list[Row]:
    mask = document.loss_mask
    rows: list[Row] = []
    spans = found.spans
    for turn in range(found.turns):
        start, end = spans[turn] if turn < len(spans) else (len(found.ids), len(found.ids))
        notes = dict.fromkeys(d.kind for d in found.differences if d.concerns(turn))
        answered = not (prompt and turn == found.turns - 1)
        rows.append(
            Row(
                branch=0,
                turn=turn,
                verdict=found.verdict(turn),
                prompt_tokens=start,
                trained_tokens=None if mask is None or not answered else int(sum(mask[start:end])),
                notes=tuple(notes),
            )
        )
    return rows
