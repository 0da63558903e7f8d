"""`plain`: a conversation with the model and a reward function; the base of flows for other tasks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, runtime_checkable

import msgspec
from token_tracking.sample import Scalar

from agent_flow.errors import ConfigError, ContextFullError, GraderError
from agent_flow.outcome import leave_ungraded, settle
from agent_flow.protocols import Model, ProviderContext
from agent_flow.providers import load_runtime
from agent_flow.rollout import Message, Rollout
from agent_flow.task import Task

_DONE, _CONTEXT_FULL = "Submitted", "ContextExceeded"


@runtime_checkable
class Judge(Protocol):
    """A runtime that judges a whole rollout instead of a patch in a sandbox; `runtimes.plain` is one."""

    async def judge(self, rollout: Rollout) -> None:
        """Fill in the reward.

        Raises:
            GraderError: there is none.
        """
        ...


class PlainFlow:
    """Asks the model once per task. Override `converse` for several turns, tools or a world of your own."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[flow]` with `provider = "plain"`. A flow with more keys: `class Config(PlainFlow.Config)`."""

        system: str = ""
        """System message. Empty: none."""

    tools: tuple[Mapping[str, object], ...] = ()

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self.config = config
        self._runtime = load_runtime(context)
        if not isinstance(self._runtime, Judge):
            raise ConfigError(
                f"flow {context.file.run.flow.get('provider')!r} needs a runtime that judges whole rollouts",
                where=context.file.where(("runtime", "provider")),
                fix="provider = 'plain' and reward = 'module:function'",
            )
        self._judge = self._runtime

    async def converse(self, rollout: Rollout, model: Model) -> None:
        """Talk to the model until the task is done; what is said is kept by itself.

        May fill in `rollout.exit_status` (a word of `agent-flow outcomes`; empty means `Submitted`),
        `rollout.messages` (empty means the conversation's own) and `rollout.artifacts`.
        """
        await model.ask(self.opening(rollout.task))

    def opening(self, task: Task) -> list[Message]:
        """The messages before the model's first turn."""
        system = self.config.system
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": task.problem_statement}]

    def load(self) -> tuple[Task, ...]:
        """The runtime's tasks."""
        return self._runtime.load()

    def session(self) -> AbstractAsyncContextManager[None]:
        """Nothing is held open."""
        return nullcontext()

    def describe(self) -> dict[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"environment": "none", **self._runtime.describe()}

    async def preprocess(self, rollout: Rollout) -> None:
        """Nothing."""

    async def generate(self, rollout: Rollout, model: Model) -> None:
        """Run `converse` to its end, which may be that of the model's context.

        Raises:
            RolloutError: the engine failed, or what `converse` raises of them.
        """
        try:
            await self.converse(rollout, model)
        except ContextFullError:
            rollout.exit_status = _CONTEXT_FULL
        rollout.exit_status = rollout.exit_status or _DONE
        rollout.messages = rollout.messages or tuple(map(dict, rollout.conversation.messages))

    async def reward(self, rollout: Rollout) -> None:
        """Apply the outcome table, and the reward function where it says so.

        An answer that was cut off at `sampling.max_new_tokens` is judged, and its status is `truncated`.

        Raises:
            GraderError: there is no reward, and the agent is not the cause.
        """
        if not settle(rollout):
            return
        try:
            await self._judge.judge(rollout)
        except GraderError as error:
            if error.fault != "agent":
                raise
            leave_ungraded(rollout, error)
            return
        if rollout.status == "completed" and _cut_off(rollout):
            rollout.status = "truncated"


def _cut_off(rollout: Rollout) -> bool:
    conversation = rollout.conversation
    turns = conversation.branches[conversation.current].turns
    return bool(turns) and turns[-1].last.finish_reason == "length"
