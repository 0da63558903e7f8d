"""`Verification`: a recorded conversation, ours or another trainer's, against full renders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from token_tracking.checking.checks import PromptCheck
from token_tracking.checking.difference import Difference, Kind
from token_tracking.checking.drift import Drift, drift
from token_tracking.checking.verify import Verdict
from token_tracking.conversation import Conversation
from token_tracking.errors import TokenTrackingError
from token_tracking.history.branch import Branch
from token_tracking.template import ChatTemplate


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What another trainer holds of one conversation, as JSON."""

    messages: list[dict[str, Any]]
    """The whole conversation; without an assistant message at the end, `token_ids` are a prompt."""
    token_ids: list[int]
    loss_mask: list[int | bool] | None = None
    """1 (or true) where a token is trained; as long as `token_ids`. None: not known."""
    tools: list[dict[str, Any]] | None = None
    """Tool schemas. None: as the template's file says, or none."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its verdict."""

    branch: int
    turn: int
    verdict: Verdict
    prompt_tokens: int
    trained_tokens: int | None
    """Of the turn that answers the prompt. None: not known, or there is no such turn."""
    notes: tuple[str, ...] = ()


class Verification(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was found in one file."""

    kind: Literal["snapshot", "document"]
    rows: tuple[Row, ...]
    drifts: tuple[Drift, ...]
    """The sequences behind the differences: of a snapshot, each branch and each broken prompt."""
    lines: tuple[str, ...] = ()
    """Of a snapshot: the report's findings."""

    @property
    def verdict(self) -> Verdict:
        """`broken` if anything is, else `rewritten` if anything differs, else `equal`."""
        found = {*(row.verdict for row in self.rows), *(found.verdict() for found in self.drifts)}
        return "broken" if "broken" in found else "rewritten" if "rewritten" in found else "equal"

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences."""
        return tuple(difference for found in self.drifts for difference in found.differences)

    @property
    def counts(self) -> dict[Kind, int]:
        """Differences by kind."""
        return dict(Counter(difference.kind for difference in self.differences))

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe values, without the ids."""
        found = [
            {"weight": d.weight, "sequence": number, **msgspec.to_builtins(d)}
            for number, sequence in enumerate(self.drifts)
            for d in sequence.differences
        ]
        return {
            "verdict": self.verdict,
            "kind": self.kind,
            "prompts": msgspec.to_builtins(self.rows),
            "counts": self.counts,
            "differences": found,
            "findings": list(self.lines),
        }


def read_document(data: bytes, where: str) -> Document:
    """Read another trainer's conversation.

    Raises:
        TokenTrackingError: it is not JSON of that form, or its lists do not fit together.
    """
    try:
        document = msgspec.json.decode(data, type=Document)
    except (ValueError, msgspec.MsgspecError) as error:
        form = '{"messages": [...], "token_ids": [...], "loss_mask": [...], "tools": [...]}'
        raise TokenTrackingError(
            f"{where}: {error}; need a snapshot, or JSON like {form} (loss_mask and tools may be left out)"
        ) from error
    count, mask = len(document.token_ids), document.loss_mask
    if mask is not None and len(mask) != count:
        raise TokenTrackingError(f"{where}: loss_mask has {len(mask)} entries for {count} token_ids")
    if mask is not None and not {*mask} <= {0, 1}:
        raise TokenTrackingError(f"{where}: loss_mask must hold 0 and 1, it holds {max(mask, key=abs)}")
    if not document.messages or not count:
        raise TokenTrackingError(f"{where}: messages or token_ids are empty")
    return document


def verify_document(document: Document, template: ChatTemplate, where: str) -> Verification:
    """Compare another trainer's ids with the template's render of its messages.

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
    ids = np.array(document.token_ids, np.int32)
    mask = None if document.loss_mask is None else np.array(document.loss_mask, np.uint8)
    prompt = document.messages[-1].get("role") != "assistant"
    control = template.control("escape" if template.tokenizer.splits_at_specials else "keep")
    marked = template.render_marked(document.messages, control, generate=prompt)
    found = drift(ids, control.encode_array(marked), template, mask=mask)
    if control.unmark(marked) != marked:
        plain = drift(ids, template.tokenizer.encode_array(control.unmark(marked)), template, mask=mask)
        if _errors(plain) < _errors(found):
            found = msgspec.structs.replace(plain, differences=(_spelled(found), *plain.differences))
    return Verification(kind="document", rows=tuple(_rows(found, document, prompt)), drifts=(found,))


def _errors(found: Drift) -> int:
    return sum(difference.weight == "error" for difference in found.differences)


def _spelled(escaped: Drift) -> Difference:
    first = next(difference for difference in escaped.differences if difference.weight == "error")
    what = (
        "a control token spelled in message text became a control id: a tool that prints one ends its own "
        "message (huggingface/transformers#29279)"
    )
    return msgspec.structs.replace(first, kind="control_token_in_text", what=what)


def _rows(found: Drift, document: Document, prompt: bool) -> list[Row]:
    mask = document.loss_mask
    rows: list[Row] = []
    spans = found.spans
    for turn in range(found.turns):
        start, end = spans[turn] if turn < len(spans) else (len(found.ids), len(found.ids))
        notes = dict.fromkeys(d.kind for d in found.differences if d.turn == turn)
        answered = not (prompt and turn == found.turns - 1)
        rows.append(
            Row(
                branch=0,
                turn=turn,
                verdict=found.verdict(turn),
                prompt_tokens=start,
                trained_tokens=None if mask is None or not answered else sum(mask[start:end]),
                notes=tuple(notes),
            )
        )
    return rows


def verify_snapshot(conversation: Conversation) -> Verification:
    """Compare every prompt of a conversation, and each whole branch, with full renders."""
    report = conversation.report(render_all=True)
    drifts: list[Drift] = []
    rows: list[Row] = []
    for check in report.prompts:
        branch = conversation.branches[check.branch]
        turn = branch.turns[check.turn]
        notes = tuple(dict.fromkeys(rewrite.name for rewrite in check.rewrites))
        rows.append(
            Row(
                branch=check.branch,
                turn=check.turn,
                verdict=check.verdict,
                prompt_tokens=turn.start,
                trained_tokens=turn.end - turn.start,
                notes=(*notes, check.problem) if check.problem else notes,
            )
        )
        if check.problem:
            drifts.append(_prompt_drift(branch, check))
    drifts += [_final_drift(conversation.branches[check.branch]) for check in report.final]
    return Verification(kind="snapshot", rows=tuple(rows), drifts=tuple(drifts), lines=tuple(report.lines()))


def _prompt_drift(branch: Branch, check: PromptCheck) -> Drift:
    turn = branch.turns[check.turn]
    return _drift(branch, branch.messages[: turn.message_index], turn.start, generate=True)


def _final_drift(branch: Branch) -> Drift:
    turn = branch.turns[-1]
    return _drift(branch, branch.messages[: turn.message_index + 1], turn.end, generate=False)


def _drift(branch: Branch, messages: Sequence[Mapping[str, Any]], end: int, *, generate: bool) -> Drift:
    text = branch.template.render_marked(messages, branch.control, generate=generate)
    render = branch.control.encode_array(text)
    return drift(branch.ledger.slice_ids(0, end), render, branch.template, mask=branch.ledger.mask[:end])
