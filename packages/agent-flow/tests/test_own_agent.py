"""docs/your-own-agent.md: a flow for a task that is no repository, as a stranger copies it."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from trainer_bridge import read_samples

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own-agent"
DOCUMENT = (ROOT / "docs" / "your-own-agent.md").read_text()
REWARDS = {
    "guess-37": pytest.approx((1 / 3 + 0) / 2),
    "guess-50": pytest.approx((1 + 1 / 4) / 2),
    "guess-7": pytest.approx((1 / 3 + 1 / 2) / 2),
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize(("language", "name"), [("python", "my_flow.py"), ("toml", "run.toml")])
def test_the_document_shows_the_files_of_the_example(language, name):
    assert blocks(language)[0] == (EXAMPLE / name).read_text()


def test_the_flow_and_its_reward_are_under_forty_lines():
    assert len((EXAMPLE / "my_flow.py").read_text().splitlines()) < 40


def test_the_template_is_that_of_the_quickstart():
    """Each example is a folder that can be copied away, so each has its own."""
    assert (EXAMPLE / "qwen3.jinja").read_bytes() == (ROOT / "examples/quickstart/qwen3.jinja").read_bytes()


def test_a_stranger_needs_two_commands(cli, tmp_path):
    copy, run = blocks("bash")[0].splitlines()
    assert copy == "cp -r examples/own-agent my-agent"
    shutil.copytree(EXAMPLE, tmp_path / "my-agent")
    assert run.startswith("uv run agent-flow ")
    done = cli(*run.removeprefix("uv run agent-flow ").split(), "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.summary["rewards"] == REWARDS
    samples = list(read_samples(done.folder))
    assert len(samples) == done.summary["delivered"] == 6
    for sample in samples:
        assert sample.provenance["runtime"] == "plain"
        assert sample.provenance["grader"].startswith("reward-function/")
        assert sample.provenance["template_delta"] == "program"
        assert sample.provenance["weight_versions"] == "unknown"
        assert sample.trained_tokens == sum(turn.end - turn.start for turn in sample.turns)
        if sample.provenance["exit_status"] == "Submitted":
            assert sample.extra == {"guesses": len(sample.turns), "found": True}
        else:
            assert (sample.reward, sample.status, sample.extra) == (0.0, "truncated", {})


def test_the_same_folder_is_measured_without_a_trainer(own_agent):
    text = (EXAMPLE / "run.toml").read_text()
    Path("measure.toml").write_text(text.replace("my_flow", own_agent.module))
    done = own_agent.call("eval", "measure.toml", "--json")
    assert done.code == 0, done.stderr
    assert (done.summary["graded"], done.summary["pass_reward"]) == (4, 0.25)
    assert done.summary["pass_at"] == {"1": 0.5, "2": pytest.approx(1 - 1 / 6), "4": 1.0}


PLAIN = (('provider = "my_flow:Guess"', 'provider = "plain"'), ("max_guesses = 4", ""))


def samples_of(run):
    return list(read_samples(run.folder))


@pytest.mark.original("A-reward-without-sandbox")
def test_a_question_and_an_answer_need_no_class(own_agent):
    own_agent.config(*PLAIN, ("rollouts_per_task = 2", "rollouts_per_task = 1"))
    own_agent.source("def efficient(episode): return 1.0 if '50' in episode.text else 0.0")
    run = own_agent.run()
    assert run.code == 0
    assert run.summary["rewards"] == {"guess-37": 1.0}
    (sample,) = samples_of(run)
    assert (len(sample.turns), sample.status) == (1, "completed")


def test_an_answer_that_is_cut_off_is_judged_and_says_truncated(own_agent):
    own_agent.config(*PLAIN)
    own_agent.turns([{"text": "It must be <guess>3", "finish_reason": "length"}])
    own_agent.source("def efficient(episode): return 0.25")
    run = own_agent.run()
    assert run.code == 0
    assert {(sample.reward, sample.status) for sample in samples_of(run)} == {(0.25, "truncated")}


def test_a_context_that_is_full_ends_the_rollout_as_the_table_says(own_agent):
    own_agent.turns([{"text": "<guess>50</guess>"}, {"text": "", "finish_reason": "length"}])
    run = own_agent.run()
    assert run.code == 0
    for sample in samples_of(run):
        assert sample.provenance["exit_status"] == "ContextExceeded"
        assert (sample.reward, sample.status, sample.in_loss) == (0.0, "truncated", True)


def test_each_turn_can_have_a_reward_of_its_own(own_agent):
    old = Path(EXAMPLE / "my_flow.py").read_text()
    own_agent.source(
        old.replace(
            "return Reward(reward=reward,",
            "return Reward(turn_rewards=tuple(0.1 * n for n in range(episode.turns)), reward=reward,",
        )
    )
    run = own_agent.run()
    assert run.code == 0
    done = [sample for sample in samples_of(run) if sample.extra]
    assert done
    for sample in done:
        assert np.allclose(
            [turn.reward for turn in sample.turns], [0.1 * n for n in range(len(sample.turns))]
        )


@pytest.mark.original("A-reward-infrastructure")
@pytest.mark.parametrize(
    ("body", "reason", "drops"),
    [
        ("raise RewardUnavailable('503')", "grader/reward_unavailable", 2),
        ("raise ValueError('a fault of the function')", "grader/reward_raised", 2),
        ("return None", "grader/reward_type", 1),
        ("return float('nan')", "grader/reward_type", 1),
    ],
)
def test_no_reward_is_a_counted_drop_and_never_0(own_agent, body, reason, drops):
    own_agent.config(*PLAIN, ("rollouts_per_task = 2", "rollouts_per_task = 1"))
    own_agent.source(f"from agent_flow.reward import RewardUnavailable\ndef efficient(episode):\n    {body}")
    run = own_agent.run()
    assert run.code == 1
    assert run.summary["dropped"] == {reason: drops}, "filled up once where another rollout may fare better"
    assert run.summary["rewards"] == {"guess-37": None}
    assert run.summary["samples"] == 0


def test_a_judge_that_is_down_for_one_call_costs_a_call(own_agent):
    own_agent.config(*PLAIN)
    own_agent.source(
        "from agent_flow.reward import RewardUnavailable\ncalls = []\n"
        "def efficient(episode):\n"
        "    calls.append(episode)\n"
        "    if len(calls) == 1:\n        raise RewardUnavailable('starting')\n"
        "    return 1.0"
    )
    run = own_agent.run()
    assert run.code == 0
    assert run.summary["rewards"] == {"guess-37": 1.0}
    assert sorted(sample.provenance["grader_calls"] for sample in samples_of(run)) == [1, 2]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (('provider = "my_flow:Guess"', 'provider = "swe"'), "unknown key 'flow.system'"),
        (('reward = "my_flow:efficient"', 'reward = "my_flow:eficient"'), "it has: efficient"),
        (("max_guesses = 4", "max_gueses = 4"), "max_guesses"),
        (("reward_wait_s = 0.001", "reward_wait_s = 0"), "reward_wait_s"),
        (('python_path = ["."]', 'python_path = ["gone"]'), "no such folder"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(own_agent, edit, said):
    own_agent.config(edit)
    run = own_agent.run()
    assert run.code == 2
    assert said in run.stderr
    assert not Path("runs").exists()


def test_a_plain_flow_needs_a_runtime_that_judges_rollouts(own_agent):
    own_agent.config(
        ('provider = "plain"', 'provider = "command"\nrepos = "."\ntest_command = "true {tests}"'),
        ('reward = "my_flow:efficient"', ""),
        ("reward_wait_s = 0.001", ""),
    )
    run = own_agent.run()
    assert run.code == 2
    assert "needs a runtime that judges whole rollouts" in run.stderr
