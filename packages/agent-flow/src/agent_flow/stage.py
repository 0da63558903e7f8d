"""One step of a flow, which may be anybody's code: its time limit, what it must leave, whose fault it was."""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import SupportsFloat, cast

import anyio
import anyio.lowlevel

from agent_flow.errors import GraderError, StageTimeoutError, text_of
from agent_flow.rollout import Rollout

BUG = "flow/bug"
RAISED = "flow/raised"
"""An exception in code of the user's, such as a flow of their own."""
_OURS = Path(__file__).parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


async def within(limit_s: float, stage: str, work: Awaitable[None]) -> None:
    """Await a stage.

    Raises:
        StageTimeoutError: it took longer than `limit_s`, whatever it made of the cancellation.
    """
    with anyio.move_on_after(limit_s) as scope:
        try:
            await work
        except Exception as error:
            if scope.cancel_called:
                raise StageTimeoutError(stage, limit_s) from error
            raise
    if scope.cancel_called:
        raise StageTimeoutError(stage, limit_s)
    # Whatever the stage kept to itself: after an interrupt nothing of it may become a reward.
    await anyio.lowlevel.checkpoint()


def raised_at(error: BaseException) -> tuple[str, str]:
    """Whether a fault is ours or of code that we were given, and what is to be said of it."""
    found, where = BUG, ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        ours = path.is_relative_to(_OURS)
        if ours or not any(path.is_relative_to(folder) for folder in _LIBRARIES):
            found, where = BUG if ours else RAISED, f"{path.name}:{frame.lineno}, in {frame.name}"
    name, said = type(error).__name__, text_of(error)
    return f"{found}:{name}", f"{name}: {said} ({where})" if said else f"{name} ({where})"


def hold_plain(rollout: Rollout) -> None:
    """Make plain Python values of what a flow filled in: NumPy's have no place in a journal.

    Raises:
        GraderError: a reward is no finite number.
    """
    rollout.exit_status = text_of(rollout.exit_status)
    rollout.in_loss, rollout.in_baseline = bool(rollout.in_loss), bool(rollout.in_baseline)
    reward, turn_rewards = rollout.reward, cast("object", rollout.turn_rewards)
    rollout.reward = rollout.turn_rewards = None  # what is no number must not stand in the rollout's files
    rollout.reward = _number(reward, "reward")
    if turn_rewards is not None:
        if not isinstance(turn_rewards, Iterable):
            raise _no_number(turn_rewards, "turn_rewards")
        values = enumerate(cast("Iterable[object]", turn_rewards))
        rollout.turn_rewards = tuple(_number(value, f"turn_rewards[{at}]") for at, value in values)


def _number(value: object, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise _no_number(value, name)
    try:
        number = float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _no_number(value, name) from error
    if not math.isfinite(number):
        raise _no_number(value, name)
    return number


def _no_number(value: object, name: str) -> GraderError:
    what = f"rollout.{name} is {value!r:.60} ({type(value).__name__}), need a finite number or None"
    return GraderError("reward_type", what, fault="task")
