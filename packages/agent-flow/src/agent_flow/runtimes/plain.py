"""`plain`: tasks of a file without repository or sandbox, judged by a reward function."""

from __future__ import annotations

from collections.abc import Mapping

from token_tracking.sample import Scalar

from agent_flow.errors import ConfigError
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext
from agent_flow.reward import RewardConfig, RewardFunction, episode_of
from agent_flow.rollout import Rollout, Verdict
from agent_flow.task import Task, load_tasks


class PlainRuntime:
    """Rows with `instance_id`, `problem_statement` and whatever the reward function reads."""

    class Config(RewardConfig, frozen=True, kw_only=True):
        """`[runtime]` with `provider = "plain"`."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        file = context.file
        self._where = file.where(("runtime", "provider"))
        self._path = file.resolve(file.run.tasks.path)
        self._function = RewardFunction(
            config,
            where=file.where(("runtime", "reward")),
            python_path=tuple(file.resolve(folder) for folder in file.run.python_path),
        )

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"runtime": "plain", **self._function.describe()}

    def load(self) -> tuple[Task, ...]:
        """Read the rows.

        Raises:
            TaskRowError: one is malformed.
        """
        return load_tasks(self._path)

    async def judge(self, rollout: Rollout) -> None:
        """Fill in reward, turn rewards, verdict and extra from the reward function.

        Raises:
            GraderError: there is no reward (never a reward of 0).
        """
        made, calls = await self._function.judge(episode_of(rollout))
        rollout.reward = made.reward
        rollout.turn_rewards = made.turn_rewards
        rollout.extra.update(made.details)
        rollout.produced_by["grader_calls"] = calls
        details = "".join(f"{name}: {value}\n" for name, value in made.details.items())
        rollout.verdict = Verdict(reward=made.reward, log=f"{details}{made.log}")

    def environment(self, task: Task) -> EnvironmentSpec:
        """There is none.

        Raises:
            ConfigError: always.
        """
        raise self._no_sandbox()

    async def grade(self, task: Task, patch: bytes, environment: Environment) -> Verdict:
        """Not a patch's judge.

        Raises:
            ConfigError: always.
        """
        raise self._no_sandbox()

    def _no_sandbox(self) -> ConfigError:
        return ConfigError(
            "runtime 'plain' has no repositories and no sandboxes, which flow 'swe' needs",
            where=self._where,
            fix="[flow] provider = 'plain' or a flow of your own; or another runtime",
        )
