"""One step of a flow, which may be anybody's code: its time limit, what it must leave, whose fault it was."""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import SupportsFloat, TypeVar, cast

import anyio
import anyio.lowlevel

from agent_flow.errors import GraderError, RolloutError, StageTimeoutError, text_of, unwrapped
from agent_flow.rollout import Rollout

T = TypeVar("T")

BUG = "flow/bug"
RAISED = "flow/raised"
"""An exception in code of the user's, such as a flow of their own."""
_OURS = Path(__file__).parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


class _Stage:
    """One stage under its limit, and what it waited for when the limit cut it."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.limit = anyio.CancelScope()
        self.cut_in = ""


_stage: ContextVar[_Stage | None] = ContextVar("stage", default=None)
"""Of the rollout that runs here, its tasks and its threads: they inherit it."""


async def within(limit_s: float, stage: str, work: Awaitable[None]) -> None:
    """Await a stage. What a task group in it raised is raised as if there were no group.

    Raises:
        StageTimeoutError: it took longer than `limit_s`, whatever it made of the cancellation. An error that
            stood before the limit cut what followed it, and is no fault of the agent's, is raised as it is.
    """
    now = _Stage(limit_s)
    token = _stage.set(now)
    try:
        with anyio.move_on_after(limit_s) as now.limit:
            try:
                with unwrapped():
                    await work
            except Exception as error:
                if not now.limit.cancel_called or _stood_before(error):
                    raise
                raise StageTimeoutError(stage, limit_s, now.cut_in) from error
    finally:
        _stage.reset(token)
    if now.limit.cancel_called:
        raise StageTimeoutError(stage, limit_s, now.cut_in)
    # Whatever the stage kept to itself: after an interrupt nothing of it may become a reward.
    await anyio.lowlevel.checkpoint()


@contextmanager
def waiting_for(what: str) -> Generator[None]:
    """In here it is not the agent that works: a stage that is cut in here is cut for no fault of its own.

    But for an agent that is slow all in all: a wait counts when it alone took half of the stage's limit.
    """
    stage = _stage.get()
    if stage is None:
        yield
        return
    begun_s = anyio.current_time()
    try:
        yield
    except BaseException:
        if stage.limit.cancel_called and anyio.current_time() - begun_s >= stage.limit_s / 2:
            stage.cut_in = stage.cut_in or what
        raise


@asynccontextmanager
async def opening(sandbox: AbstractAsyncContextManager[T]) -> AsyncGenerator[T]:
    """The same sandbox; it is waited for until it is open."""
    async with AsyncExitStack() as stack:
        with waiting_for("a sandbox"):
            opened = await stack.enter_async_context(sandbox)
        yield opened


def _stood_before(error: BaseException) -> bool:
    """Whether it is another's failure, and not what somebody made of the limit's cancellation."""
    if not isinstance(error, RolloutError) or error.fault == "agent":
        return False
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, anyio.get_cancelled_exc_class()):
            return False
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return True


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
