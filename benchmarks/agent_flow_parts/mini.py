"""mini-swe-agent's own side: a model that answers with the script, at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minisweagent.exceptions import Submitted
from minisweagent.models.utils.actions_toolcall import (
    format_toolcall_observation_messages,
    parse_toolcall_actions,
)

SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class ScriptedModel:
    """What its LitellmModel does around the call: parse the tool call, format the observation."""

    def __init__(self, commands: list[list[str]], settings: dict[str, Any]) -> None:
        self.config = settings
        self._commands = iter(commands)

    def query(self, messages: list[dict[str, Any]], **_: object) -> dict[str, Any]:
        thought, command = next(self._commands)
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        call = SimpleNamespace(id="call_0", function=SimpleNamespace(**function))
        actions = parse_toolcall_actions(
            [call], format_error_template=self.config["format_error_template"], template_kwargs={}
        )
        return {
            "role": "assistant",
            "content": thought,
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
            "extra": {"actions": actions, "cost": 0.0},
        }

    def format_message(self, **message: Any) -> dict[str, Any]:
        return message

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: Any = None
    ) -> list[dict[str, Any]]:
        return format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=self.config["observation_template"],
            template_vars=template_vars,
        )

    def get_template_vars(self, **_: object) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


class ReadyEnvironment:
    """Commands answer at once with what the script says."""

    def __init__(self, outputs: list[str], workdir: Path) -> None:
        self._outputs = iter(outputs)
        self._vars = {"cwd": str(workdir), "system": "Linux", "release": "", "version": "", "machine": ""}

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        output = next(self._outputs)
        if output.strip() == SUBMITTED:
            extra = {"exit_status": "Submitted", "submission": ""}
            raise Submitted({"role": "exit", "content": "", "extra": extra})
        return {"output": output, "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **_: object) -> dict[str, Any]:
        return self._vars

    def serialize(self) -> dict[str, Any]:
        return {}
