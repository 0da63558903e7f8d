"""The outcome table as data: what an agent's exit status means for grading, reward and training."""

from __future__ import annotations

import msgspec
from token_tracking.sample import Status


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    exit_status: str
    """The scaffold's exit status; `*` matches every other one."""
    evaluate: bool
    """Grade the patch?"""
    reward: float | None
    """The reward when it is not graded. None: no reward (the rollout says nothing about the policy)."""
    in_loss: bool
    in_baseline: bool
    status: Status
    why: str


OUTCOMES: tuple[Outcome, ...] = (
    Outcome(
        exit_status="Submitted",
        evaluate=True,
        reward=None,
        in_loss=True,
        in_baseline=True,
        status="completed",
        why="the agent says it is done: the grader decides",
    ),
    Outcome(
        exit_status="LimitsExceeded",
        evaluate=False,
        reward=0.0,
        in_loss=True,
        in_baseline=True,
        status="truncated",
        why="the agent used up its turns without submitting",
    ),
    Outcome(
        exit_status="ContextExceeded",
        evaluate=False,
        reward=0.0,
        in_loss=True,
        in_baseline=True,
        status="truncated",
        why="the conversation filled the model's context without a submission",
    ),
    Outcome(
        exit_status="TimeExceeded",
        evaluate=False,
        reward=0.0,
        in_loss=False,
        in_baseline=True,
        status="truncated",
        why="wall-clock time depends on the machine, so its tokens are not trained",
    ),
    Outcome(
        exit_status="RepeatedFormatError",
        evaluate=False,
        reward=0.0,
        in_loss=True,
        in_baseline=True,
        status="failed",
        why="the agent did not keep to its action format",
    ),
    Outcome(
        exit_status="*",
        evaluate=False,
        reward=None,
        in_loss=False,
        in_baseline=False,
        status="failed",
        why="not an exit status that this table knows: evidence only",
    ),
)


def outcome_of(exit_status: str) -> Outcome:
    """The table's row for an exit status."""
    for row in OUTCOMES:
        if row.exit_status == exit_status:
            return row
    return OUTCOMES[-1]
