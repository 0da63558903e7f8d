"""A conversation for people: one self-contained HTML page, or terminal text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.checking.report import ConversationReport, counted
from token_tracking.control import ControlTokens
from token_tracking.conversation import Conversation
from token_tracking.history.branch import Branch
from token_tracking.history.findings import lines as finding_lines
from token_tracking.ledger import TokenSource
from token_tracking.view_blocks import blocks, odd_texts


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
    prompts = "prompt tokens" if len(conversation.branches) == 1 else "prompt tokens of all branches"
    return {
        "turns": f"{conversation.turns:,}",
        prompts: f"{conversation.prompt_tokens:,}",
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
        shared = f"shares {first:,} tokens with it; they are trained there" if first else "shares no turn"
        fork = f"{origin} ({branch.cause}): {branch.why}. It {shared}."
    return {
        "ids": ledger.ids.tolist(),
        "lp": logprobs,
        "sources": _runs(ledger.sources),
        "masks": _runs(mask),
        "versions": _runs(ledger.versions),
        "first": first,
        "odd": odd_texts(conversation.template.tokenizer, ledger.ids.tolist()),
        "blocks": [msgspec.to_builtins(block) for block in blocks(branch, index, report)],
        "summary": f"{counted(info.turns, 'turn')}, {counted(len(ledger), 'token')}",
        "fork": fork,
    }


def _runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    if not len(values):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(values.astype(np.int64))) + 1, [len(values)]])
    return [(int(values[a]), int(b - a)) for a, b in pairwise(starts)]


_ANSI = {TokenSource.TEMPLATE: "\x1b[2m", TokenSource.SAMPLED: "\x1b[36m", TokenSource.REPAIR: "\x1b[33m"}


_CONTROL = "\x1b[4m"
SPELLED = "\\"
"""Stands before text that spells a control token and is none."""


def render_terminal(conversation: Conversation, *, colour: bool = True) -> str:
    r"""The conversation as terminal text: template tokens dim, sampled ones cyan, repairs yellow.

    Control tokens are underlined; text that only spells one has a backslash before it. Control characters of
    token text are shown as `\x1b` and the like, so that no token can move the cursor.
    """
    report = conversation.report()
    lines: list[str] = [*report.lines(), ""]
    body: list[str] = []
    pen = _Pen(conversation, colour=colour)
    for index, branch in enumerate(conversation.branches):
        if len(conversation.branches) > 1:
            body.append(f"== branch {index} [{branch.cause}]: {branch.why}")
        for block in blocks(branch, index, report):
            notes = "".join(f" [{text}]" for _, text in block.badges)
            body.append(f"-- {block.role}  {block.meta}{notes}")
            body.append(pen.draw(branch, block.start, block.end).rstrip("\n"))
    if pen.spelled:
        lines.insert(
            -1, f"{SPELLED}{pen.spelled}: with a backslash, text that spells a control token, not one"
        )
    return "\n".join([*lines, *body])


class _Pen:
    """Draws tokens."""

    def __init__(self, conversation: Conversation, *, colour: bool):
        self._tokenizer = conversation.template.tokenizer
        self._control = ControlTokens(self._tokenizer, "keep")
        self._special = np.array(sorted(self._tokenizer.special_ids), np.int32)
        self._colour = colour
        self.spelled = ""
        """The first control token that some text spelled."""

    def draw(self, branch: Branch, start: int, end: int) -> str:
        ids, sources = branch.ledger.ids[start:end], branch.ledger.sources[start:end]
        kinds = sources.astype(np.int64) * 2 + np.isin(ids, self._special)
        parts: list[str] = []
        at = 0
        for kind, count in _runs(kinds):
            text = self._tokenizer.decode(ids[at : at + count].tolist())
            shown = _visible(text if kind % 2 else self._text(text))
            style = _ANSI[TokenSource(kind // 2)] + (_CONTROL if kind % 2 else "")
            parts.append(f"{style}{shown}\x1b[0m" if self._colour else shown)
            at += count
        return "".join(parts)

    def _text(self, text: str) -> str:
        """Text that is no control token, marked where it spells one."""
        at = 0
        parts: list[str] = []
        for low, high in self._control.find(text):
            parts += [text[at:low], SPELLED]
            at, self.spelled = low, self.spelled or text[low:high]
        return "".join([*parts, text[at:]])


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
