"""What was repaired, flagged or left out of a conversation, counted by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from token_tracking.branch import Branch, Segment
from token_tracking.experts import Rows, padding_rows, repeated_rows


class RoutedExperts:
    """The routed experts of one branch up to its last sampled token, or why they are left out."""

    def __init__(self, branch: Branch, wanted: bool):
        """Join them.

        Args:
            branch: with one turn at least.
            wanted: whether any branch of the conversation recorded routed experts.
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
            self._check(branch.experts.joined(count))
            return
        # The call that read the first missing row should have brought it.
        turn, routed = next((t, s.routed) for t in branch.turns for s in t.segments if s.end > gap[0] + 1)
        self.missing = "gap" if routed else "turn_without"
        cause = "a delta begins after the last row held" if routed else f"turn {turn.number} has none"
        self.why = f"rows {gap[0]} to {gap[1]} are missing: {cause}"

    def _check(self, rows: Rows) -> None:
        padding = padding_rows(rows)
        if len(padding):
            self.missing = "padding"
            self.why = f"{len(padding)} rows are placeholders, the first is row {int(padding[0])}"
            return
        self.rows = rows
        self.repeated = len(repeated_rows(rows))


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
        own = [segment for turn in branch.turns[branch.inherited :] for segment in turn.segments]
        for segment in own:
            counts.update(segment.repairs)
            counts["media_placeholder"] += bool(segment.media)
        if own:
            experts = RoutedExperts(branch, wanted)
            if experts.missing is not None:
                counts[f"routed_experts_{experts.missing}"] += 1
            counts["routed_experts_repeated_rows"] += experts.repeated
    return {name: number for name, number in sorted(counts.items()) if number}


def _segments(branch: Branch) -> list[Segment]:
    return [segment for turn in branch.turns for segment in turn.segments]
