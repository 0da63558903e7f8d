"""`HeldTurn`: an assistant turn as it is held, the calls that sampled it, and the prompt before it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from token_tracking.sample import FinishReason, LogprobKind


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation call sampled: a whole turn, or a piece of one that was aborted and continued."""

    start: int
    end: int
    finish_reason: FinishReason
    stop_id: int | None
    weight_version: int
    logprob_kind: LogprobKind
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    routed: bool = False
    """Whether the call came with routed experts."""
    media: tuple[int, ...] = ()
    """Media placeholder ids among what was sampled; no image stands behind them."""
    repairs: tuple[str, ...] = ()
    """Repairs of the record, by name."""


class HeldTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn in a branch, with the prompt text before it."""

    frame: str
    prefill: str
    message_index: int
    """Index of its message."""
    segments: tuple[Segment, ...]
    repair: str = ""
    cross_stop: bool = False
    """The turn ended with another stop token than the one the template prints there; both are held."""
    found_by: str
    """How the prompt before the turn was made: `render`, `program` or `marker`."""
    number: int
    """Position among all turns of the conversation, in the order they were recorded."""

    @property
    def start(self) -> int:
        """First sampled token."""
        return self.segments[0].start

    @property
    def end(self) -> int:
        """One past the last sampled token."""
        return self.segments[-1].end

    @property
    def last(self) -> Segment:
        """The segment that ended the turn, or was aborted."""
        return self.segments[-1]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A generation prompt that is written to the ledger and waits for its completion."""

    frame: str
    prefill: str
    found_by: str


def sampled_count(turns: Sequence[HeldTurn]) -> int:
    """Sampled tokens of some turns."""
    return int(np.sum([turn.end - turn.start for turn in turns], dtype=np.int64))
