"""Turn rewards: what each sampled turn of a rollout earned, and what followed it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from token_tracking.sample import Sample

from trainer_bridge.errors import BatchError
from trainer_bridge.grouping import RemoteRollout, Rollout, trained_mask
from trainer_bridge.options import check_options

Credit = Literal["rollout", "turn", "turn_and_rollout"]
"""Which rewards count.

- `rollout`: the rollout's reward alone, the same for all of its tokens.
- `turn`: the rewards of the turns alone; a turn is credited with its own and those of the turns after it.
- `turn_and_rollout`: as `turn`, and the rollout's reward is added to its last turn. Only if it does not
  already hold the turn rewards.
"""


class Span(NamedTuple):
    """Tokens `start` to `end` of sample `sample` of the step."""

    sample: int
    start: int
    end: int


class Step(NamedTuple):
    """One decision of a rollout: a turn, or the whole rollout where turns are not told apart."""

    spans: tuple[Span, ...]
    """Where its tokens are. A turn that was aborted and resumed has one span per piece."""
    reward: float


def choose_credit(
    samples: Sequence[Sample], credit: Credit | None, remote: Iterable[RemoteRollout] = ()
) -> Credit:
    """The credit that was asked for; None: `rollout`, unless there are turn rewards.

    Args:
        samples: of the step, or of a rank's share of it.
        credit: as asked for.
        remote: rollouts of the same groups on other ranks, so that all ranks choose alike.

    Raises:
        BatchError: nothing was asked for and there are turn rewards, which would be dropped without a word
            (areal#1661: turn rewards that end as one number).
    """
    if credit is not None:
        check_options(choose_credit, {"credit": credit}, BatchError)
        return credit
    here = ((s.rollout_id, tuple(turn.reward for turn in s.turns)) for s in samples)
    for rollout_id, rewards in (*here, *((each.rollout_id, each.turn_rewards) for each in remote)):
        if any(reward is not None for reward in rewards):
            raise BatchError(
                f"rollout {rollout_id} has turn rewards: say what to do with them, credit='turn', "
                "'turn_and_rollout' (the rollout's reward does not hold them yet) or 'rollout' (leave them "
                "out)"
            )
    return "rollout"


def check_discount(discount: float, credit: Credit | None) -> None:
    """Refuse a discount that is none, or that changes nothing.

    Raises:
        BatchError: it does not lie in 0..1, or there are no turns to discount over.
    """
    if not 0 <= discount <= 1:
        raise BatchError(f"discount must lie in 0..1, got {discount}")
    if discount != 1 and credit in (None, "rollout"):
        raise BatchError(
            f"discount={discount} is per turn, and with credit={credit!r} there are none: ask for credit "
            "'turn' or 'turn_and_rollout'"
        )


def rollout_steps(samples: Sequence[Sample], rollout: Rollout, credit: Credit) -> tuple[Step, ...] | None:
    """The steps of a rollout in order, each with its own reward. None: not graded under this credit.

    Turns that a later part only repeats (no trained token, no reward) are no steps: each turn counts once.
    """
    if credit == "rollout":
        turns = [(tuple(Span(index, 0, len(samples[index])) for index in rollout.samples), None)]
    else:
        turns = [step for index in rollout.samples for step in _turn_steps(samples[index], index)]
    rewards = step_rewards([reward for _, reward in turns], rollout.reward, credit)
    if rewards is None:
        return None
    return tuple(Step(spans, reward) for (spans, _), reward in zip(turns, rewards, strict=True))


def turn_rewards(parts: Sequence[Sample]) -> tuple[float | None, ...]:
    """What each turn of a rollout earned, in order; None: nothing was said of it.

    Args:
        parts: all parts of the rollout, in order.
    """
    return tuple(reward for sample in parts for _, reward in _turn_steps(sample, 0))


def step_rewards(
    turns: Sequence[float | None], reward: float | None, credit: Credit
) -> tuple[float, ...] | None:
    """The reward of each step of a rollout. None: it is not graded under this credit.

    Args:
        turns: what each turn earned, as `turn_rewards` says; not looked at for credit `rollout`.
        reward: the rollout's.
        credit: which rewards count.
    """
    if credit == "rollout":
        return None if reward is None else (reward,)
    graded = any(each is not None for each in turns)
    rewards = [0.0 if each is None else each for each in turns]
    if credit == "turn_and_rollout" and reward is not None and rewards:
        rewards[-1] += reward
        graded = True
    return tuple(rewards) if graded else None


def returns(rewards: Sequence[float], discount: float) -> npt.NDArray[np.float64]:
    """Per step: its reward and, each turn later discounted once more, those of the steps after it."""
    out = np.zeros(len(rewards), np.float64)
    following = 0.0
    for number in range(len(rewards) - 1, -1, -1):
        following = rewards[number] + discount * following
        out[number] = following
    return out


def token_rewards(
    samples: Sequence[Sample], rollouts: Sequence[Rollout], credit: Credit
) -> tuple[npt.NDArray[np.float32], ...]:
    """Each step's reward on the last token it trains, 0 elsewhere: what a value function or GAE reads.

    Args:
        samples: the samples of a step.
        rollouts: how they hang together, from `group_samples`.
        credit: which rewards count.

    Returns:
        float32 arrays, one per sample, each of the sample's length. The reward of a turn that trains no
        token stands on its last token; one of a rollout that trains none is not there at all.
    """
    out = tuple(np.zeros(len(sample), np.float32) for sample in samples)
    masks = [trained_mask(sample) for sample in samples]
    for rollout in rollouts:
        for step in rollout_steps(samples, rollout, credit) or ():
            place = _last_trained(step, masks)
            if place is None and credit != "rollout":
                place = (step.spans[-1].sample, step.spans[-1].end - 1)
            if place is not None:
                out[place[0]][place[1]] += step.reward
    return out


def _last_trained(step: Step, masks: Sequence[npt.NDArray[np.bool_]]) -> tuple[int, int] | None:
    for span in reversed(step.spans):
        hits = np.flatnonzero(masks[span.sample][span.start : span.end])
        if len(hits):
            return span.sample, span.start + int(hits[-1])
    return None


def _turn_steps(sample: Sample, index: int) -> list[tuple[tuple[Span, ...], float | None]]:
    found: list[tuple[list[Span], float | None]] = []
    resumes = False
    for turn in sample.turns:
        span = Span(index, turn.start, turn.end)
        if resumes and found[-1][0][-1].end == turn.start:
            spans, reward = found.pop()
            total = turn.reward if reward is None else reward + (turn.reward or 0.0)
            found.append(([*spans, span], total))
        else:
            found.append(([span], turn.reward))
        resumes = turn.finish_reason == "abort"
    mask = sample.loss_mask
    return [
        (tuple(spans), reward)
        for spans, reward in found
        if reward is not None or any(bool(mask[s.start : s.end].any()) for s in spans)
    ]
