"""`Omissions`: what a trainer has no place for, refused or counted, never dropped in silence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

from trainer_bridge.errors import BatchError, ConfigError

Omission = Literal["parts", "baseline", "turn_rewards", "kept_sets", "routed_experts", "temperatures"]
"""What changes the loss if a trainer does not know of it; refused unless it is allowed by name."""

Note = Literal["versions", "provenance", "idle"]
"""What changes no loss; counted only. `idle`: samples of rollouts that are neither trained nor compared with
are left out."""

_REASONS: dict[Omission, str] = {
    "parts": "the rollout has several parts, and would count once for each of them in the group's statistics",
    "baseline": "the rollout is trained but not in_baseline, and its reward would enter the group's mean",
    "turn_rewards": "it has turn rewards, and there is one reward per rollout",
    "kept_sets": "its log-probabilities go over a truncated vocabulary, and the kept ids cannot be replayed: "
    "ratios are off by the kept mass",
    "routed_experts": "it has routed experts, and they cannot be replayed",
    "temperatures": "its log-probabilities are at another temperature than the rest of the batch",
}

_log = logging.getLogger(__name__)


class Omissions:
    """What a conversion may leave out, and how many samples it was left out of.

    Without one, an adapter refuses every sample that its trainer cannot hold in full.
    """

    def __init__(self, *allowed: Omission) -> None:
        unknown = set(allowed) - set(get_args(Omission))
        if unknown:
            raise ConfigError(f"unknown omissions {sorted(unknown)}: use {', '.join(get_args(Omission))}")
        self.allowed = frozenset(allowed)
        self.counts: Counter[Omission | Note] = Counter()
        """Samples by what was left out of them."""

    def note(self, what: Iterable[Note]) -> None:
        """Count what is left out of a sample without harm."""
        self.counts.update(what)

    def leave_out(self, what: Omission, trainer: str, rollout_id: str) -> None:
        """Count one omission from a sample; the first of a kind is logged.

        Raises:
            BatchError: it is not allowed.
        """
        if what not in self.allowed:
            raise BatchError(
                f"rollout {rollout_id} does not fit {trainer}: {_REASONS[what]}. Leave it out of the batch, "
                f'or accept that with Omissions("{what}")'
            )
        if not self.counts[what]:
            _log.warning("%s: %s left out as allowed, first of rollout %s", trainer, what, rollout_id)
        self.counts[what] += 1
