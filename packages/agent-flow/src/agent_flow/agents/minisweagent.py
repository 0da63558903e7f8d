"""`minisweagent`: PyPI's mini-swe-agent, unmodified, in a thread of its own.

The scaffold keeps its loop, its prompts and its limits. It is given a model whose `query` samples token ids
through the rollout's conversation, and an environment whose `execute` runs in the rollout's sandbox. Both hop
from the scaffold's thread to the event loop and back, so hundreds of scaffolds share one loop.
"""

# pyright: basic
# mini-swe-agent is untyped: messages are dicts and its Protocols say `Any`.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, cast

import anyio
import msgspec
from token_tracking.sample import Scalar

from agent_flow.agents.mini_scaffold import agent_class, import_scaffold, require_text, version
from agent_flow.agents.scaffold_thread import call, run_scaffold, sample
from agent_flow.agents.state import AgentState
from agent_flow.environments.folder import make_folder
from agent_flow.errors import (
    AgentError,
    ConfigError,
    ContextFullError,
    EnvError,
    GenerationAborted,
    RolloutError,
)
from agent_flow.protocols import AgentResult, CommandOutput, Environment, Model, ProviderContext
from agent_flow.rollout import Message
from agent_flow.task import Task

_SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_ABORTED = "Aborted"
_CONTEXT_FULL = "ContextExceeded"
_NAME = "minisweagent"
_MOST_ARGUMENT = 100_000
"""Bytes of a command that is given as an argument; Linux takes less than 128 KiB."""
_LIMITS = ("wall_time_limit_seconds", "max_consecutive_format_errors")
"""Those of mini-swe-agent's file. Steps are ours to limit, and no turn here has a price."""
_PLATFORM = {"system": "-s", "release": "-r", "version": "-v", "machine": "-m"}


