"""The outcome table as data: what the end of a rollout means for grading, reward, training and trying again.

The words of SWE-agent are those of its `exit_status`, with the autosubmission that its handling of errors
makes (`submitted (exit_cost)`); those of mini-swe-agent are its own.
"""

from __future__ import annotations

import difflib
from typing import Literal

import msgspec
from token_tracking.sample import Status

from agent_flow.errors import Fault, RolloutError
from agent_flow.rollout import Mode, Rollout


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: of an exit status, or of an error."""

    mode: Mode | Literal["*"] = "*"
    ends: str
    """An exit status; or, with `fault`, the boundary of an error. `*` matches every other one."""
    fault: Fault | Literal["*"] | None = None
    """Whose fault an error is. None: no error, an agent's exit status."""
    evaluate: bool = False
    """Grade the patch?"""
    reward: float | None = None
    """The reward when it is not graded. None: no reward (the rollout says nothing about the policy)."""
    in_loss: bool = False
    in_baseline: bool = False
    status: Status = "failed"
    sample: bool = True
    """False: nothing is delivered, the rollout is a counted drop."""
    retry: bool = False
    """Start the rollout again (`worker.max_attempts`), if the error says that this can help."""
    refill: bool = False
    """When it is dropped for good, start another in its place (`worker.max_refills`)."""
    why: str

    @property
    def mask(self) -> str:
        """Sampled tokens keep loss mask 1 in every sample (promise 1); `in_loss` says whether it is used."""
        return "sampled" if self.sample else "-"


def _graded(ends: str, why: str) -> Outcome:
    return Outcome(ends=ends, evaluate=True, in_loss=True, in_baseline=True, status="completed", why=why)


def _cut(ends: str, why: str, *, evaluate: bool = False, in_loss: bool = False) -> Outcome:
    reward = None if evaluate else 0.0
    return Outcome(
        ends=ends,
        evaluate=evaluate,
        reward=reward,
        in_loss=in_loss,
        in_baseline=True,
        status="truncated",
        why=why,
    )


def _wrong(ends: str, why: str) -> Outcome:
    return Outcome(ends=ends, reward=0.0, in_loss=True, in_baseline=True, status="failed", why=why)


def _evidence(ends: str, why: str) -> Outcome:
    return Outcome(ends=ends, status="failed", why=why)


def _dropped(ends: str, fault: Fault | Literal["*"], why: str, *, again: bool = False) -> Outcome:
    return Outcome(ends=ends, fault=fault, sample=False, retry=again, refill=again, why=why)


_TIME = "wall-clock time depends on the machine, so its tokens are not trained"
_OF_TRAINING = (
    _graded("Submitted", "the agent says it is done: the grader decides"),
    _cut("LimitsExceeded", "the agent used up its turns without submitting", in_loss=True),
    _cut(
        "ContextExceeded",
        "the conversation filled the model's context without a submission",
        in_loss=True,
    ),
    _cut("TimeExceeded", _TIME),
    _wrong("RepeatedFormatError", "the agent did not keep to its action format"),
    Outcome(ends="Aborted", status="aborted", why="cut from outside: says nothing about the policy"),
    _graded("submitted", "the agent says it is done: the grader decides"),
    _cut("submitted (exit_context)", "what there was when the context was full: graded", evaluate=True),
    _cut("submitted (exit_max_iter_out)", "what there was after the last turn: graded", evaluate=True),
    _cut("submitted (exit_cost)", "what there was at the cost limit: graded", evaluate=True),
    _cut("submitted (exit_format)", "what there was when the format was lost: graded", evaluate=True),
    _cut("submitted (exit_forfeit)", "what there was when the agent gave up: graded", evaluate=True),
    _cut("submitted (exit_total_execution_time)", _TIME, evaluate=True),
    _cut("submitted (exit_command_timeout)", _TIME, evaluate=True),
    _cut("exit_context", "the context was full and there was no change to submit", in_loss=True),
    _cut("exit_max_iter_out", "the turns were used up without a change", in_loss=True),
    _cut("exit_cost", "the cost limit was reached without a change", in_loss=True),
    _cut("exit_total_execution_time", _TIME),
    _cut("exit_command_timeout", _TIME),
    _wrong("exit_format", "the agent did not keep to its action format"),
    _wrong("exit_forfeit", "the agent gave up without a change"),
    _wrong("exit_command", "the agent left without a submission"),
    _evidence("submitted (exit_api)", "the engine failed: what there was says nothing about the policy"),
    _evidence("submitted (exit_environment_error)", "the sandbox failed: says nothing about the policy"),
    _evidence("exit_api", "the engine failed: says nothing about the policy"),
    _evidence("exit_environment_error", "the sandbox failed: says nothing about the policy"),
    _evidence("exit_error", "the scaffold failed: says nothing about the policy"),
    _evidence("submitted (exit_error)", "the scaffold failed: says nothing about the policy"),
    _evidence("*", "not an exit status that this table knows: evidence only"),
)


