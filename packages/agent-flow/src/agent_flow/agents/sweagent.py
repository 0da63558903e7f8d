"""`sweagent`, `sweagent_original`: SWE-agent 1.x in a thread of its own, its tools in the rollout's sandbox.

SWE-agent keeps its templates, tool bundles, parsers, history processors and limits; its model samples token
ids through the rollout's conversation, and its environment is the rollout's sandbox. PyPI has only an old
release (0.0.1), so a checkout of 1.1 must be importable.
"""

# pyright: basic
# SWE-agent is not installed where this is checked.

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import anyio
import msgspec
from token_tracking.sample import Scalar

from agent_flow.agents.scaffold_thread import run_scaffold
from agent_flow.agents.state import AgentState
from agent_flow.agents.variables import variables
from agent_flow.errors import AgentError, GenerationAborted, ProviderError, RolloutError
from agent_flow.protocols import AgentResult, Environment, Model, ProviderContext
from agent_flow.task import Task

_ABORTED = "Aborted"
_FIX = (
    "git clone --branch v1.1.0 https://github.com/SWE-agent/SWE-agent and pip install -e it; where it is "
    "installed without its checkout, set SWE_AGENT_CONFIG_DIR and SWE_AGENT_TOOLS_DIR to its config and tools"
)
_NOT_COLUMNS = ("problem_statement", "repo")
"""Names that SWE-agent's templates already have."""


class SweAgent:
    """Runs SWE-agent with the `RLTokenAgent` semantics of the original design: see `swe_scaffold`."""

    name: ClassVar[str] = "sweagent"

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[agent]` with `provider = "sweagent"`."""

        config: str = ""
        """A SWE-agent YAML file, of which the section `agent` is used, without its `model`. Empty: its own
        `default.yaml`."""
        step_limit: Annotated[int, msgspec.Meta(ge=1)] = 50
        """Model calls, rejected answers included, before it ends with exit_max_iter_out."""
        requery: Literal["keep", "forget", "resample"] = "keep"
        """What becomes of an answer that SWE-agent rejects (its format, a blocked command, a syntax error).
        `keep`: it and the reason stay in the history, so a rollout is one sequence. `forget`: they are shown
        for the next try and then gone, as upstream does it; a branch. `resample`: the same is asked again
        and no reason is shown, as the original design did it; a branch."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._swe = _import_scaffold(context.scratch)
        self._version: str = self._swe.VERSION
        self._file = context.file.resolve(config.config) if config.config else None
        self._settings = self._swe.load_settings(self._file)
        tools = self._settings.tools
        self._function_calling = bool(tools.use_function_calling)
        self.tools: tuple[Mapping[str, object], ...] = tuple(tools.tools) if self._function_calling else ()
        # A scaffold that waits for a slow engine must not keep another from starting.
        self._threads = anyio.CapacityLimiter(context.file.run.worker.max_rollouts)

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {
            "agent": self.name,
            "agent_version": self._version,
            "agent_config": self._file.name if self._file else "default.yaml",
            "agent_step_limit": self._config.step_limit,
            "agent_requery": self._config.requery,
        }

    async def run(
        self, task: Task, model: Model, environment: Environment, state: AgentState | None = None
    ) -> AgentResult:
        """Run the scaffold to its end in a thread.

        Raises:
            RolloutError: engine or sandbox failed inside the scaffold; passed on as it was raised.
            AgentError: the scaffold itself raised, its tools could not be installed, or `state` is another
                agent's.
        """
        if state is not None:
            state.check(self.name, self._version)
        began_s = anyio.current_time()
        run = self._swe.Run(self._build(task, model), task, environment)
        try:
            await run_scaffold(partial(run.work, state), self._threads)
        except GenerationAborted:
            spent_s = anyio.current_time() - began_s + (state.spent_s if state else 0.0)
            return AgentResult(
                exit_status=_ABORTED,
                messages=tuple(run.agent.history),
                state=self._state(run, spent_s) if run.agent.model.asking else None,
            )
        except RolloutError:
            raise
        except Exception as error:
            raise AgentError(
                type(error).__name__ if run.agent.is_set_up else "setup",
                f"SWE-agent raised {type(error).__name__}: {error}",
                fault="agent" if run.agent.is_set_up else "infra",
                retryable=not run.agent.is_set_up,
            ) from error
        return AgentResult(
            exit_status=str(run.agent.info.get("exit_status") or ""), messages=tuple(run.agent.history)
        )

    def _build(self, task: Task, model: Model) -> Any:
        settings = self._settings.model_copy(deep=True)  # history processors hold state of their own
        columns = {key: value for key, value in task.row.items() if key not in _NOT_COLUMNS}
        return self._agent_class(
            columns=columns,
            templates=settings.templates,
            tools=self._swe.Tools(settings.tools),
            history_processors=settings.history_processors,
            model=self._swe.TokenModel(
                model, step_limit=self._config.step_limit, function_calling=self._function_calling
            ),
            max_requeries=settings.max_requeries,
            name=settings.name,
        )

    @property
    def _agent_class(self) -> Any:
        return partial(self._swe.RLTokenAgent, requery=self._config.requery)

    def _state(self, run: Any, spent_s: float) -> AgentState | None:
        return AgentState(
            agent=self.name,
            scaffold_version=self._version,
            messages=tuple(run.agent.history),
            n_calls=len(run.agent.model.sampled),
            n_format_fails=run.agent.n_format_fails,
            spent_s=spent_s,
            scaffold={**run.agent.dump(), "shell": run.runtime.shell.folder, "root": run.runtime.root},
        )


class OriginalSweAgent(SweAgent):
    """Runs SWE-agent's own loop: its handling of errors, its requeries, no state to go on from.

    It differs from `sweagent` in that `_RetryWithOutput` is not counted, the turn limit ends with `exit_cost`
    and a rejected answer is forgotten. Tokens are kept as exactly.
    """

    name: ClassVar[str] = "sweagent_original"

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[agent]` with `provider = "sweagent_original"`."""

        config: str = ""
        """As of `sweagent`."""
        step_limit: Annotated[int, msgspec.Meta(ge=1)] = 50
        """Model calls before it ends with exit_cost."""

        @property
        def requery(self) -> str:
            """As upstream."""
            return "forget"

    @property
    def _agent_class(self) -> Any:
        return self._swe.OriginalAgent

    def _state(self, run: Any, spent_s: float) -> AgentState | None:
        return None


def _import_scaffold(scratch: Path) -> ModuleType:
    """Import SWE-agent with its defaults turned to those of a library, where the user has not set them.

    It wants a folder for trajectories to be there, prints every step of every agent, and has litellm fetch a
    list of prices; none of it is used.
    """
    defaults = {
        "SWE_AGENT_TRAJECTORY_DIR": str(scratch),
        "SWE_AGENT_LOG_STREAM_LEVEL": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    try:
        with variables({name: value for name, value in defaults.items() if name not in os.environ}):
            return importlib.import_module("agent_flow.agents.swe_run")
    except (ImportError, AssertionError, AttributeError) as error:
        raise ProviderError(
            f"SWE-agent 1.x cannot be imported: {type(error).__name__}: {error}", where="agent", fix=_FIX
        ) from error
