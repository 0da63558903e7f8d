"""What happens in a run, as values: the journal, the screen and `--json` are fed from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

EventKind = Literal[
    "run_started",
    "rollout_started",
    "turn",
    "attempt_failed",
    "rollout_delivered",
    "rollout_dropped",
    "trainer",
    "warning",
]


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout's line in the table."""

    rollout_id: str
    task: str
    attempt: int = 0
    exit_status: str
    reward: float | None
    turns: int
    prompt_tokens: int
    """Tokens the model saw but did not sample."""
    sampled_tokens: int
    seconds: float
    samples: int = 0
    dropped: str = ""
    """Reason. Empty: delivered."""
    note: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. Which fields are set depends on the kind."""

    event: EventKind
    task: str = ""
    rollout_id: str = ""
    text: str = ""
    """For a person."""
    row: RolloutRow | None = None
    values: Mapping[str, object] = {}


Listener = Callable[[Event], None]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run in numbers; the last line of `--json`. All counts but `samples` are rollouts."""

    tasks: int
    started: int
    delivered: int
    """Accepted by the sender at its durability level."""
    parked: int
    dropped: Mapping[str, int]
    rewards: Mapping[str, float | None]
    """Mean over the task's graded rollouts; None: none was graded."""
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    received_by_trainer: int
    samples: int
