"""`StalenessRule`: is a rollout too old to train on?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from token_tracking.sample import Sample

from trainer_bridge.control import ControlState

UNKNOWN = -2
"""A token that was sampled under a version nobody recorded."""

Staleness = Literal["stale", "unknown_version", "other_policy_run"]


class Age(NamedTuple):
    """What a rollout says of its trained tokens (loss mask 1, sample in the loss)."""

    oldest: int | None
    """Lowest weight version; -2 if one is unknown; None if no token is trained."""
    policy_runs: frozenset[str]
    """Runs that its trained parts were sampled in."""

    def behind(self, weights_version: int) -> int | None:
        """Versions behind the published one, never negative. None: not known, or nothing is trained."""
        if self.oldest is None or self.oldest < 0 or weights_version < 0:
            return None
        return max(weights_version - self.oldest, 0)


def age_of(samples: Sequence[Sample]) -> Age:
    """Look at all parts of a rollout.

    The rule is about tokens and not about the version at the rollout's end: one that was aborted and resumed
    holds tokens of several versions (THUDM/slime PR #2092).
    """
    oldest: int | None = None
    runs: set[str] = set()
    for sample in samples:
        if not sample.in_loss:
            continue
        trained = sample.versions[sample.loss_mask.view(bool)]
        if len(trained):
            lowest = int(trained.min())
            oldest = lowest if oldest is None else min(oldest, lowest)
            runs.add(sample.policy_run)
    return Age(oldest, frozenset(runs))


class StalenessRule:
    """Judges at the moment a rollout would be handed out.

    Args:
        max_staleness: see `ReceiverConfig`. None: everything is fresh, but for a published `min_version`.
    """

    def __init__(self, max_staleness: int | None) -> None:
        self.max_staleness = max_staleness

    def applies(self, control: ControlState) -> bool:
        """False: there is nothing to measure against, and no need to look at the tokens."""
        return self.max_staleness is not None or control.weights_version >= 0 or control.min_version >= 0

    def allowance(self, step_rollouts: int, ahead: int) -> int | None:
        """Rollouts that may still come before they would wait so long as to be stale. None: no such rule.

        A step takes `step_rollouts` and one version, so that `max_staleness + 1` steps may be ahead. It is
        counted from what is here and not from what ever came: a count of what came has to be saved and
        restored with the weights, or the allowance is inflated after a resume (areal-project/AReaL#1388).

        Args:
            step_rollouts: what a step takes; 0: not known yet.
            ahead: rollouts that are complete or handed out, and not trained on.
        """
        if self.max_staleness is None or not step_rollouts:
            return None
        return max((self.max_staleness + 1) * step_rollouts - ahead, 0)

    def judge(self, age: Age, control: ControlState) -> Staleness | None:
        """Why the rollout must not be trained on. None: it may."""
        if age.oldest is None:
            return None
        if self.max_staleness is None:
            return "stale" if 0 <= age.oldest < control.min_version else None
        if control.policy_run and age.policy_runs != frozenset({control.policy_run}):
            return "other_policy_run"
        if age.oldest == UNKNOWN:
            return "unknown_version"
        oldest_allowed = max(control.weights_version - self.max_staleness, control.min_version)
        return "stale" if age.oldest < oldest_allowed else None
