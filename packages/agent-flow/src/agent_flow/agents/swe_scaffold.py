"""SWE-agent 1.x's agent over a token-exact conversation. Imports `sweagent`, which is not on PyPI.

`RLTokenAgent` follows the original design's class of this name: its table from exception to exit status, its
counted requeries, its autosubmission. Tokens are no business of it: what was sampled is in the conversation
from the moment it was sampled, whatever the scaffold makes of it afterwards.
"""

# pyright: basic, reportMissingImports=false
# SWE-agent is not installed where this is checked.

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jinja2 import Template
from sweagent.agent import agents as swe
from sweagent.agent.models import InstanceStats
from sweagent.exceptions import (
    ContentPolicyViolationError,
    ContextWindowExceededError,
    CostLimitExceededError,
    FormatError,
    FunctionCallingFormatError,
    InstanceCallLimitExceededError,
    TotalCostLimitExceededError,
)
from sweagent.tools.tools import ToolHandler
from sweagent.types import StepOutput
from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError, SwerexException
from tenacity import RetryError

from agent_flow.agents.scaffold_thread import sample, stopping
from agent_flow.agents.swe_history import ANSWER, messages_of
from agent_flow.errors import ContextFullError
from agent_flow.protocols import Model
from agent_flow.rollout import Message

Requery = Literal["keep", "forget", "resample"]

RAISED = (KeyboardInterrupt, EOFError, TotalCostLimitExceededError)
"""What ends the run as itself."""

EXITS: tuple[tuple[type[Exception], str, str], ...] = (
    (swe._ExitForfeit, "exit_forfeit", "Exiting due to forfeit"),
    (
        swe._TotalExecutionTimeExceeded,
        "exit_total_execution_time",
        "Exit due to total execution time exceeded",
    ),
    (CommandTimeoutError, "exit_command_timeout", "Exit due to multiple consecutive command timeouts"),
    (ContextWindowExceededError, "exit_context", "Exit due to context window"),
    # Before the cost limit, of which it is a subclass.
    (InstanceCallLimitExceededError, "exit_max_iter_out", "Exit due to max iteration out of limit"),
    (CostLimitExceededError, "exit_cost", "Exit due to cost limit"),
    (RetryError, "exit_api", "Exit due to retry error: {error}"),
    (SwerexException, "exit_environment_error", "Exit due to environment error: {error}"),
    (RuntimeError, "exit_error", "Exit due to runtime error: {error}"),
    (Exception, "exit_error", "Exit due to unknown error: {error}"),
)
"""What ends the run with an autosubmission: exception, exit status, what the history says. First match wins;
what is asked again (`RLTokenAgent._template`) comes before all of it."""


class TokenModel:
    """SWE-agent's `AbstractModel` over our `Model`."""

    def __init__(self, model: Model, *, step_limit: int, function_calling: bool) -> None:
        self.stats = InstanceStats()
        self.sampled: list[Message] = []
        """Every answer, in order."""
        self.asking = False
        """Is a turn being asked for? An abort at any other time cuts a command."""
        self._model = model
        self._step_limit = step_limit
        self._function_calling = function_calling

    instance_cost_limit = 0.0

    def query(self, history: list[dict[str, Any]], action_prompt: str = "> ") -> dict[str, Any]:
        """The next answer.

        Raises:
            InstanceCallLimitExceededError, ContextWindowExceededError: for the exit-status table.
            RolloutStopped: the engine failed.
        """
        if len(self.sampled) >= self._step_limit:
            raise InstanceCallLimitExceededError(f"{self._step_limit} model calls")
        self.asking = True
        with stopping():
            try:
                message, _ = sample(self._model, messages_of(history, self.sampled))
            except ContextFullError as error:
                raise ContextWindowExceededError(error.message) from error
        self.asking = False
        self.sampled.append(message)
        self.stats.api_calls += 1
        answer: dict[str, Any] = {"message": message.get("content") or ""}
        if self._function_calling and message.get("tool_calls"):
            answer["tool_calls"] = message["tool_calls"]
        return answer


class Tools(ToolHandler):
    """Upstream's, and what its function-calling parser trips over is an answer in the wrong format too."""

    def parse_actions(self, output: dict[str, Any]) -> tuple[str, str]:
        """As upstream; arguments that are no object, or not of text, are a `FormatError` as well."""
        try:
            return super().parse_actions(output)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if not self.config.use_function_calling:
                raise
            raise FunctionCallingFormatError(
                f"Tool call arguments must be an object of the declared types: {error}", "incorrect_args"
            ) from error


