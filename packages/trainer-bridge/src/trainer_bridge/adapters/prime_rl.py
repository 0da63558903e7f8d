"""prime-rl: `TrainingSample` (PrimeIntellect-ai/prime-rl 559b447, `prime_rl/transports/rollouts/types.py`).

All arrays go over the whole sequence, not shifted, no padding: `mask` (bool), `logprobs` (0 where the mask is
0 and none was recorded), `temperatures` (of the distribution that a token's logprob belongs to; 1 on the
other tokens, where prime-rl does not read it), `advantages`. `routed_experts` gets a row of zeros for the
last token, as prime-rl wants one per token.

The orchestrator stamps advantages before the trainer sees a sample, so give them: parts, the baseline and
turn rewards are settled in them, and prime-rl weights by token. A sample outside the loss is left out: it has
nothing more to say. There is no place for kept sets; versions and ids are not carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from token_tracking.sample import Sample

from trainer_bridge.adapters.loading import load
from trainer_bridge.adapters.omissions import Omissions
from trainer_bridge.adapters.rows import Float32, Row, Trainer, make_groups, routed_experts, working_rows
from trainer_bridge.errors import BatchError

_PRIME_RL = Trainer("prime-rl", frozenset({"routed_experts", "temperatures"}))


def training_samples(
    samples: Sequence[Sample],
    *,
    advantages: Sequence[Float32],
    env_name: str,
    omissions: Omissions | None = None,
) -> list[Any]:
    """One `TrainingSample` per sample in the loss, by group, rollout and part.

    Args:
        samples: of each rollout all parts, of each group all rollouts.
        advantages: one array per sample, as from `trainer_bridge.advantages.advantages(...).tokens`.
        env_name: under which name prime-rl logs them; not "all", which it keeps for sums.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: a temperature is unknown, or something does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
        TrainerMissingError: prime-rl is not installed.
    """
    if env_name == "all":
        raise BatchError('env_name must not be "all": prime-rl keeps it for metrics over all environments')
    groups = make_groups(samples, _PRIME_RL, omissions, advantages=advantages)
    rows = [row for row in working_rows(groups, omissions) if row.sample.in_loss]
    routed_experts(rows)
    made = load("prime_rl.transports.rollouts.types", "prime-rl from its repository")
    return [_sample(made, row, env_name) for row in rows]


def _sample(made: Any, row: Row, env_name: str) -> Any:
    sample = row.sample
    experts = None
    if sample.routed_experts is not None:
        padded = np.concatenate([sample.routed_experts, np.zeros_like(sample.routed_experts[:1])])
        experts = made.RoutedExperts(data=padded.tobytes(), shape=list(padded.shape), dtype=padded.dtype.name)
    return made.TrainingSample(
        token_ids=sample.token_ids.tolist(),
        mask=row.mask.astype(bool).tolist(),
        logprobs=row.logprobs.tolist(),
        temperatures=_temperatures(row),
        env_name=env_name,
        routed_experts=experts,
        advantages=row.advantages.tolist(),
    )


def _temperatures(row: Row) -> list[float]:
    temperatures = np.ones(len(row.sample))
    for number, turn in enumerate(row.sample.turns):
        if turn.logprob_kind != "processed" or not row.mask[turn.start : turn.end].any():
            continue
        if turn.temperature is None:
            raise BatchError(
                f"rollout {row.sample.rollout_id}, turn {number}: processed log-probabilities at an unknown "
                "temperature; prime-rl scales its logits by it, so record it with the turn"
            )
        temperatures[turn.start : turn.end] = turn.temperature
    return temperatures.tolist()
