"""One rollout under way, and how it becomes training samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from token_tracking import Conversation
from token_tracking.errors import TokenTrackingError
from token_tracking.sample import Sample, Scalar, Source, Status

from agent_flow.errors import RolloutError, TokenError
from agent_flow.task import Task

POLICY_RUN = "policy_run"
"""Key under which an engine's `describe` names the training run that counts its weight versions."""
Message = dict[str, object]
Mode = Literal["train", "eval"]
"""`eval` measures: its own agent and sampling, and nothing of it is trained."""
TestState = Literal["passed", "failed", "missing"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader found."""

    reward: float
    log: str
    """Everything the tests printed."""
    tests: Mapping[str, TestState] = {}
    """Every test that the verdict hangs on."""


class Rollout(msgspec.Struct, kw_only=True):
    """One attempt at a task: who it is, and what the three steps of a flow fill in one after the other."""

    rollout_id: str
    """32 hex characters, kept over attempts."""
    group_id: str
    """Of all rollouts of one task that are compared with each other."""
    member: int
    """Which rollout of its group, from zero."""
    attempt: int
    """Starts before this one."""
    task: Task
    mode: Mode
    conversation: Conversation
    """Every token so far."""
    exit_status: str = ""
    """The agent's own word for how it ended, such as `Submitted`."""
    messages: tuple[Message, ...] = ()
    """The agent's own history, for people."""
    verdict: Verdict | None = None
    reward: float | None = None
    """None: there is none, and the rollout says nothing about the policy."""
    in_loss: bool = True
    in_baseline: bool = True
    """Whether its reward counts in the mean of its group."""
    status: Status = "completed"
    ungraded: RolloutError | None = None
    """Why no verdict was reached although one was due."""
    produced_by: dict[str, Scalar] = {}
    """For the samples' provenance: what is of this rollout alone, such as its image's digest."""
    artifacts: dict[str, bytes] = {}
    """Files for the rollout's folder by name, such as `patch.diff`."""
    turn_rewards: tuple[float | None, ...] | None = None
    """One per turn of the conversation, in the order of recording. None: the rollout's own alone."""
    extra: dict[str, Scalar] = {}
    """For the samples' `extra`: what a judge says beside the reward."""
    policy_runs: list[str] = []
    """Whose weights the engine had while it sampled, in the order of first use; none that has no name."""


def samples_of(rollout: Rollout, source: Source, provenance: Mapping[str, Scalar]) -> tuple[Sample, ...]:
    """The rollout as training samples, one per branch of its conversation.

    They bear the policy run that its first tokens are of, whatever the engine's is by now. Weight versions of
    two policy runs cannot be compared, so a rollout with tokens of both is marked here as not to be trained.

    Raises:
        TokenError: nothing was sampled, or the conversation contradicts itself.
    """
    if rollout.policy_runs:
        said: dict[str, Scalar] = {POLICY_RUN: rollout.policy_runs[0]}
        if len(rollout.policy_runs) > 1:
            said["policy_runs"] = len(rollout.policy_runs)
            rollout.in_loss = rollout.in_baseline = False
            rollout.status = "failed"
        rollout.produced_by = {**rollout.produced_by, **said}
        provenance = {**provenance, **said}
    try:
        samples = rollout.conversation.samples(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            attempt=rollout.attempt,
            task_id=rollout.task.instance_id,
            reward=rollout.reward,
            turn_rewards=rollout.turn_rewards,
            in_loss=rollout.in_loss,
            in_baseline=rollout.in_baseline,
            status=rollout.status,
            source=source,
            policy_run=str(provenance.get(POLICY_RUN, "")),
            provenance=provenance,
            extra=rollout.extra,
        )
    except TokenTrackingError as error:
        raise TokenError("samples", str(error)) from error
    if not samples:
        raise TokenError("nothing_sampled", "the rollout ended before the model sampled a token")
    return samples
