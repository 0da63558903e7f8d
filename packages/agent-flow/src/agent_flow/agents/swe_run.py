"""One run of SWE-agent in its thread: its environment, its beginning, and its going on.

The one module that `sweagent` imports when it is built, so that nothing of SWE-agent is loaded before.
"""

# pyright: basic, reportMissingImports=false
# SWE-agent is not installed where this is checked.

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sweagent
import yaml
from sweagent.agent.agents import DefaultAgentConfig
from sweagent.agent.problem_statement import TextProblemStatement
from sweagent.environment.swe_env import SWEEnv

from agent_flow.agents.rex import EnvironmentDeployment, EnvironmentRuntime
from agent_flow.agents.state import AgentState
from agent_flow.agents.swe_scaffold import OriginalAgent, RLTokenAgent, TokenModel, Tools
from agent_flow.errors import ConfigError
from agent_flow.protocols import Environment
from agent_flow.task import Task

VERSION: str = sweagent.__version__


class Run:
    """An agent, and the sandbox that it works in."""

    def __init__(self, agent: OriginalAgent, task: Task, environment: Environment) -> None:
        self.agent = agent
        self.runtime = EnvironmentRuntime(environment)
        self._workdir = environment.workdir
        self._problem = TextProblemStatement(text=task.problem_statement, id=task.instance_id)

    def work(self, state: AgentState | None) -> None:
        """To the scaffold's end; from the beginning, or from where `state` was taken."""
        # SWE-agent seeks a repository at "/" + its name.
        repository: Any = SimpleNamespace(repo_name=self._workdir.lstrip("/"), base_commit="HEAD")
        deployment = EnvironmentDeployment(self.runtime)
        env = SWEEnv(deployment=deployment, repo=repository, post_startup_commands=[])
        if state is None:
            self._begin(env)
        else:
            self._go_on(env, state)

    def _begin(self, env: SWEEnv) -> None:
        # Not `env.start`, which fetches from the network and checks out: the repository is as it has to be.
        self.runtime.begin()
        env.set_env_variables({"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "ROOT": self._workdir})
        env.communicate(f"cd {shlex.quote(self._workdir)}", check="raise")
        self.agent.run(env=env, problem_statement=self._problem)

    def _go_on(self, env: SWEEnv, state: AgentState) -> None:
        values: dict[str, Any] = dict(state.scaffold)
        self.runtime.go_on(values.pop("shell"), values.pop("root"))
        history = [dict(message) for message in state.messages]
        self.agent.restore(history, state.n_format_fails, values, env, self._problem)
        self.agent.go_on()


def load_settings(file: Path | None) -> DefaultAgentConfig:
    """SWE-agent's own configuration, without a model.

    Raises:
        ConfigError: it cannot be read, is not SWE-agent's, or wants several answers to one prompt.
    """
    path = file or Path(sweagent.CONFIG_DIR) / "default.yaml"
    try:
        section = dict(yaml.safe_load(path.read_text(encoding="utf-8"))["agent"])
        if section.get("action_sampler") or section.get("type", "default") != "default":
            raise ValueError("action samplers and retry agents ask for several answers to one prompt")
        section["model"] = {"name": "agent-flow"}  # upstream wants one; it is not used
        return DefaultAgentConfig.model_validate(section)
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"SWE-agent's configuration cannot be used: {type(error).__name__}: {error}",
            where=str(path),
            fix="set agent.config to a SWE-agent YAML file with a section agent, or leave it out",
        ) from error


__all__ = ["VERSION", "OriginalAgent", "RLTokenAgent", "Run", "TokenModel", "Tools", "load_settings"]
