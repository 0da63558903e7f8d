"""PyPI's mini-swe-agent: imported without its side effects, and its agent made to begin in the middle."""

# pyright: basic
# mini-swe-agent is untyped: messages are dicts and its Protocols say `Any`.

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import StrictUndefined, Template

from agent_flow.agents.mini_templates import compiled_once
from agent_flow.agents.state import AgentState
from agent_flow.agents.variables import variables
from agent_flow.rollout import Message


def version() -> str:
    """Which mini-swe-agent is installed."""
    return importlib.metadata.version("mini-swe-agent")


def agent_class(mini: SimpleNamespace) -> type[Any]:
    """mini-swe-agent's agent, which can also begin in the middle.

    Its `run` clears the history and writes the first two messages before it loops; in their place comes the
    history that was left.
    """

    class Agent(mini.default.DefaultAgent):
        _left: tuple[Message, ...] = ()

        def go_on_from(self, state: AgentState) -> None:
            self._left = state.messages
            self.n_calls = state.n_calls
            self.n_consecutive_format_errors = state.n_format_fails
            self._start_time -= state.spent_s

        def add_messages(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
            left, self._left = self._left, ()
            return super().add_messages(*(left or messages))

    return Agent


def import_scaffold(scratch: Path) -> SimpleNamespace:
    """Import mini-swe-agent without its side effects.

    Importing it prints a banner, makes a folder in the user's home and loads a dotenv file from there into
    this process's environment; all three are turned away for the time of the import.
    """
    overrides = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(scratch / "mini-swe-agent")}
    with variables(overrides):
        import minisweagent.agents.default as default
        import minisweagent.config as config
        import minisweagent.exceptions as exceptions
        import minisweagent.models.utils.actions_text as text
        import minisweagent.models.utils.actions_toolcall as toolcall
    return SimpleNamespace(
        default=default,
        config=config,
        exceptions=exceptions,
        text=compiled_once(text),
        toolcall=compiled_once(toolcall),
    )


def require_text(
    actions: Sequence[Mapping[str, Any]], mini: SimpleNamespace, template: str, extra: Mapping[str, Any]
) -> None:
    """mini-swe-agent checks that a call has a `command`, not that it is text.

    Raises:
        FormatError: mini-swe-agent's own, made of its `format_error_template` and what else that is given.
    """
    if all(isinstance(action["command"], str) for action in actions):
        return
    error = "The 'command' argument of the bash tool must be a string."
    content = Template(template, undefined=StrictUndefined).render(
        actions=[], error=error, has_tool_calls=True, **extra
    )
    raise mini.exceptions.FormatError(
        {"role": "user", "content": content, "extra": {"interrupt_type": "FormatError"}}
    )
