"""What an evaluation says: mean reward, pass@k, and apart from them what could not be measured.

As on SWE-bench's leaderboard, a rollout that has no verdict for the agent's own fault (its patch does not
apply, its time is up) is not resolved: a reward of 0. What the infrastructure, the image or the task's row is
to blame for says nothing about the agent, is in no mean, and is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb

import msgspec

from agent_flow.events import RolloutRow


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """One task's line."""

    task: str
    graded: int
    """Rollouts with a reward."""
    failed: int
    """Rollouts without one for the agent's own fault: each counts as a reward of 0."""
    passed: int
    """Of both, with at least `eval.pass_reward`."""
    mean_reward: float | None
    """Of both. None: there are none."""
    not_graded: int
    """Rollouts without a reward for no fault of the agent's, those that others replaced among them."""


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of `agent-flow eval --json`. What was not measured is counted apart, never as 0."""

    tasks: int
    graded: int
    """Rollouts with a reward."""
    failed: Mapping[str, int]
    """Rollouts without one for the agent's own fault, by reason; each counts as a reward of 0."""
    mean_reward: float | None
    """Mean over tasks of the mean over a task's graded and failed rollouts. None: there are none."""
    pass_at: Mapping[str, float]
    """By k: the unbiased estimate (Chen et al. 2021, arXiv:2107.03374), mean over tasks that have k graded or
    failed rollouts."""
    pass_at_tasks: Mapping[str, int]
    """By k: how many tasks that are."""
    pass_reward: float
    not_graded: Mapping[str, int]
    """The other rollouts without a reward, by reason and, in parentheses, whose fault it is."""
    missing: int
    """Rollouts that were asked for and are neither graded nor failed: with any of them the exit code is 1."""
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    engine: Mapping[str, int] = {}
    """What the engine counted, by name. Empty: it does not count."""
    per_task: tuple[TaskScore, ...]


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that at least one of k rollouts passes, from n of which `passed` did; `k <= n`."""
    return 1.0 - comb(n - passed, k) / comb(n, k)


def summarise(
    tasks: Sequence[str],
    rows: Sequence[RolloutRow],
    *,
    rollouts_per_task: int,
    pass_reward: float,
    seconds: float,
    engine: Mapping[str, int] | None = None,
) -> EvalSummary:
    """Count an evaluation's rows."""
    scores = tuple(_score(task, [row for row in rows if row.task == task], pass_reward) for task in tasks)
    means = [score.mean_reward for score in scores if score.mean_reward is not None]
    estimates = {k: _estimates(scores, k) for k in _ks(rollouts_per_task)}
    return EvalSummary(
        tasks=len(tasks),
        graded=sum(score.graded for score in scores),
        failed=dict(Counter(_why(row) for row in rows if _failed(row))),
        mean_reward=sum(means) / len(means) if means else None,
        pass_at={str(k): sum(found) / len(found) for k, found in estimates.items() if found},
        pass_at_tasks={str(k): len(found) for k, found in estimates.items()},
        pass_reward=pass_reward,
        not_graded=dict(Counter(_why(row) for row in rows if row.reward is None and not _failed(row))),
        missing=sum(max(0, rollouts_per_task - score.graded - score.failed) for score in scores),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        sampled_tokens=sum(row.sampled_tokens for row in rows),
        seconds=seconds,
        engine=dict(engine or {}),
        per_task=scores,
    )


def _score(task: str, rows: Sequence[RolloutRow], pass_reward: float) -> TaskScore:
    graded = [row.reward for row in rows if row.reward is not None]
    failed = sum(map(_failed, rows))
    rewards = graded + [0.0] * failed
    return TaskScore(
        task=task,
        graded=len(graded),
        failed=failed,
        passed=sum(reward >= pass_reward for reward in rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        not_graded=len(rows) - len(rewards),
    )


def _failed(row: RolloutRow) -> bool:
    return row.reward is None and row.fault == "agent"


def _estimates(scores: Sequence[TaskScore], k: int) -> list[float]:
    counted = [(score.graded + score.failed, score.passed) for score in scores]
    return [pass_at_k(n, passed, k) for n, passed in counted if n >= k]


def _ks(n: int) -> list[int]:
    """Powers of two up to n, and n."""
    return sorted({*(2**power for power in range(n.bit_length()) if 2**power <= n), n})


def _why(row: RolloutRow) -> str:
    if row.dropped:
        return f"{row.dropped} ({row.fault})"
    return f"{row.exit_status or 'no exit status'}: {row.note.partition(':')[0] or 'not graded'}"
