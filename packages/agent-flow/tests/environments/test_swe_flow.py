"""The flow: what an agent did to its own judging is taken back or flagged; what was left out is listed."""

import json
import tomllib

import pytest
from agent_flow.config import config_of
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_flow
from agent_flow.rollout import Rollout
from agent_flow.runtimes.rows import repository_row

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

AGENT = '''
import msgspec
from agent_flow.protocols import AgentResult

class Scripted:
    """Does what a file says, and submits."""

    class Config(msgspec.Struct, frozen=True, kw_only=True):
        script: str
        patch: str = ""

    tools = ()

    def __init__(self, config, context):
        self.config = config

    def describe(self):
        return {"agent": "scripted"}

    async def run(self, task, model, environment, state=None):
        await environment.write("/tmp/gold.diff", self.config.patch.encode())
        done = await environment.execute(
            ["bash", "-ec", self.config.script], timeout_s=60, cwd=environment.workdir
        )
        assert done.exit_code == 0, done.stderr
        return AgentResult(exit_status="Submitted", messages=())
'''


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent_of_a_script.py").write_text(AGENT)
    return folder


@pytest.fixture
def played(context, example, agent_folder):
    """Plays a script as the agent of one rollout, agent and grading, and gives the rollout."""

    async def play(script, **flow):
        row = json.loads((example / "tasks.jsonl").read_text().splitlines()[0])
        values = tomllib.loads((example / "run.toml").read_text())
        values |= {
            "base": str(example),
            "python_path": [str(agent_folder)],
            "agent": {"provider": "agent_of_a_script:Scripted", "script": script, "patch": row["patch"]},
            "flow": {"provider": "swe", **flow},
        }
        made = ProviderContext(
            file=config_of(values, base=example),
            clock=context.clock,
            tokenizer=context.tokenizer,
            scratch=context.scratch / f"{len(list(context.scratch.iterdir()))}",
        )
        swe = load_flow(made)
        task = next(task for task in swe.load() if task.instance_id == row["instance_id"])
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
            await swe.preprocess(rollout)
            await swe.generate(rollout, None)
            await swe.reward(rollout)
        return rollout

    return play


def brought(rollout):
    """Files of the task's test patch."""
    test_patch = repository_row(rollout.task).test_patch
    return [line.split(" b/")[1] for line in test_patch.splitlines() if line.startswith("diff --git ")]


def named(rollout):
    """Files of the tests that the row names."""
    row = repository_row(rollout.task)
    modules = {test.rsplit(".", 2)[0] for test in (*row.FAIL_TO_PASS, *row.PASS_TO_PASS)}
    return [f"{module.replace('.', '/')}.py" for module in modules]


SPOIL_TESTS = "for f in $(ls tests/test_*.py); do echo 'raise SystemExit(0)' > $f; done"


async def test_tests_are_taken_back_and_configuration_is_flagged(played):
    """verifiers#2152: a planted conftest.py scored 1.0."""
    rollout = await played(f"git apply /tmp/gold.diff; {SPOIL_TESTS}; echo > conftest.py")
    made = rollout.produced_by
    assert made["surface_tests"] == made["surface_reset"] > 0
    assert made["surface_configuration"] == 1
    found = json.loads(rollout.artifacts["test_surface.json"])
    assert found["configuration"] == ["conftest.py"]
    assert set(found["tests"]) <= {*brought(rollout), *named(rollout)}
    assert b"SystemExit" in rollout.artifacts["patch.diff"], "the agent's own patch is kept as it is"


async def test_a_policy_can_take_configuration_back_too(played):
    script = "git apply /tmp/gold.diff; echo 'raise SystemExit' > conftest.py"
    rollout = await played(script, test_configuration="reset")
    assert rollout.reward == 1.0
    assert (rollout.produced_by["surface_configuration"], rollout.produced_by["surface_reset"]) == (1, 1)


async def test_a_patch_of_tests_alone_is_no_solution(played):
    """Nothing of it is graded: the tests fail as they did."""
    rollout = await played("for f in $(ls tests/test_*.py); do echo >> $f; done")
    assert rollout.reward == 0.0
    assert rollout.ungraded is None


async def test_what_is_left_out_is_an_artifact(played):
    rollout = await played("git apply /tmp/gold.diff; head -c 2000000 /dev/zero > core.dump", max_file_mib=1)
    assert rollout.reward == 1.0
    left_out = json.loads(rollout.artifacts["left_out.json"])
    assert left_out["files"] == [{"path": "core.dump", "reason": "too_large", "size": None}]
    assert rollout.produced_by["left_out"] == left_out["counts"]["too_large"] == 1


async def test_a_patch_above_the_limit_is_evidence_only(played):
    rollout = await played("head -c 3000000 /dev/urandom > noise.bin", max_patch_mib=1)
    assert (rollout.reward, rollout.in_loss, rollout.in_baseline) == (None, False, False)
    assert rollout.ungraded.cause == "patch_too_large"
