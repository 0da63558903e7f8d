"""A conversation for people: one self-contained HTML page, or terminal text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.checking.report import ConversationReport, counted
from token_tracking.conversation import Conversation
from token_tracking.history.branch import Branch, HeldTurn
from token_tracking.history.findings import lines as finding_lines
from token_tracking.ledger import TokenSource
from token_tracking.messages import texts
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


def render_html(conversation: Conversation, *, title: str, facts: Mapping[str, str] | None = None) -> str:
    """One HTML page that loads nothing: every token of every branch, coloured by source.

    Args:
        conversation: any state of it, an open turn too.
        title: heading of the page.
        facts: shown in a table on top, in order (reward, exit status, …); counts are added.
    """
    report = conversation.report()
    tokenizer = conversation.template.tokenizer
    branches = [_branch_data(conversation, index, report) for index in range(len(conversation.branches))]
    used = sorted({i for data in branches for i in data["ids"]})
    data = {
        "facts": [*(facts or {}).items(), *_counts(conversation).items()],
        "findings": _findings(report),
        "control": sorted(tokenizer.special_ids & set(used)),
        "texts": {i: tokenizer.decode([i]) for i in used},
        "branches": branches,
    }
    levels = [
        f'body[data-mode="{mode}"] b.{letter}{n} {{ background: var(--{letter}{n}); }}'
        for mode, letter, count in (("logprob", "l", 7), ("version", "v", 8))
        for n in range(count)
    ]
    page = resources.files("token_tracking").joinpath("page.html").read_text(encoding="utf-8")
    values = {"@LEVELS@": "\n".join(levels), "@TITLE@": html.escape(title), "@DATA@": _json(data)}
    # In one pass: what is filled in is not searched again.
    return re.sub("|".join(values), lambda match: values[match[0]], page)


def _json(value: Any) -> str:
    # Inside a script element: no "</script>", no "<!--", and no line separators that old parsers trip over.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _counts(conversation: Conversation) -> dict[str, str]:
    return {
        "turns": f"{conversation.turns:,}",
        "prompt tokens": f"{conversation.prompt_tokens:,}",
        "sampled tokens": f"{conversation.sampled_tokens:,}",
    }


def _findings(report: ConversationReport) -> list[tuple[str, str]]:
    """Each line with its class on the page."""
    first, *others = report.lines()
    flagged = {*finding_lines(report.findings)}
    return [
        ("ok" if report.equal == len(report.prompts) else "", first),
        *(("bad" if "broken:" in line else "warn" if line in flagged else "", line) for line in others),
    ]


def _branch_data(conversation: Conversation, index: int, report: ConversationReport) -> dict[str, Any]:
    branch = conversation.branches[index]
    ledger = branch.ledger
    first = branch.turns[branch.inherited - 1].end if branch.inherited else 0
    mask = np.array(ledger.mask)
    mask[:first] = 0
    logprobs = [None if np.isnan(value) else round(float(value), 4) for value in ledger.logprobs]
    info = report.branches[index]
    fork = ""
    if index:
        origin = "A root" if branch.parent is None else f"Began from branch {branch.parent}"
        shared = f" It shares {first:,} tokens with it; they are trained there." if first else ""
        fork = f"{origin} ({branch.cause}): {branch.why}.{shared}"
    return {
        "ids": ledger.ids.tolist(),
        "lp": logprobs,
        "sources": _runs(ledger.sources),
        "masks": _runs(mask),
        "versions": _runs(ledger.versions),
        "first": first,
        "odd": _odd_texts(conversation.template.tokenizer, ledger.ids.tolist()),
        "blocks": [msgspec.to_builtins(block) for block in blocks(branch, index, report)],
        "summary": f"{counted(info.turns, 'turn')}, {counted(len(ledger), 'token')}",
        "fork": fork,
    }


def _runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    if not len(values):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(values.astype(np.int64))) + 1, [len(values)]])
    return [(int(values[a]), int(b - a)) for a, b in pairwise(starts)]


def _odd_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[int, str]:
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
        badges = _badges(turn, number < branch.inherited)
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
        if check.problem:
            notes.setdefault(check.turn, []).append(("bad", "prompt broken"))
    return notes


def _turn_meta(turn: HeldTurn, number: int) -> str:
    last = turn.last
    parts = [f"turn {number}", f"{turn.end - turn.start:,} sampled", last.finish_reason]
    versions = sorted({s.weight_version for s in turn.segments if s.weight_version >= 0})
    if versions:
        parts.append("version " + ", ".join(map(str, versions)))
    kind = last.logprob_kind
    parts.append("no logprobs" if kind == "none" else f"{kind} logprobs")
    if last.temperature is not None:
        parts.append(f"temperature {last.temperature:g}")
    return " · ".join(parts)


def _badges(turn: HeldTurn, inherited: bool) -> list[tuple[str, str]]:
    badges: list[tuple[str, str]] = []
    if inherited:
        badges.append(("", "shared, trained in another branch"))
    if len(turn.segments) > 1:
        badges.append(("", f"aborted and continued: {len(turn.segments)} segments"))
    if turn.last.stop_id is None:
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
    """Split template tokens into messages at the last added token before each message's own text."""
    end = high if close else _header_start(branch, low, high)
    tokenizer = branch.template.tokenizer
    ids = branch.ledger.slice_ids(low, high).tolist()
    pieces = [tokenizer.decode([i]) for i in ids]
    for offset, text in _odd_texts(tokenizer, ids).items():
        pieces[offset] = text
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    whole = "".join(pieces)
    added = set(tokenizer.added_tokens.values())
    found: list[tuple[int, tuple[int, int] | None, str]] = []
    at = 0
    for message in branch.messages[first:last]:
        content = "".join(texts(message)).strip()
        spot = whole.find(content, at) if content else -1
        if spot < 0:
            continue
        inner = int(np.searchsorted(offsets, spot, side="right")) - 1
        outer = int(np.searchsorted(offsets, spot + len(content), side="left"))
        start = next((n for n in range(inner - 1, -1, -1) if ids[n] in added), inner)
        found.append((low + start, (low + inner, low + outer), str(message["role"])))
        at = spot + len(content)
    starts = [low if n == 0 else start for n, (start, _, _) in enumerate(found)]
    if not found and low < end:
        yield Block(
            role="template", start=low, end=end, meta=counted(end - low, "token"), turn=False, badges=[]
        )
    for n, (_, plain, role) in enumerate(found):
        stop = starts[n + 1] if n + 1 < len(found) else end
        if starts[n] < stop:
            meta = counted(stop - starts[n], "token")
            yield Block(role=role, start=starts[n], end=stop, meta=meta, turn=False, badges=[], plain=plain)


