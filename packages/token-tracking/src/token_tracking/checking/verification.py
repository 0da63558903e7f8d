"""`Verification`: what was found of a recorded conversation; ours, prompt by prompt."""

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
from token_tracking.history.branch import Branch


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
    unfinished: int = 0
    """Of a snapshot: turns that were aborted and not continued. They are no fault."""
    limits: tuple[str, ...] = ()
    """What cannot be seen in a file of this kind."""

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
            "unfinished": self.unfinished,
            "findings": list(self.lines),
            "limits": list(self.limits),
        }


def verify_snapshot(conversation: Conversation) -> Verification:
    """Compare every prompt of a conversation, and each whole branch, with full renders."""
    report = conversation.report(render_all=True)
    drifts: list[Drift] = []
    rows: list[Row] = []
    for check in report.prompts:
        branch = conversation.branches[check.branch]
        turn = branch.turns[check.turn]
        notes = tuple(dict.fromkeys(rewrite.name for rewrite in check.rewrites))
        if branch.open_turn and check.turn == len(branch.turns) - 1:
            notes += (f"not finished: aborted after {turn.end - turn.start} tokens",)
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
    ended = [conversation.branches[check.branch] for check in report.final]
    # A turn that is still open has no message to render.
    drifts += [_final_drift(branch) for branch in ended if not branch.open_turn]
    return Verification(
        kind="snapshot",
        rows=tuple(rows),
        drifts=tuple(drifts),
        lines=tuple(report.lines()),
        unfinished=sum(branch.open_turn for branch in ended),
    )


def _prompt_drift(branch: Branch, check: PromptCheck) -> Drift:
    turn = branch.turns[check.turn]
    return _drift(branch, branch.messages[: turn.message_index], turn.start, (), generate=True)


def _final_drift(branch: Branch) -> Drift:
    turn = branch.turns[-1]
    close: list[int] = []
    if turn.last.stop_id is None:
        # The render closes a turn that was cut off; nobody sampled that.
        template = branch.template
        sampled = branch.closing(len(branch.turns) - 1)
        end_text = template.facts.end_of(branch.messages[turn.message_index]) or ""
        repair = "" if sampled else branch.repair(turn)
        close = [*template.tokenizer.encode(repair), *template.tokenizer.encode(end_text)[sampled:]]
    return _drift(branch, branch.messages[: turn.message_index + 1], turn.end, close, generate=False)


def _drift(
    branch: Branch, messages: Sequence[Mapping[str, Any]], end: int, close: Sequence[int], *, generate: bool
) -> Drift:
    text = branch.template.render_marked(messages, branch.control, generate=generate)
    render = branch.control.encode_array(text)
    ids = np.concatenate([branch.ledger.slice_ids(0, end), np.array(close, np.int32)])
    mask = np.concatenate([branch.ledger.mask[:end], np.zeros(len(close), np.uint8)])
    return drift(ids, render, branch.template, mask=mask)
