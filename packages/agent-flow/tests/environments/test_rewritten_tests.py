"""One rollout, agent to reward, of a task whose tests lie in its repository: rewriting them is no use."""

import json
import shutil
import subprocess
import tomllib

import pytest
from agent_flow.config import config_of
from agent_flow.environments.repository import build_repository
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_flow
from agent_flow.rollout import Rollout

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

AGENT = '''
import msgspec
from agent_flow.protocols import AgentResult

class Cheat:
    """Leaves the code alone and makes every test pass."""

    class Config(msgspec.Struct, frozen=True):
        pass

    tools = ()

    def __init__(self, config, context): ...

    def describe(self):
        return {"agent": "cheat"}

    async def run(self, task, model, environment, state=None):
        path = f"{environment.workdir}/tests/test_spans.py"
        text = (await environment.read(path)).decode()
        for line in text.splitlines():
            if line.startswith("    def test_"):
                text = text.replace(line, f"{line}\\n        return")
        await environment.write(path, text.encode())
        return AgentResult(exit_status="Submitted", messages=())
'''


@pytest.fixture(scope="module")
def project(example, tmp_path_factory):
    """The first task of the quickstart with its tests in the repository and no test patch."""
    tmp_path = tmp_path_factory.mktemp("rewritten")
    row = json.loads((example / "tasks.jsonl").read_text().splitlines()[0])
    source = tmp_path / "repos" / row["repo"]
    shutil.copytree(example / "repos" / row["repo"], source, ignore=shutil.ignore_patterns("__pycache__"))
    patch = row.pop("test_patch").encode()
    subprocess.run(["git", "apply", "-"], cwd=source, input=patch, check=True)
    row["base_commit"] = build_repository(source, tmp_path / "built", row["repo"])
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    (tmp_path / "agent_that_cheats.py").write_text(AGENT)
    return tmp_path


@pytest.fixture
def cheated(project, context, example):
    """The rollout's end."""

    async def play(**flow):
        values = tomllib.loads((example / "run.toml").read_text())
        values |= {
            "python_path": ["."],
            "agent": {"provider": "agent_that_cheats:Cheat"},
            "flow": {"provider": "swe", **flow},
        }
        made = ProviderContext(
            file=config_of(values, base=project),
            clock=context.clock,
            tokenizer=context.tokenizer,
            scratch=context.scratch / f"rewritten-{len(list(context.scratch.iterdir()))}",
        )
        swe = load_flow(made)
        (task,) = swe.load()
        rollout = Rollout(
            rollout_id="0" * 32,
            group_id="1" * 32,
            member=0,
            attempt=0,
            task=task,
            mode="train",
            conversation=None,
        )
        async with swe.session():
            await swe.generate(rollout, None)
            await swe.reward(rollout)
        return rollout

    return play


async def test_they_are_put_back_before_grading(cheated):
    rollout = await cheated()
    assert (rollout.reward, rollout.ungraded) == (0.0, None)
    assert (rollout.produced_by["surface_tests"], rollout.produced_by["surface_reset"]) == (1, 1)
    assert json.loads(rollout.artifacts["test_surface.json"])["tests"] == ["tests/test_spans.py"]


async def test_a_policy_that_only_flags_them_pays_for_it(cheated):
    rollout = await cheated(test_files="flag")
    assert (rollout.reward, rollout.produced_by["surface_tests"]) == (1.0, 1)