_ANSI = {TokenSource.TEMPLATE: "\x1b[2m", TokenSource.SAMPLED: "\x1b[36m", TokenSource.REPAIR: "\x1b[33m"}


def render_terminal(conversation: Conversation, *, colour: bool = True) -> str:
    r"""The conversation as terminal text: template tokens dim, sampled ones cyan, repairs yellow.

    Control characters of token text are shown as `\x1b` and the like, so that no token can move the cursor.
    """
    report = conversation.report()
    tokenizer = conversation.template.tokenizer
    lines: list[str] = [*report.lines(), ""]
    for index, branch in enumerate(conversation.branches):
        if len(conversation.branches) > 1:
            lines.append(f"== branch {index} [{branch.cause}]: {branch.why}")
        for block in blocks(branch, index, report):
            notes = "".join(f" [{text}]" for _, text in block.badges)
            lines.append(f"-- {block.role}  {block.meta}{notes}")
            ids, sources = branch.ledger.ids, branch.ledger.sources
            start = block.start
            parts: list[str] = []
            for value, count in _runs(sources[block.start : block.end]):
                text = _visible(tokenizer.decode(ids[start : start + count].tolist()))
                parts.append(f"{_ANSI[TokenSource(value)]}{text}\x1b[0m" if colour else text)
                start += count
            lines.append("".join(parts).rstrip("\n"))
    return "\n".join(lines)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
