"""What was repaired, flagged or left out of a conversation, counted by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from token_tracking.answers.experts import Rows, padding_rows, repeated_rows
from token_tracking.errors import RecordError
from token_tracking.history.branch import Branch
from token_tracking.history.turn import Segment
from token_tracking.messages import with_arguments

_SENTENCES = {
    "cross_stop_branched": ("turn", "stopped with another token than the template prints: a branch began"),
    "cross_stop_kept": ("turn", "stopped with another token than the template prints: both are held"),
    "cut_at_stop": ("answer", "of the engine went on after the stop: cut there"),
    "echo_removed": ("answer", "of the engine began with the prompt: taken off"),
    "logprobs_left_out": ("answer", "of the engine had impossible log-probabilities: taken without them"),
    "media_placeholder": ("answer", "with a sampled media placeholder (image, sound): kept, out of the loss"),
    "routed_experts_gap": ("branch", "without routed experts: a delta begins after the last row held"),
    "routed_experts_padding": ("branch", "without routed experts: rows are padding"),
    "routed_experts_payload": ("branch", "without routed experts: what was put off cannot be read"),
    "routed_experts_repeated_rows": ("row", "of routed experts equal to the row before"),
    "routed_experts_shape": ("branch", "without routed experts: what was put off has another shape"),
    "routed_experts_turn_without": ("branch", "without routed experts: a turn came without them"),
    "stop_not_sampled": ("answer", "of the engine lacks the stop token that it claims: closed with mask 0"),
    "unreadable_arguments": ("tool call", "whose arguments are no JSON object: rendered as the value of one"),
}


class RoutedExperts:
    """The routed experts of one branch up to its last sampled token, or why they are left out."""

    def __init__(self, branch: Branch, wanted: bool, *, join: bool):
        """Look at them, answer by answer, or join them.

        Args:
            branch: with one turn at least.
            wanted: whether any branch of the conversation recorded routed experts.
            join: False: `rows` stays None, and deferred rows are read one answer at a time.
        """
        self.rows: Rows | None = None
        self.missing: str | None = None
        """None: there are rows, or nothing was ever recorded. Else the name under which it is counted."""
        self.why: str | None = None
        self.repeated = 0
        count = branch.turns[-1].end - 1
        if not wanted or not count:
            return
        gap = branch.experts.gap(count)
        if gap is None:
            try:
                rows = branch.experts.joined(count) if join else None
                self._check(branch.experts.chunks(count) if rows is None else [rows])
            except RecordError as error:  # deferred rows that are not what was said of them
                self.missing, self.why = error.code.removeprefix("routed_"), str(error)
                return
            self.rows = rows if self.missing is None else None
            return
        # The call that read the first missing row should have brought it.
        turn, routed = next((t, s.routed) for t in branch.turns for s in t.segments if s.end > gap[0] + 1)
        self.missing = "gap" if routed else "turn_without"
        cause = "a delta begins after the last row held" if routed else f"turn {turn.number} has none"
        self.why = f"rows {gap[0]} to {gap[1]} are missing: {cause}"

    def _check(self, chunks: Iterable[Rows]) -> None:
        at = padded = repeated = 0
        first: int | None = None
        before: Rows | None = None
        for rows in chunks:
            padding = padding_rows(rows)
            padded += len(padding)
            if first is None and len(padding):
                first = at + int(padding[0])
            repeated += len(repeated_rows(rows))
            repeated += before is not None and np.array_equal(before, rows[0])
            at, before = at + len(rows), rows[-1]
        if first is not None:
            self.missing = "padding"
            self.why = f"{padded} rows are placeholders, the first is row {first}"
            return
        self.repeated = repeated


def records_experts(branches: Sequence[Branch]) -> bool:
    """Whether any turn came with routed experts."""
    return any(segment.routed for branch in branches for segment in _segments(branch))


def media_turn(branch: Branch) -> tuple[int, int] | None:
    """The first turn in which a media placeholder was sampled, and its id."""
    found = ((turn.number, s.media[0]) for turn in branch.turns for s in turn.segments if s.media)
    return next(found, None)


def count(branches: Sequence[Branch]) -> Mapping[str, int]:
    """See `Conversation.findings`."""
    counts: Counter[str] = Counter()
    wanted = records_experts(branches)
    for branch in branches:
        turns = branch.turns[branch.inherited :]
        own = [segment for turn in turns for segment in turn.segments]
        counts["cross_stop_kept"] += sum(turn.cross_stop for turn in turns)
        counts["cross_stop_branched"] += branch.cause == "cross_stop"
        counts["unreadable_arguments"] += _unreadable_arguments(branch)
        for segment in own:
            counts.update(segment.repairs)
            counts["media_placeholder"] += bool(segment.media)
        if own:
            experts = RoutedExperts(branch, wanted, join=False)
            if experts.missing is not None:
                counts[f"routed_experts_{experts.missing}"] += 1
            counts["routed_experts_repeated_rows"] += experts.repeated
    return {name: number for name, number in sorted(counts.items()) if number}


def lines(counts: Mapping[str, int]) -> list[str]:
    """Counts as sentences, one line each."""
    shown: list[str] = []
    for name, number in counts.items():
        noun, what = _SENTENCES.get(name, ("time", name))
        plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
        shown.append(f"{number:,} {noun}{plural} {what}")
    return shown


def _unreadable_arguments(branch: Branch) -> int:
    """Tool calls rendered in a branch, not in what it shares, without the object that the template needs."""
    if branch.template.facts.arguments_form != "object":
        return 0
    start = branch.turns[branch.inherited - 1].message_index + 1 if branch.inherited else 0
    found: list[str] = []
    for message in branch.messages[start:]:
        with_arguments(message, "object", fallback=found.append)
    return len(found)


def _segments(branch: Branch) -> list[Segment]:
    return [segment for turn in branch.turns for segment in turn.segments]
