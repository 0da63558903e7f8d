"""Providers of the runs that are measured: a model that answers at once, and a flow that starts no process.

Loaded by agent-flow as the module `scripted` (`python_path` of the run's configuration).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
from agent_flow.outcome import settle
from agent_flow.protocols import CommandOutput
from agent_flow.providers import load_agent
from agent_flow.task import load_tasks
from token_tracking import GenerationRecord

_PLATFORM = b"Linux\n"


class ScriptedEngine:
    """The script's replies as token ids with log-probabilities, made before the first rollout."""

    class Config(msgspec.Struct, frozen=True, kw_only=True):
        script: str

    source = "replayed"

    def __init__(self, config, context):
        replies = json.loads(Path(config.script).read_text())["replies"]
        stop = context.tokenizer.token_to_id("<|im_end|>")
        self._ids = [np.array([*context.tokenizer.encode(text), stop], np.int32) for text in replies]
        self._stop = stop

    def describe(self):
        return {"engine": "scripted"}

    def check(self, tasks):
        pass

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        yield

    async def generate(self, request):
        ids = self._ids[request.turn]
        record = GenerationRecord(
            prompt_ids=request.prompt_ids,
            output_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            logprob_kind="raw",
            finish_reason="stop",
            stop_id=self._stop,
            weight_version=0,
        )
        return (record,)


class NoSandbox:
    """An environment whose commands answer at once with what the script says."""

    workdir = "/testbed"

    def __init__(self, outputs):
        self._outputs = iter(outputs)

    async def execute(self, command, *, timeout_s, cwd=None):
        out = _PLATFORM if command[0] == "uname" else next(self._outputs)
        return CommandOutput(exit_code=0, stdout=out, stderr=b"")

    def describe(self):
        return {"environment": "none"}


class AgentAlone:
    """A flow of an agent without sandbox, patch and grading: what is left is this package's own work."""

    class Config(msgspec.Struct, frozen=True, kw_only=True):
        script: str

    def __init__(self, config, context):
        script = json.loads(Path(config.script).read_text())
        self._outputs = [text.encode() for text in script["outputs"]]
        self._agent = load_agent(context)
        self._tasks = context.file.run.tasks.path
        self.tools = self._agent.tools

    def load(self):
        return load_tasks(Path(self._tasks))

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        yield

    def describe(self):
        return {"environment": "none", "grader": "none", **self._agent.describe()}

    async def preprocess(self, rollout):
        pass

    async def generate(self, rollout, model):
        result = await self._agent.run(rollout.task, model, NoSandbox(self._outputs))
        rollout.exit_status, rollout.messages = result.exit_status, result.messages

    async def reward(self, rollout):
        if settle(rollout):
            rollout.reward = 1.0
