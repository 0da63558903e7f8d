"""What happens in a run, as values: the journal, the screen and `--json` are fed from these."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from agent_flow.errors import Fault

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
    fault: Fault | Literal[""] = ""
    """Whose fault it is that it was dropped, or has no verdict though one was due. Empty: neither."""
    ungraded: str = ""
    """Reason why it was delivered without a verdict although one was due. Empty: it has one, or none was due.
    """
    note: str = ""

    @property
    def reward_text(self) -> str:
        """The reward for people; `-` where there is none."""
        return "-" if self.reward is None else f"{self.reward:g}"


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
    ungraded: Mapping[str, int] = {}
    """Delivered without a verdict although one was due, by reason: out of loss and baseline."""
    rewards: Mapping[str, float | None]
    """Mean over the task's graded rollouts; None: none was graded."""
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    received_by_trainer: int
    samples: int
    engine: Mapping[str, int] = {}
    """What the engine counted, by name, when the last rollout had ended. Empty: it does not count."""


def pasteable(command: str) -> str:
    """A command as a reader can paste it: `uv run` leaves the programs off the user's own PATH."""
    return f"uv run {command}" if "UV_RUN_RECURSION_DEPTH" in os.environ else command
