import asyncio
import json
import shlex
from functools import cached_property

import yaml
from pydantic import BaseModel
from swerex.runtime.abstract import UploadRequest

import sweagent
from sweagent.exceptions import FunctionCallingFormatError

BASH = {"docstring": "Run a command in bash.", "arguments": [{"name": "command", "type": "string"}]}


class Filter(BaseModel):
    blocklist_error_template: str = "'{{action}}' is not supported by this environment."
    blocklist: list[str] = ["vim"]


class ParseFunction(BaseModel):
    type: str = "function_calling"


class BundleConfig(BaseModel):
    path: str


class ToolConfig(BaseModel):
    filter: Filter = Filter()
    bundles: list[BundleConfig] = []
    env_variables: dict = {}
    registry_variables: dict = {}
    parse_function: ParseFunction = ParseFunction()
    format_error_template: str = "Make exactly one tool call. {{exception_message}}"
    command_docs: str = ""
    execution_timeout: float = 30
    install_timeout: float = 300
    total_execution_timeout: float = 1800
    max_consecutive_execution_timeouts: int = 3

    @property
    def use_function_calling(self):
        return self.parse_function.type == "function_calling"

    def folders(self):
        return [sweagent.TOOLS_DIR.parent / bundle.path for bundle in self.bundles]

    @cached_property
    def commands(self):
        commands = {"bash": BASH}
        for folder in self.folders():
            commands |= yaml.safe_load((folder / "config.yaml").read_text())["tools"]
        return commands

    @property
    def tools(self):
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": command["docstring"],
                    "parameters": {
                        "type": "object",
                        "properties": {one["name"]: {"type": "string"} for one in command["arguments"]},
                        "required": [one["name"] for one in command["arguments"]],
                    },
                },
            }
            for name, command in self.commands.items()
        ]


class ToolHandler:
    def __init__(self, tools):
        self.config = tools.model_copy(deep=True)

    def install(self, env):
        runtime = env.deployment.runtime
        for folder in self.config.folders():
            target = f"/root/tools/{folder.name}"
            asyncio.run(runtime.upload(UploadRequest(source_path=str(folder), target_path=target)))
            env.communicate(
                f"export PATH={target}/bin:$PATH && chmod +x {target}/bin/*",
                check="raise",
                timeout=self.config.install_timeout,
            )
        env.set_env_variables(self.config.env_variables)
        env.write_file("/root/.swe-agent-env", json.dumps(self.config.registry_variables))
        env.write_file("/root/state.json", "{}")

    def get_state(self, env):
        try:
            return json.loads(env.read_file("/root/state.json"))
        except FileNotFoundError:
            return {}

    def should_block_action(self, action):
        return any(action.strip().startswith(word) for word in self.config.filter.blocklist)

    def check_for_submission_cmd(self, output):
        return "<<SWE_AGENT_SUBMISSION>>" in output

    def guard_multiline_input(self, action):
        return action

    def parse_actions(self, output):
        calls = output.get("tool_calls") or []
        if len(calls) != 1:
            code = "multiple" if calls else "missing"
            raise FunctionCallingFormatError(f"{len(calls)} tool calls", code, num_tools=len(calls))
        function = calls[0]["function"]
        if function["name"] not in self.config.commands:
            raise FunctionCallingFormatError(f"no command {function['name']}", "invalid_command")
        values = json.loads(function["arguments"])
        arguments = self.config.commands[function["name"]]["arguments"]
        missing = {one["name"] for one in arguments} - values.keys()
        if missing:
            raise FunctionCallingFormatError(f"no {missing}", "missing_arg")
        if function["name"] == "bash":
            return output["message"], values["command"].strip()
        words = [function["name"], *(shlex.quote(values[one["name"]]) for one in arguments)]
        return output["message"], " ".join(words)
