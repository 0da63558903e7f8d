"""Providers of the tests: recorded turns among which things happen, and several agents in one run.

Found as a module of a user's own is, by `python_path`.
"""

import os
import signal
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread
import msgspec
from agent_flow.agents.minisweagent import MiniSweAgent
from agent_flow.agents.sweagent import SweAgent
from agent_flow.engines.replay import ReplayEngine
from agent_flow.environments.k8s import KubernetesEnvironments
from agent_flow.environments.local import LocalEnvironments
from agent_flow.errors import EngineError, RolloutError, unwrapped
from agent_flow.providers import load_agent

MARKER = "lose-this-sandbox"


class ElsewhereError(RolloutError):
    """Of a boundary that a user's own provider has, and the outcome table does not."""

    boundary = "browser"


class Scripted(ReplayEngine):
    """The recorded turns. What begins with `!` happens in the place of one; the sandbox of a command that
    leaves a file named `MARKER` is lost while it runs."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self._sandboxes = context.scratch / "s" / "sandboxes"
        self._lost = set()

    @asynccontextmanager
    async def session(self):
        async with anyio.create_task_group() as self._group:
            yield
            self._group.cancel_scope.cancel()

    async def generate(self, request):
        turns = self._recordings[request.task_id].rollouts[0].turns
        said = turns[request.turn].text if request.turn < len(turns) else ""
        if said == "!down":
            raise EngineError("down", "no answer", retryable=True)
        if said.startswith("!fill "):
            await anyio.to_thread.run_sync(fill, Path(said.removeprefix("!fill ")))
        if said == "!elsewhere":
            raise ElsewhereError("lost", "the page is gone", retryable=True)
        (record,) = await super().generate(request)
        if said == "!abort":
            cut = {"output_ids": record.output_ids[:2], "finish_reason": "abort", "stop_id": None}
            return (msgspec.structs.replace(record, **cut),)
        if said == "!mixed up":  # the answer to another prompt
            return (msgspec.structs.replace(record, prompt_ids=record.prompt_ids[1:]),)
        if MARKER in said:
            self._group.start_soon(self._lose)
        return (record,)

    async def _lose(self):
        """SIGKILL for the launcher of the sandbox in which the command has left its marker."""
        while True:
            for marker in self._sandboxes.glob(f"*/work/*/{MARKER}"):
                sandbox = marker.parents[2]
                if sandbox not in self._lost:
                    self._lost.add(sandbox)
                    kill_processes_naming(sandbox)
                    return
            await anyio.sleep(0.02)


def fill(folder):
    """Leave no byte on a folder's disk."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def kill_processes_naming(folder):
    """SIGKILL for every process with the folder in its arguments; there is one, at least."""
    found = processes_naming(os.fsencode(folder))
    assert found, f"no process of {folder}"
    for number in found:
        os.kill(number, signal.SIGKILL)


def processes_naming(words):
    """Other processes that have these bytes in their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if words in arguments and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


class Spoiled(LocalEnvironments):
    """As `local`; the repository `gitless` has no .git, and `partial` is a partial clone."""

    @asynccontextmanager
    async def open(self, spec):
        async with super().open(spec) as environment:
            spoil = SPOIL.get(spec.repository.name, ["true"])
            assert (await environment.execute(spoil, timeout_s=60, cwd=environment.workdir)).exit_code == 0
            yield environment


SPOIL = {"gitless": ["rm", "-rf", ".git"], "partial": ["git", "config", "extensions.partialClone", "origin"]}


class Doomed(KubernetesEnvironments):
    """Pods of a fake cluster that suffer what the test says, each time that one is started."""

    cluster = None
    dooms = MappingProxyType({})
    """Recorded causes by the purpose of the pod."""
    killed = ""
    """Reason why a pod is killed while `sleep SECONDS` runs in it, or `drained`: its node is."""
    seconds = ""

    @asynccontextmanager
    async def open(self, spec):
        if spec.purpose in self.dooms:
            await anyio.to_thread.run_sync(self.cluster.doom, self.dooms[spec.purpose])
        before = await anyio.to_thread.run_sync(self._pods)
        with unwrapped():
            async with super().open(spec) as environment, anyio.create_task_group() as group:
                if self.killed:
                    (pod,) = await anyio.to_thread.run_sync(self._pods) - before
                    group.start_soon(self._kill, pod)
                yield environment
                group.cancel_scope.cancel()

    def _pods(self):
        return {pod["metadata"]["name"] for pod in self.cluster.pods()}

    async def _kill(self, pod):
        while True:
            if processes_naming(f"sleep\0{self.seconds}\0".encode()):
                way = (self.cluster.kill_pod, pod, self.killed)
                await anyio.to_thread.run_sync(
                    *((self.cluster.evict, pod) if self.killed == "drained" else way)
                )
                return
            await anyio.sleep(0.02)


class Several:
    """Several agents in one run: the task's column `agent` names the one that works on it."""

    class Config(msgspec.Struct, frozen=True, kw_only=True):
        agents: dict[str, dict[str, object]]
        """`[agent]` tables by name."""

    def __init__(self, config, context):
        self._agents = {}
        for name, section in config.agents.items():
            run = msgspec.structs.replace(context.file.run, agent=section)
            file = msgspec.structs.replace(context.file, run=run)
            self._agents[name] = load_agent(msgspec.structs.replace(context, file=file))
        first, *others = self._agents.values()
        self.tools = first.tools
        assert all(agent.tools == first.tools for agent in others)

    def describe(self):
        return {"agent": ", ".join(self._agents)}

    async def run(self, task, model, environment, state=None):
        return await self._agents[task.row["agent"]].run(task, model, environment, state)


class OwnWord(MiniSweAgent):
    """Ends with a word of its own."""

    async def run(self, task, model, environment, state=None):
        result = await super().run(task, model, environment, state)
        return msgspec.structs.replace(result, exit_status="Finished")


class Raising(SweAgent):
    """SWE-agent whose parts fail as only parts that are not ours do: the command `raise NAME` does it."""

    @property
    def _agent_class(self):
        from swerex.exceptions import SwerexException
        from tenacity import RetryError

        given = super()._agent_class
        errors = {"raise api": RetryError(None), "raise environment": SwerexException("a tool of it")}

        class Agent(given.func):
            def handle_action(self, step):
                if step.action in errors:
                    raise errors[step.action]
                return super().handle_action(step)

        return partial(Agent, **given.keywords)
