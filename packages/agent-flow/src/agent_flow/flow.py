"""The flow of one rollout: preprocess, generate, reward."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from token_tracking import ChatTemplate, Conversation
from token_tracking.errors import TokenTrackingError
from token_tracking.sample import Sample, Scalar

from agent_flow.config import ConfigFile
from agent_flow.environments.patch import capture_patch
from agent_flow.errors import ConfigError, EnvError, GraderError, TokenError
from agent_flow.outcome import outcome_of
from agent_flow.protocols import (
    AgentProvider,
    Engine,
    EnvironmentProvider,
    ProviderContext,
    Rollout,
    Runtime,
)
from agent_flow.task import Task
from agent_flow.turns import ConversationTurns

_GRADER_ATTEMPTS = 2


class SweFlow:
    """A software-engineering task: an agent works in a sandbox, its patch is graded in a fresh one."""

    def __init__(
        self,
        context: ProviderContext,
        *,
        engine: Engine,
        agent: AgentProvider,
        environments: EnvironmentProvider,
        runtime: Runtime,
    ) -> None:
        self._file: ConfigFile = context.file
        self._tokenizer = context.tokenizer
        self._engine = engine
        self._agent = agent
        self._environments = environments
        self._runtime = runtime
        self._template_text = _read_template(context.file)
        self._templates: dict[str, ChatTemplate] = {}

    def template(self, task: Task) -> ChatTemplate:
        """The compiled chat template for a task's own template arguments.

        Raises:
            ConfigError: the template cannot be compiled.
        """
        kwargs = {**self._file.run.model.chat_template_kwargs, **task.chat_template_kwargs}
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._templates:
            try:
                self._templates[key] = ChatTemplate.compile(
                    self._tokenizer,
                    self._template_text,
                    tools=self._agent.tools or None,
                    template_kwargs=kwargs,
                )
            except TokenTrackingError as error:
                raise ConfigError(
                    f"the chat template cannot be used: {error}",
                    where=str(self._file.resolve(self._file.run.model.chat_template)),
                ) from error
        return self._templates[key]

    async def preprocess(
        self, rollout_id: str, group_id: str, member: int, attempt: int, task: Task
    ) -> Rollout:
        """Everything that needs neither engine nor sandbox."""
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            member=member,
            attempt=attempt,
            task=task,
            conversation=Conversation(self.template(task)),
            repository=self._runtime.repository(task),
        )

    async def generate(self, rollout: Rollout, *, on_turn: Callable[[], None]) -> None:
        """Run the agent in a sandbox of its own, then take its patch.

        `on_turn` is called after each sampled turn.

        Raises:
            RolloutError: engine, sandbox, agent or patch capture failed.
        """
        turns = ConversationTurns(
            rollout.conversation,
            self._engine,
            self._file.run.sampling,
            rollout_id=rollout.rollout_id,
            task_id=rollout.task.instance_id,
            member=rollout.member,
            stop_ids=self.template(rollout.task).stop_ids,
            on_turn=on_turn,
        )
        async with self._environments.open(rollout.repository) as environment:
            result = await self._agent.run(rollout.task, turns, environment)
            rollout.exit_status = result.exit_status
            rollout.messages = result.messages
            try:
                rollout.patch = await capture_patch(environment, rollout.repository, rollout.task.base_commit)
            except GraderError as error:
                if error.fault != "agent":
                    raise
                rollout.ungraded = error

    async def reward(self, rollout: Rollout) -> None:
        """Apply the outcome table; grade where it says so.

        A patch that cannot be judged is evidence (no reward, out of loss and baseline) when the patch itself
        is the cause, and an error when the infrastructure is.

        Raises:
            RolloutError: the infrastructure failed twice.
        """
        outcome = outcome_of(rollout.exit_status)
        rollout.status = outcome.status
        rollout.in_loss = outcome.in_loss
        rollout.in_baseline = outcome.in_baseline
        rollout.reward = outcome.reward
        if not outcome.evaluate:
            return
        try:
            if rollout.ungraded is None:
                await self._grade(rollout)
        except GraderError as error:
            if error.fault != "agent":
                raise
            rollout.ungraded = error
        if rollout.ungraded is not None:
            rollout.status = "failed"
            rollout.in_loss = rollout.in_baseline = False

    async def _grade(self, rollout: Rollout) -> None:
        for attempt in range(1, _GRADER_ATTEMPTS + 1):
            try:
                async with self._environments.open(rollout.repository) as environment:
                    rollout.verdict = await self._runtime.grade(rollout.task, rollout.patch, environment)
            except (EnvError, GraderError) as error:
                if not error.retryable or attempt == _GRADER_ATTEMPTS:
                    raise
            else:
                rollout.reward = rollout.verdict.reward
                return

    def provenance(self, rollout: Rollout) -> dict[str, Scalar]:
        """What produced a rollout."""
        model = self._file.run.model
        return {
            **self._engine.describe(),
            **self._agent.describe(),
            **self._environments.describe(),
            **self._runtime.describe(),
            "tokenizer": self._tokenizer.name,
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "chat_template": model.chat_template,
            "exit_status": rollout.exit_status,
            "ungraded": "" if rollout.ungraded is None else rollout.ungraded.reason,
        }

    def samples(self, rollout: Rollout) -> tuple[Sample, ...]:
        """The rollout as training samples, one per branch of its conversation; see `AgentFlow`."""
        try:
            samples = rollout.conversation.samples(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                attempt=rollout.attempt,
                task_id=rollout.task.instance_id,
                reward=rollout.reward,
                in_loss=rollout.in_loss,
                in_baseline=rollout.in_baseline,
                status=rollout.status,
                source=self._engine.source,
                provenance=self.provenance(rollout),
            )
        except TokenTrackingError as error:
            raise TokenError("samples", str(error)) from error
        if not samples:
            raise TokenError("nothing_sampled", "the rollout ended before the model sampled a token")
        return samples

    def facts(self, rollout: Rollout, seconds: float) -> Mapping[str, str]:
        """What stands on top of a rollout's page."""
        return {
            "task": rollout.task.instance_id,
            "exit status": rollout.exit_status,
            "reward": "not graded" if rollout.reward is None else f"{rollout.reward:g}",
            "seconds": f"{seconds:.1f}",
            "source": self._engine.source,
            "in loss / in baseline": f"{rollout.in_loss} / {rollout.in_baseline}",
            "rollout": rollout.rollout_id,
            "patch": f"{len(rollout.patch):,} bytes",
        }


def _read_template(file: ConfigFile) -> str:
    path = file.resolve(file.run.model.chat_template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the chat template: {error}", where=str(path), fix="set model.chat_template"
        ) from error
