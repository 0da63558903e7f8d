"""`ConversationReport`: the held tokens of a conversation, checked prompt by prompt against full renders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.checking.checks import PromptCheck, check_branch
from token_tracking.history import findings
from token_tracking.history.branch import Branch
from token_tracking.history.causes import Cause


class BranchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One branch and why it began."""

    branch: int
    parent: int | None
    """None: it shares no turn with an earlier one, or is the first."""
    cause: Cause
    why: str
    turns: int
    """Turns of its own."""
    shared_turns: int
    shared_tokens: int
    tokens: int
    open_tokens: int = 0
    """Tokens of its last turn, if that was aborted and is not finished. It is no fault."""


class ConversationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the tokens of a conversation."""

    prompts: tuple[PromptCheck, ...]
    """One check per recorded turn: its prompt, when it was sent."""
    final: tuple[PromptCheck, ...]
    """One per branch with turns: the render of all messages up to its last turn, without generation
    prompt."""
    branches: tuple[BranchInfo, ...]
    cross_stops: int
    """Turns that ended with another stop token than the template prints there, kept or made a branch."""
    cut_off: int
    """Turns that ended without a stop token; one that waits to be continued has not ended."""
    prompts_by: dict[str, int]
    """How prompts were made: `render` (the whole text), `program` (a compiled delta), `marker` (two
    renders)."""
    findings: dict[str, int]
    """What was repaired, flagged or left out, counted by name (`Conversation.findings`)."""

    @property
    def checked_by(self) -> dict[str, int]:
        """How prompts were checked: `render` (its own), `proof` (it begins the next prompt's render)."""
        return dict(sorted(Counter(check.by for check in self.prompts).items()))

    @property
    def equal(self) -> int:
        """Prompts equal to their render."""
        return sum(check.verdict == "equal" for check in self.prompts)

    @property
    def rewritten(self) -> int:
        """Prompts equal but for named rewrites of template tokens."""
        return sum(check.verdict == "rewritten" for check in self.prompts)

    @property
    def broken(self) -> int:
        """Prompts that differ from their render."""
        return sum(check.verdict == "broken" for check in self.prompts)

    @property
    def rewrites(self) -> dict[str, int]:
        """Rewrites by name: how many turns each was seen in, the final renders included."""
        seen = {
            (check.branch, rewrite.turn, rewrite.name)
            for check in (*self.prompts, *self.final)
            for rewrite in check.rewrites
        }
        return dict(sorted(Counter(name for _, _, name in seen).items()))

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        counts = {"equal": self.equal, "rewritten": self.rewritten, "broken": self.broken}
        return {**counts, "checked_by": self.checked_by, "rewrites": self.rewrites, **values}

    def lines(self) -> list[str]:
        """The findings, one line each, for people."""
        total = len(self.prompts)
        lines = [f"{self.equal} of {total} prompts equal to their full render"]
        if self.rewritten:
            lines.append(f"{self.rewritten} of {total} prompts equal but for rewrites of template tokens")
        lines += [
            f"branch {c.branch}, prompt of turn {c.turn}: broken: {c.problem}"
            for c in self.prompts
            if c.problem
        ]
        lines += [f"{name}: {counted(count, 'turn')}" for name, count in self.rewrites.items()]
        unfinished = {info.branch: info.open_tokens for info in self.branches if info.open_tokens}
        lines += [
            f"branch {c.branch}, final render: {c.problem}"
            for c in self.final
            if c.problem and c.branch not in unfinished
        ]
        lines += [
            f"branch {branch}: its last turn is open: aborted after {counted(tokens, 'token')}, not finished"
            for branch, tokens in unfinished.items()
        ]
        lines += [_origin(info) for info in self.branches[1:]]
        if self.cut_off:
            lines.append(f"{counted(self.cut_off, 'turn')} cut off before a stop token")
        lines += findings.lines(self.findings)
        if proven := self.checked_by.get("proof", 0):
            own = counted(total - proven, "prompt")
            lines.append(
                f"{own} checked by a render of its own, {proven} proven to begin the next one's render"
            )
        return lines


def _origin(info: BranchInfo) -> str:
    if info.parent is None:
        return f"branch {info.branch} is a root [{info.cause}]: {info.why}"
    sharing = f"sharing {counted(info.shared_tokens, 'token')}" if info.shared_tokens else "sharing no turn"
    return f"branch {info.branch} began from branch {info.parent}, {sharing} [{info.cause}]: {info.why}"


def counted(count: int, noun: str) -> str:
    """`1 turn`, `2,000 turns`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def build(branches: Sequence[Branch], *, render_all: bool = False) -> ConversationReport:
    """Check all branches; see `Conversation.report`."""
    prompts: list[PromptCheck] = []
    final: list[PromptCheck] = []
    own = [turn for branch in branches for turn in branch.turns[branch.inherited :]]
    for index, branch in enumerate(branches):
        if len(branch.turns) > branch.inherited:
            checked, whole = check_branch(branch, index, render_all=render_all)
            prompts += checked
            final.append(whole)
    counts = findings.count(branches)
    return ConversationReport(
        prompts=tuple(prompts),
        final=tuple(final),
        branches=tuple(_info(branch, index) for index, branch in enumerate(branches)),
        cross_stops=counts.get("cross_stop_kept", 0) + counts.get("cross_stop_branched", 0),
        cut_off=sum(turn.last.stop_id is None for turn in own) - sum(branch.open_turn for branch in branches),
        prompts_by=dict(sorted(Counter(turn.found_by for turn in own).items())),
        findings=dict(counts),
    )


def _info(branch: Branch, index: int) -> BranchInfo:
    return BranchInfo(
        branch=index,
        parent=branch.parent,
        cause=branch.cause,
        why=branch.why,
        turns=len(branch.turns) - branch.inherited,
        shared_turns=branch.inherited,
        shared_tokens=branch.turns[branch.inherited - 1].end if branch.inherited else 0,
        tokens=len(branch.ledger),
        open_tokens=branch.turns[-1].end - branch.turns[-1].start if branch.open_turn else 0,
    )