class OriginalAgent(swe.DefaultAgent):
    """Upstream's loop as it is. A task's columns are there for templates; nothing is written to disk."""

    def __init__(self, *, columns: Mapping[str, object], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._columns = dict(columns)
        self.is_set_up = False
        """Are the tools in the sandbox, and the first messages written?"""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """As upstream."""
        super().setup(*args, **kwargs)
        self.is_set_up = True

    def _get_format_dict(self, **kwargs: Any) -> dict[str, Any]:
        return {**self._columns, **super()._get_format_dict(**kwargs)}

    def add_step_to_trajectory(self, step: StepOutput) -> None:
        """As upstream, without the query: every step would hold the whole history up to it."""
        super().add_step_to_trajectory(step.model_copy(update={"query": []}))

    def _get_edited_files_with_context(self, patch: str) -> dict[str, str]:
        """Nothing: it is for reviewers, reads every changed file, and fails at one that is not UTF-8."""
        return {}

    def save_trajectory(self) -> None:
        """Nothing: the rollout's folder holds what there is."""


class RLTokenAgent(OriginalAgent):
    """See the module."""

    def __init__(self, *, requery: Requery, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._mode: Requery = requery
        self._n_format_fails = 0
        self._shown: list[dict[str, Any]] = []
        """What only the next requery sees (`forget`)."""

    def forward_with_handling(self, history: list[dict[str, Any]]) -> StepOutput:
        """One step: ask, act; ask again or leave, as the tables say."""
        while self._n_format_fails < self.max_requeries:
            try:
                step = self.forward([*self.messages, *self._shown])
            except RAISED:
                raise
            except Exception as error:
                if not self._ask_again(error):
                    return self._leave(error)
            else:
                self._n_format_fails, self._shown = 0, []
                return step
        return self._autosubmit("exit_format", "Exit due to repeated format/blocklist/bash syntax errors")

    def _append_history(self, item: dict[str, Any]) -> None:
        super()._append_history(item)
        if item["role"] == "assistant" and not item.get("is_demo") and self.model.sampled:
            self.history[-1][ANSWER] = len(self.model.sampled) - 1

    def _ask_again(self, error: Exception) -> bool:
        template, shown = self._template(error)
        if template is None and not shown:
            return False
        self._n_format_fails += 1
        self.logger.warning(
            "Requerying model after %s (%dth requery)", type(error).__name__, self._n_format_fails
        )
        step: StepOutput = vars(error).get("step", StepOutput())
        self.add_step_to_trajectory(step)
        if template is None or self._mode == "resample":
            return True
        items = self._rejection(step, self._render(template, step, error))
        if self._mode == "keep":
            for item in items:
                self._append_history(item)
        else:
            self._shown = items
        return True

    def _template(self, error: Exception) -> tuple[str | None, bool]:
        """What to show the model (None: nothing, the same is asked again), and whether to ask again."""
        if isinstance(error, FormatError):
            return self.tools.config.format_error_template, True
        if isinstance(error, swe._BlockedActionError):
            return self.tools.config.filter.blocklist_error_template, True
        if isinstance(error, BashIncorrectSyntaxError):
            return self.templates.shell_check_error_template, True
        if isinstance(error, swe._RetryWithOutput):
            return self.templates.next_step_template, True
        return None, isinstance(error, (ContentPolicyViolationError, swe._RetryWithoutOutput))

    def _render(self, template: str, step: StepOutput, error: Exception) -> str:
        known = vars(error)
        values = {
            **step.to_template_format_dict(),
            **known.get("extra_info", {}),
            "exception_message": known.get("message") or (error.args[0] if error.args else ""),
            **self._get_format_dict(),
        }
        return Template(template).render(**values)

    def _rejection(self, step: StepOutput, text: str) -> list[dict[str, Any]]:
        """The rejected answer as it was sampled, and why."""
        calls = self.model.sampled[-1].get("tool_calls") if self.model.sampled else None
        answer = {
            "role": "assistant",
            "content": step.output,
            "thought": step.thought,
            "action": step.action,
            "tool_calls": calls,
            "agent": self.name,
            "message_type": "assistant",
        }
        return [answer, {"role": "user", "content": text, "agent": self.name, "message_type": "user"}]

    def _leave(self, error: Exception) -> StepOutput:
        status, message = next((status, text) for kind, status, text in EXITS if isinstance(error, kind))
        return self._autosubmit(status, message.format(error=error))

    def _autosubmit(self, status: str, message: str) -> StepOutput:
        self.logger.warning(message)
        return self.attempt_autosubmission_after_error(
            StepOutput(thought=message, exit_status=status, output=message, done=True)
        )

    def go_on(self) -> None:
        """The loop of `run` without its beginning, after `restore`."""
        step = StepOutput()
        while not step.done:
            step = self.step()
        self._chook.on_run_done(trajectory=self.trajectory, info=self.info)

    def dump(self) -> dict[str, Any]:
        """What `restore` takes. Plain JSON; the history and the counters of `AgentState` are not in it."""
        return copy.deepcopy(
            {
                "trajectory": self.trajectory,
                "info": dict(self.info),
                "sampled": self.model.sampled,
                "shown": self._shown,
                "n_consecutive_timeouts": self._n_consecutive_timeouts,
                "total_execution_time": self._total_execution_time,
            }
        )

    def restore(
        self,
        history: list[dict[str, Any]],
        n_format_fails: int,
        values: Mapping[str, Any],
        env: Any,
        problem_statement: Any,
    ) -> None:
        """Be the agent that was dumped. In the place of `setup`: the tools are in the sandbox already."""
        self.is_set_up = True
        self._env = env
        self._problem_statement = problem_statement
        self.traj_path = Path(f"{problem_statement.id}.traj")
        self.history = history
        self._n_format_fails = n_format_fails
        self._trajectory = values["trajectory"]
        self.info.update(values["info"])
        self.model.sampled = values["sampled"]
        self.model.stats.api_calls = len(self.model.sampled)
        self._shown = values["shown"]
        self._n_consecutive_timeouts = values["n_consecutive_timeouts"]
        self._total_execution_time = values["total_execution_time"]

    @property
    def n_format_fails(self) -> int:
        """Rejected answers in a row."""
        return self._n_format_fails