class MiniSweAgent:
    """Runs mini-swe-agent's `DefaultAgent`."""

    name: ClassVar[str] = _NAME

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[agent]` with `provider = "minisweagent"`."""

        action_format: Literal["tool_calls", "text"] = "tool_calls"
        """`tool_calls`: the `bash` tool. `text`: one fenced block per turn."""
        config: str = ""
        """A mini-swe-agent YAML file for prompts and limits. Empty: its own `mini.yaml` or
        `mini_textbased.yaml`."""
        step_limit: Annotated[int, msgspec.Meta(ge=1)] = 50
        """Model calls before the scaffold ends with LimitsExceeded."""
        command_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
        """Limit of one command; the model sees that it was killed."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._cost_limit = 0.0
        self._mini = import_scaffold(context.scratch)
        self._settings = self._load_settings(context)
        text = config.action_format == "text"
        self.tools: tuple[Mapping[str, object], ...] = () if text else (self._mini.toolcall.BASH_TOOL,)
        # A scaffold that waits for a slow engine must not keep another from starting.
        self._threads = anyio.CapacityLimiter(context.file.run.worker.max_rollouts)

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {
            "agent": self.name,
            "agent_version": version(),
            "agent_action_format": self._config.action_format,
            "agent_step_limit": self._config.step_limit,
        }

    async def run(
        self, task: Task, model: Model, environment: Environment, state: AgentState | None = None
    ) -> AgentResult:
        """Run the scaffold to its end in a thread.

        Raises:
            RolloutError: engine or sandbox failed inside the scaffold; passed on as it was raised.
            AgentError: the scaffold itself raised, or `state` is another agent's.
        """
        scaffold_model = _ScaffoldModel(
            model, self._mini, self._settings["model"], self._config.action_format
        )
        return await self._carry_out(scaffold_model, task, environment, state)

    async def _carry_out(
        self, scaffold_model: Any, task: Task, environment: Environment, state: AgentState | None
    ) -> AgentResult:
        """`run` with a model of mini-swe-agent's kind. Its `asking` says whether an abort now cuts a turn."""
        began_s = anyio.current_time()
        agent = self._build(scaffold_model, environment, await _platform(environment), state)
        try:
            ended = await run_scaffold(partial(agent.run, task.problem_statement), self._threads)
        except GenerationAborted:
            spent_s = anyio.current_time() - began_s + (state.spent_s if state else 0.0)
            return AgentResult(
                exit_status=_ABORTED,
                messages=tuple(agent.messages),
                state=_state_of(agent, spent_s) if scaffold_model.asking else None,
            )
        except ContextFullError:
            ended = {"exit_status": _CONTEXT_FULL}
        except RolloutError:
            raise
        except Exception as error:
            raise AgentError(
                type(error).__name__, f"mini-swe-agent raised {type(error).__name__}: {error}", fault="agent"
            ) from error
        return AgentResult(
            exit_status=str(ended.get("exit_status", "")),
            messages=tuple(agent.messages),
        )

    def _build(
        self,
        model: Any,
        environment: Environment,
        platform: dict[str, str],
        state: AgentState | None,
    ) -> Any:
        given = self._settings["agent"]
        settings = {key: given[key] for key in ("system_template", "instance_template")}
        settings |= {key: given[key] for key in _LIMITS if key in given}
        agent = agent_class(self._mini)(
            model,
            _ScaffoldEnvironment(environment, platform, self._config.command_timeout_s),
            **settings,
            step_limit=self._config.step_limit,
            cost_limit=self._cost_limit,
        )
        if state is not None:
            state.check(_NAME, version())
            agent.go_on_from(state)
        return agent

    def _load_settings(self, context: ProviderContext) -> dict[str, Any]:
        name = self._config.config
        default = "mini.yaml" if self._config.action_format == "tool_calls" else "mini_textbased.yaml"
        spec: str | Path = context.file.resolve(name) if name else default
        try:
            settings = self._mini.config.get_config_from_spec(spec)
            for section, keys in (
                ("agent", ("system_template", "instance_template")),
                ("model", ("observation_template", "format_error_template")),
            ):
                missing = [key for key in keys if key not in settings.get(section, {})]
                if missing:
                    raise KeyError(f"{section}.{missing[0]}")
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(
                f"mini-swe-agent's configuration cannot be used: {error}",
                where=str(spec),
                fix="set agent.config to a YAML file with sections agent and model, or leave it out",
            ) from error
        return settings


class _ScaffoldModel:
    """mini-swe-agent's `Model` over a token-exact conversation."""

    def __init__(self, turns: Model, mini: SimpleNamespace, settings: dict[str, Any], action_format: str):
        self.config = settings
        self._turns = turns
        self._mini = mini
        self._text = action_format == "text"
        self.asking = False
        """Is a turn being asked for? An abort at any other time cuts a command."""

    def query(self, messages: list[dict[str, Any]], **_: object) -> dict[str, Any]:
        history = [_without_extra(message) for message in messages]
        self.asking = True
        message, finish_reason = sample(self._turns, history)
        self.asking = False
        try:
            actions = self._parse(message, finish_reason)
        except self._mini.exceptions.FormatError as error:
            # The scaffold would forget the reply that it could not read; kept in the history, the next prompt
            # is an extension of this one, and the model is shown what it got wrong.
            error.messages = ({**message, "extra": {"cost": 0.0, "actions": []}}, *error.messages)
            raise
        return {**message, "extra": {"actions": actions, "cost": 0.0}}

    def _parse(self, message: Message, finish_reason: str) -> list[dict[str, Any]]:
        extra = {"finish_reason": finish_reason}
        template = self.config["format_error_template"]
        if self._text:
            regex = self.config.get("action_regex", r"```mswea_bash_command\s*\n(.*?)\n```")
            return self._mini.text.parse_regex_actions(
                message["content"] or "",
                action_regex=regex,
                format_error_template=template,
                template_kwargs=extra,
            )
        made = cast("Sequence[Mapping[str, Any]]", message.get("tool_calls", ()))
        calls = [_tool_call(call) for call in made]
        actions = self._mini.toolcall.parse_toolcall_actions(
            calls, format_error_template=template, template_kwargs=extra
        )
        require_text(actions, self._mini, template, extra)
        return actions

    def format_message(self, **message: Any) -> dict[str, Any]:
        return message

    def format_observation_messages(
        self,
        message: dict[str, Any],
        outputs: list[dict[str, Any]],
        template_vars: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        template = self.config["observation_template"]
        if self._text:
            return self._mini.text.format_observation_messages(
                outputs, observation_template=template, template_vars=template_vars
            )
        return self._mini.toolcall.format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=template,
            template_vars=template_vars,
        )

    def get_template_vars(self, **_: object) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


class _ScaffoldEnvironment:
    """mini-swe-agent's `Environment` over a sandbox."""

    def __init__(self, environment: Environment, platform: dict[str, str], timeout_s: float):
        self.config = {"cwd": environment.workdir, "timeout": timeout_s}
        self._environment = environment
        self._platform = platform
        self._timeout_s = timeout_s

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        refusal = _no_command(action["command"])
        if refusal:
            return {"output": "", "returncode": -1, "exception_info": refusal}
        run = partial(self._run, action["command"], cwd or self._environment.workdir)
        try:
            done = call(run)
        except EnvError as error:
            if error.fault != "agent":
                raise
            # Such as a working directory that the agent removed: the model has to see it, as in a shell.
            return {"output": error.message, "returncode": -1, "exception_info": error.message}
        # On the other stream is only what the outer bash says: that it could not run the command.
        output = (done.stdout + done.stderr).decode("utf-8", "replace")
        if done.timed_out:
            return {
                "output": output,
                "returncode": -1,
                "exception_info": f"The command was killed after {self._timeout_s:g} s.",
            }
        self._raise_if_submitted(output, done.exit_code)
        return {"output": output, "returncode": done.exit_code, "exception_info": ""}

    async def _run(self, command: str, cwd: str) -> CommandOutput:
        """One stream in the order of writing, as the scaffold's own environments show it."""
        argv = ["bash", "-c", 'exec bash -c "$0" 2>&1', command]
        data = command.encode()
        if len(data) > _MOST_ARGUMENT:
            path = f"{await make_folder(self._environment)}/command.sh"
            await self._environment.write(path, data)
            argv = ["bash", "-c", 'exec bash "$0" 2>&1', path]
        return await self._environment.execute(argv, timeout_s=self._timeout_s, cwd=cwd)

    def _raise_if_submitted(self, output: str, exit_code: int | None) -> None:
        lines = output.lstrip().splitlines(keepends=True)
        if exit_code == 0 and lines and lines[0].strip() == _SUBMIT_MARK:
            from minisweagent.exceptions import Submitted

            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})

    def get_template_vars(self, **_: object) -> dict[str, Any]:
        return {**self._platform, "cwd": self._environment.workdir}

    def serialize(self) -> dict[str, Any]:
        return {}


def _no_command(text: str) -> str:
    """Why no process can be given this text, for the model; empty: it can."""
    if "\0" in text:
        return "The command was not run: it has a NUL character."
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "The command was not run: it has half of a surrogate pair, which is no character."
    return ""


def _state_of(agent: Any, spent_s: float) -> AgentState:
    return AgentState(
        agent=_NAME,
        scaffold_version=version(),
        messages=tuple(agent.messages),
        n_calls=agent.n_calls - 1,  # it counts a call before it makes it
        n_format_fails=agent.n_consecutive_format_errors,
        spent_s=spent_s,
    )


async def _platform(environment: Environment) -> dict[str, str]:
    """What the scaffold's prompt says about the machine: the sandbox's own answer, not this process's."""
    found: dict[str, str] = {}
    for name, flag in _PLATFORM.items():
        done = await environment.execute(["uname", flag], timeout_s=30)
        found[name] = done.stdout.decode("utf-8", "replace").strip()
    return found


def _without_extra(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in message.items() if key != "extra"}


def _tool_call(call: Mapping[str, Any]) -> SimpleNamespace:
    """A tool call as the attribute-style object that mini-swe-agent's parser reads."""
    function = call["function"]
    return SimpleNamespace(
        id=call["id"], function=SimpleNamespace(name=function["name"], arguments=function["arguments"])
    )


__all__: Sequence[str] = ("MiniSweAgent",)
