"""`Block`: a run of a branch's tokens under one heading, a message or an assistant turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from token_tracking.checking.report import ConversationReport, counted
from token_tracking.history.branch import Branch
from token_tracking.history.turn import HeldTurn
from token_tracking.messages import texts
from token_tracking.template import ChatTemplate
from token_tracking.tokenizer import Tokenizer


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens under one heading: a message, or an assistant turn."""

    role: str
    start: int
    end: int
    meta: str
    turn: bool
    badges: list[tuple[str, str]]
    plain: tuple[int, int] | None = None
    """The part that is the message's own text. None: not found."""


def odd_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[int, str]:
    """Text of tokens that hold pieces of a character: the last gets it, the others nothing."""
    odd: dict[int, str] = {}
    cache = {i: tokenizer.decode([i]) for i in set(ids)}
    at = 0
    while at < len(ids):
        if "\ufffd" not in cache[ids[at]]:
            at += 1
            continue
        for end in range(at + 2, min(at + 9, len(ids)) + 1):
            text = tokenizer.decode(ids[at:end])
            if "\ufffd" not in text:
                odd |= dict.fromkeys(range(at, end - 1), "") | {end - 1: text}
                at = end
                break
        else:
            at += 1
    return odd


def blocks(branch: Branch, index: int, report: ConversationReport) -> Iterator[Block]:
    """The tokens of a branch, message by message and turn by turn; shared turns come like the others."""
    at = message = 0
    notes = _notes(index, report)
    for number, turn in enumerate(branch.turns):
        yield from _messages(branch, at, turn.start, message, turn.message_index)
        start = _header_start(branch, at, turn.start)
        waits = branch.open_turn and number == len(branch.turns) - 1
        badges = _badges(turn, number < branch.inherited, waits=waits)
        badges += notes.get(number, [])
        meta = _turn_meta(turn, number)
        yield Block(
            role="assistant", start=start, end=turn.end, meta=meta, turn=True, badges=[*dict.fromkeys(badges)]
        )
        at, message = turn.end, turn.message_index + 1
    if at < len(branch.ledger):
        yield from _messages(branch, at, len(branch.ledger), message, len(branch.messages), close=True)


def _notes(index: int, report: ConversationReport) -> dict[int, list[tuple[str, str]]]:
    """Badges of the turns of a branch: how they are printed now, and whether their prompt is broken."""
    notes: dict[int, list[tuple[str, str]]] = {}
    for check, when in [(c, "") for c in report.prompts] + [(c, "final render: ") for c in report.final]:
        if check.branch != index:
            continue
        for rewrite in check.rewrites:
            badge = ("", when + rewrite.name)
            if badge not in (known := notes.setdefault(rewrite.turn, [])):
                known.append(badge)
        if when and report.branches[index].open_tokens:
            continue  # an open turn has no message to render yet
        if check.problem:
            what = "final render broken" if when else "prompt broken"
            notes.setdefault(check.turn, []).append(("bad", what))
    return notes


def _turn_meta(turn: HeldTurn, number: int) -> str:
    last = turn.last
    place = f"turn {number}"
    if number != turn.number:
        place += f" (of the conversation: {turn.number})"
    parts = [place, f"{turn.end - turn.start:,} sampled", last.finish_reason]
    versions = sorted({s.weight_version for s in turn.segments if s.weight_version >= 0})
    if versions:
        parts.append("version " + ", ".join(map(str, versions)))
    kind = last.logprob_kind
    parts.append("no logprobs" if kind == "none" else f"{kind} logprobs")
    if last.temperature is not None:
        parts.append(f"temperature {last.temperature:g}")
    return " · ".join(parts)


def _badges(turn: HeldTurn, inherited: bool, *, waits: bool) -> list[tuple[str, str]]:
    badges: list[tuple[str, str]] = []
    if inherited:
        badges.append(("", "shared, trained in another branch"))
    if len(turn.segments) > 1:
        badges.append(("", f"aborted and continued: {len(turn.segments)} segments"))
    if waits:
        badges.append(("", f"open: aborted after {counted(turn.end - turn.start, 'token')}"))
    elif turn.last.stop_id is None:
        badges.append(("", "cut off" if turn.last.finish_reason != "stop" else "stopped by a stop string"))
    if turn.cross_stop:
        badges.append(("", "another stop token than the template prints"))
    return badges


def _header_start(branch: Branch, low: int, high: int) -> int:
    """Where the header before a turn starts: at the last control token before it."""
    specials = branch.template.tokenizer.special_ids
    ids = branch.ledger.slice_ids(low, high)
    return next((low + n for n in range(len(ids) - 1, -1, -1) if int(ids[n]) in specials), high)


def _messages(
    branch: Branch, low: int, high: int, first: int, last: int, *, close: bool = False
) -> Iterator[Block]:
    """Split template tokens into messages where the header before each message's own text begins."""
    end = high if close else _header_start(branch, low, high)
    tokenizer = branch.template.tokenizer
    ids = branch.ledger.slice_ids(low, high).tolist()
    pieces = [tokenizer.decode([i]) for i in ids]
    for offset, text in odd_texts(tokenizer, ids).items():
        pieces[offset] = text
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    whole = "".join(pieces)
    found: list[tuple[int, tuple[int, int] | None, str]] = []
    at = seen = 0
    for message in branch.messages[first:last]:
        content = "".join(texts(message)).strip()
        spot = whole.find(content, at) if content else -1
        if spot < 0:
            continue
        inner = int(np.searchsorted(offsets, spot, side="right")) - 1
        outer = int(np.searchsorted(offsets, spot + len(content), side="left"))
        start = seen + _message_start(ids[seen:inner], branch.template)
        found.append((low + start, (low + inner, low + outer), str(message["role"])))
        at, seen = spot + len(content), outer
    starts = [start for start, _, _ in found]
    if found and not (low == 0 and _has_words(ids[: starts[0]], branch.template)):
        starts[0] = low
    first = starts[0] if starts else end
    if low < first:  # tools that the template prints where no system message stands, or nothing else
        yield Block(
            role="template", start=low, end=first, meta=counted(first - low, "token"), turn=False, badges=[]
        )
    for n, (_, plain, role) in enumerate(found):
        stop = starts[n + 1] if n + 1 < len(found) else end
        if starts[n] < stop:
            meta = counted(stop - starts[n], "token")
            yield Block(role=role, start=starts[n], end=stop, meta=meta, turn=False, badges=[], plain=plain)


def _message_start(before: Sequence[int], template: ChatTemplate) -> int:
    """Where a message begins in the tokens between the text of the one before and its own."""
    tokenizer = template.tokenizer
    control = [n for n, i in enumerate(before) if i in tokenizer.special_ids]
    closes = [n for n in control if before[n] in template.closings.close_ids]
    header = [n for n in control if closes and n > closes[-1]][:1]
    added = set(tokenizer.added_tokens.values())
    inner = [n for n, i in enumerate(before) if i in added][-1:]  # one of several results in one message
    return next(iter([*header, *control[-1:], *inner]), len(before))


def _has_words(ids: Sequence[int], template: ChatTemplate) -> bool:
    return any(
        i not in template.tokenizer.special_ids and template.tokenizer.decode([i]).strip() for i in ids
    )
