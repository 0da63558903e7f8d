"""Between a scaffold's thread and the event loop: calls over, aborts and errors of ours back out.

A scaffold is synchronous and catches `Exception` wherever it likes. What must not become one of its exit
statuses leaves it as a `BaseException`: an abort as `GenerationAborted`, a failure of engine or sandbox as
`RolloutStopped`, which `run_scaffold` turns back into the error that it holds.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.from_thread
import anyio.to_thread

from agent_flow.errors import GenerationAborted, RolloutError
from agent_flow.protocols import Model
from agent_flow.rollout import Message

T = TypeVar("T")
Args = TypeVarTuple("Args")


class RolloutStopped(BaseException):
    """An error of ours on its way out of a scaffold."""

    def __init__(self, error: RolloutError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def stopping() -> Generator[None]:
    """What fails in here ends the rollout as itself, whatever the scaffold catches."""
    try:
        yield
    except RolloutError as error:
        raise RolloutStopped(error) from error


def call(function: Callable[[Unpack[Args]], Coroutine[Any, Any, T]], *args: *Args) -> T:
    """Run a coroutine function on the event loop, from the scaffold's thread.

    Raises:
        GenerationAborted: the rollout was cancelled meanwhile.
    """
    try:
        return anyio.from_thread.run(function, *args)
    except concurrent.futures.CancelledError as error:
        raise GenerationAborted from error


def sample(model: Model, messages: Sequence[Message]) -> tuple[Message, str]:
    """The next turn: token ids are made here, in the scaffold's thread, and sampled on the event loop.

    Returns the assistant message and the finish reason.

    Raises:
        GenerationAborted: it was cut; the conversation holds what there was of the turn.
        RolloutError: as `Model` raises.
    """
    message, finish_reason = call(model.sample, model.prepare(messages))
    if finish_reason == "abort":
        raise GenerationAborted
    return message, finish_reason


async def run_scaffold(work: Callable[[], T], threads: anyio.CapacityLimiter) -> T:
    """Run a scaffold in a thread.

    Raises:
        GenerationAborted: it was cut; for the agent adapter alone.
        RolloutError: what stopped it.
    """
    try:
        return await anyio.to_thread.run_sync(work, limiter=threads)
    except RolloutStopped as stopped:
        raise stopped.error from stopped