def _measured(row: Outcome) -> Outcome:
    """In `eval` the same is graded and counted, and nothing of it is trained."""
    return msgspec.structs.replace(row, mode="eval", in_loss=False, in_baseline=False)


EXITS: tuple[Outcome, ...] = (
    *(msgspec.structs.replace(row, mode="train") for row in _OF_TRAINING),
    *(_measured(row) for row in _OF_TRAINING),
)
"""Rows of exit statuses, for each mode."""

ERRORS: tuple[Outcome, ...] = (
    _dropped("engine", "task", "the task asks what the engine cannot give: every rollout meets it"),
    _dropped("engine", "*", "the engine failed, not the agent", again=True),
    _dropped("environment", "infra", "the sandbox did not come up, or was lost", again=True),
    _dropped("environment", "image", "the task's image: another rollout meets it too"),
    _dropped("environment", "*", "the task or the agent broke its sandbox"),
    _dropped("grader", "infra", "no verdict: never a reward of 0", again=True),
    Outcome(ends="grader", fault="agent", why="the patch itself cannot be judged: evidence only"),
    _dropped("grader", "*", "the row of the task is wrong: every rollout meets it"),
    _dropped("agent", "infra", "what surrounds the scaffold failed", again=True),
    _dropped("agent", "*", "the scaffold raised what is no exit status"),
    _dropped("tokens", "*", "the tokens could not be kept exact"),
    Outcome(
        ends="flow",
        fault="infra",
        sample=False,
        refill=True,
        why="a step took longer than its limit while it was not the agent that worked; again it would too",
    ),
    _dropped("flow", "*", "the agent's work took longer than its limit"),
    _dropped("*", "*", "not a boundary that this table knows"),
)
"""Rows of errors, for both modes: first match wins."""


def outcome_of(exit_status: str, mode: Mode) -> Outcome:
    """The table's row for an exit status."""
    rows = [row for row in EXITS if row.mode == mode]
    return next((row for row in rows if row.ends == exit_status), rows[-1])


def settle(rollout: Rollout) -> bool:
    """Take over what the table says of a rollout's exit status. Returns whether it is to be judged."""
    outcome = outcome_of(rollout.exit_status, rollout.mode)
    rollout.status = outcome.status
    rollout.in_loss, rollout.in_baseline = outcome.in_loss, outcome.in_baseline
    rollout.reward = outcome.reward
    return outcome.evaluate


def leave_ungraded(rollout: Rollout, error: RolloutError) -> None:
    """It was due a verdict and the agent is why there is none: evidence, out of loss and baseline."""
    rollout.ungraded = error
    rollout.reward = None
    rollout.status = "failed"
    rollout.in_loss = rollout.in_baseline = False


def about_unknown(exit_status: str) -> str:
    """For a person: that the table has no row for a word, and which it may have meant. Empty: it has one."""
    known = {row.ends for row in EXITS} - {"*"}
    if exit_status in known:
        return ""
    near = difflib.get_close_matches(exit_status, known, n=1)
    text = f"exit status {exit_status!r} is not in the outcome table, so it counts for nothing"
    return f"{text}; did you mean {near[0]!r}?" if near else f"{text}; see agent-flow outcomes"


def outcome_of_error(error: RolloutError) -> Outcome:
    """The table's row for an error."""
    return next(
        row for row in ERRORS if row.ends in (error.boundary, "*") and row.fault in (error.fault, "*")
    )
