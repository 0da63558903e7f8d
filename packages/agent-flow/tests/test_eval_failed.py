"""What an evaluation makes of rollouts without a reward: the agent's own failures count as 0."""

import pytest
from agent_flow.errors import StageTimeoutError
from agent_flow.evaluation import summarise
from agent_flow.events import RolloutRow

FLOW = """
import anyio
from agent_flow.errors import AgentError, EnvError, GraderError
from agent_flow.plain_flow import PlainFlow

class It(PlainFlow):
    async def converse(self, rollout, model):
        await super().converse(rollout, model)
        if not rollout.member:
            FAILURE

def judge(episode):
    if not episode.member:
        JUDGED
    return 1.0
"""


@pytest.fixture
def evaluated(own_agent):
    """The evaluation of one task with two rollouts, of which the first fails."""

    def run(failure="pass", judged="pass", worker="", text=False, more=""):
        own_agent.source(FLOW.replace("FAILURE", failure).replace("JUDGED", judged) + more)
        own_agent.config(
            ('"my_flow:Guess"', '"my_flow:It"'),
            ("max_guesses = 4", ""),
            ("my_flow:efficient", "my_flow:judge"),
            ("[runtime]", f"[worker]\nmax_refills = 0\n{worker}\n[runtime]"),
        )
        return own_agent.call("eval", "run.toml", *([] if text else ["--json"]))

    return run


AGENT = [
    ({"failure": "raise AgentError('broke', 'x', fault='agent')"}, "agent/broke (agent)"),
    ({"failure": "raise EnvError('gone', 'x', fault='agent')"}, "environment/gone (agent)"),
    (
        {"failure": "await anyio.sleep_forever()", "worker": "generate_timeout_s = 1.0"},
        "flow/generate_timeout (agent)",
    ),
    ({"judged": "raise GraderError('no_patch', 'x', fault='agent')"}, "Submitted: grader/no_patch"),
]


@pytest.mark.parametrize(("broken", "why"), AGENT)
def test_a_failure_of_the_agents_own_is_a_reward_of_0(evaluated, broken, why):
    summary = evaluated(**broken).summary
    assert (summary["failed"], summary["not_graded"]) == ({why: 1}, {})
    assert (summary["graded"], summary["mean_reward"]) == (1, 0.5)
    assert summary["pass_at"] == {"1": 0.5, "2": 1.0}
    (score,) = summary["per_task"]
    assert (score["graded"], score["failed"], score["passed"], score["not_graded"]) == (1, 1, 1, 0)


OTHERS = [
    ({"failure": "raise EnvError('lost', 'x')"}, "environment/lost (infra)"),
    ({"failure": "raise EnvError('pull', 'x', fault='image')"}, "environment/pull (image)"),
    ({"failure": "raise EnvError('row', 'x', fault='task')"}, "environment/row (task)"),
    ({"judged": "raise GraderError('down', 'x')"}, "grader/down (infra)"),
    ({"failure": "rollout.exit_status = 'exit_api'"}, "exit_api: not graded"),
]


@pytest.mark.parametrize(("broken", "why"), OTHERS)
def test_what_others_are_to_blame_for_is_missing_and_said(evaluated, broken, why):
    done = evaluated(**broken)
    summary = done.summary
    assert (done.code, summary["missing"]) == (1, 1), "something was not measured"
    assert (summary["failed"], summary["not_graded"]) == ({}, {why: 1})
    assert (summary["graded"], summary["mean_reward"]) == (1, 1.0)
    assert summary["pass_at_tasks"] == {"1": 1, "2": 0}


def test_a_provider_that_hangs_is_not_the_agents_fault(evaluated, own_agent):
    own_agent.config(('provider = "replay"', 'provider = "my_flow:Hangs"'))
    engine = (
        "from agent_flow.engines.replay import ReplayEngine\n"
        "class Hangs(ReplayEngine):\n"
        "    async def generate(self, request):\n"
        "        if not request.member:\n"
        "            await anyio.sleep_forever()\n"
        "        return await super().generate(request)\n"
    )
    summary = evaluated(worker="generate_timeout_s = 1.0", more=engine).summary
    assert (summary["failed"], summary["not_graded"]) == ({}, {"flow/generate_timeout (infra)": 1})
    assert (summary["graded"], summary["mean_reward"]) == (1, 1.0)


def test_a_rollout_that_another_replaced_is_not_missing():
    rows = [
        RolloutRow(
            rollout_id="0" * 32, task="a", exit_status="", reward=reward, turns=1, prompt_tokens=1,
            sampled_tokens=1, seconds=1.0, dropped=dropped, fault="infra" if dropped else "",
        )
        for reward, dropped in ((None, "environment/start"), (1.0, ""))
    ]  # fmt: skip
    for asked, missing in ((1, 0), (2, 1)):
        found = summarise(["a"], rows, rollouts_per_task=asked, pass_reward=1.0, seconds=0.0)
        assert found.missing == missing


def test_it_is_said_in_words(evaluated):
    said = evaluated(**AGENT[0][0], text=True).stdout
    assert "mean reward 0.5 (graded: 1 of 1 tasks, 1 rollouts, 1 failed)" in said
    assert "failed, counted above as a reward of 0: 1 x agent/broke (agent)" in said


def test_a_task_in_which_every_rollout_failed_counts():
    row = RolloutRow(
        rollout_id="0" * 32, task="a", exit_status="", reward=None, turns=1, prompt_tokens=1,
        sampled_tokens=1, seconds=1.0, dropped="flow/generate_timeout", fault="agent",
    )  # fmt: skip
    found = summarise(["a"], [row], rollouts_per_task=1, pass_reward=1.0, seconds=0.0)
    assert (found.mean_reward, found.pass_at, found.per_task[0].mean_reward) == (0.0, {"1": 0.0}, 0.0)


@pytest.mark.parametrize(
    ("stage", "fault"), [("preprocess", "infra"), ("generate", "agent"), ("reward", "infra")]
)
def test_the_agent_works_in_one_step_alone(stage, fault):
    assert StageTimeoutError(stage, 1.0).fault == fault
