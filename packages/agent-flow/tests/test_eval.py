"""`agent-flow eval`: mean reward and pass@k; nothing is trained or sent, and what failed is never a 0."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from agent_flow.evaluation import pass_at_k, summarise
from agent_flow.events import RolloutRow


@pytest.mark.parametrize(
    ("n", "passed", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 4), (4, 4, 1), (6, 1, 6), (3, 3, 3)]
)
def test_pass_at_k_is_the_share_of_all_choices_of_k_in_which_one_passes(n, passed, k):
    outcomes = [True] * passed + [False] * (n - passed)
    chosen = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def row(task, reward=None, *, dropped="", fault="", exit_status="Submitted", note=""):
    return RolloutRow(
        rollout_id="0" * 32,
        task=task,
        exit_status=exit_status,
        reward=reward,
        turns=1,
        prompt_tokens=10,
        sampled_tokens=5,
        seconds=1.0,
        dropped=dropped,
        fault=fault,
        note=note,
    )


def test_failures_of_the_infrastructure_stand_apart():
    rows = [
        *[row("a", reward) for reward in (1.0, 1.0, 0.0, 0.0)],
        *[row("b", reward) for reward in (1.0, 0.5)],
        row("b", dropped="environment/start", fault="infra"),
        row("b", dropped="environment/start", fault="infra"),
        row("c", note="grader/unreadable: no verdict"),
        row("c", dropped="flow/reward_timeout", fault="infra", exit_status=""),
    ]
    found = summarise(["a", "b", "c"], rows, rollouts_per_task=4, pass_reward=1.0, seconds=3.0)
    assert found.mean_reward == pytest.approx((0.5 + 0.75) / 2)
    assert found.graded == 6
    assert found.pass_at == {"1": 0.5, "2": pytest.approx((1 - 1 / 6 + 1.0) / 2), "4": 1.0}
    assert found.pass_at_tasks == {"1": 2, "2": 2, "4": 1}
    assert found.not_graded == {
        "environment/start (infra)": 2,
        "Submitted: grader/unreadable": 1,
        "flow/reward_timeout (infra)": 1,
    }
    assert [(score.task, score.graded, score.passed, score.not_graded) for score in found.per_task] == [
        ("a", 4, 2, 0),
        ("b", 2, 1, 2),
        ("c", 0, 0, 2),
    ]
    assert found.per_task[2].mean_reward is None


def test_nothing_graded_is_no_number():
    found = summarise(["a"], [row("a", dropped="engine/down", fault="infra")],
                      rollouts_per_task=1, pass_reward=1.0, seconds=0.0)  # fmt: skip
    assert (found.mean_reward, found.pass_at, found.pass_at_tasks) == (None, {}, {"1": 0})


def evaluate(own_agent, *options):
    return own_agent.call("eval", "run.toml", "--json", *options)


def test_an_evaluation_needs_no_trainer_and_trains_nothing(own_agent, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("trainer_bridge", "agent_flow.delivery"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trainer_bridge", None)  # as if it were not installed
    done = evaluate(own_agent)
    assert done.code == 0, done.stderr
    summary = done.summary
    assert (summary["tasks"], summary["graded"], summary["not_graded"]) == (1, 2, {})
    assert summary["mean_reward"] == pytest.approx(1 / 6)
    assert summary["pass_at"] == {"1": 0.0, "2": 0.0}
    assert done.folder.name.startswith("own-agent-eval-")
    document = json.loads((done.folder / "eval.json").read_text())
    assert document["kind"] == "agent-flow-eval"
    assert {key: document[key] for key in summary} == summary
    assert not list((done.folder / "samples").iterdir())
    records = [json.loads(path.read_text()) for path in done.folder.glob("rollouts/*/provenance.json")]
    assert len(records) == 2
    for record in records:
        assert (record["mode"], record["in_loss"], record["in_baseline"]) == ("eval", False, False)


def test_its_own_section_says_what_is_other_than_in_a_run(own_agent):
    rows = Path("tasks.jsonl").read_text()
    Path("heldout.jsonl").write_text(
        rows.replace("guess-37", "guess-50").replace('"secret": 37', '"secret": 50')
    )
    with Path("run.toml").open("a") as file:
        file.write(
            '\n[eval]\npath = "heldout.jsonl"\nrollouts_per_task = 4\npass_reward = 0.25\n'
            "[eval.sampling]\ntemperature = 0\n"
        )
    own_agent.source(
        (own_agent.folder / f"{own_agent.module}.py").read_text()
        + "\nfrom agent_flow.engines.replay import ReplayEngine\n"
        "class Cold(ReplayEngine):\n"
        "    async def generate(self, request):\n"
        "        assert (request.sampling.temperature, request.sampling.max_new_tokens) == (0.0, 64)\n"
        "        return await super().generate(request)\n"
    )
    own_agent.config(
        ('provider = "replay"', 'provider = "my_flow:Cold"'),
        ("[runtime]", "[sampling]\nmax_new_tokens = 64\ntemperature = 0.7\n\n[runtime]"),
    )
    done = evaluate(own_agent)
    assert done.code == 0, done.stdout
    assert done.summary["mean_reward"] == pytest.approx((1 + 1 / 4) / 2)
    assert done.summary["pass_at"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    assert done.summary["per_task"] == [
        {"task": "guess-50", "graded": 4, "failed": 0, "passed": 4, "mean_reward": 0.625, "not_graded": 0}
    ]
    used = (done.folder / "run.toml").read_text()
    assert 'path = "heldout.jsonl"' in used
    assert "temperature = 0" in used


def test_a_judge_that_is_down_is_no_0(own_agent):
    own_agent.source(
        (own_agent.folder / f"{own_agent.module}.py").read_text()
        + "\nfrom agent_flow.reward import RewardUnavailable\n"
        "def efficient(episode):\n"
        "    if episode.exit_status == 'Submitted':\n        raise RewardUnavailable('503')\n"
    )
    done = evaluate(own_agent)
    assert done.code == 1
    assert done.summary["mean_reward"] == 0.0, "of the rollout that used up its guesses"
    assert (done.summary["graded"], done.summary["pass_at_tasks"]) == (1, {"1": 1, "2": 0})
    assert done.summary["not_graded"] == {"grader/reward_unavailable (infra)": 2}
    said = own_agent.call("eval", "run.toml").stdout
    assert "no reward, not counted above: 2 x grader/reward_unavailable (infra)" in said
    assert "mean reward 0 (graded: 1 of 1 tasks, 1 rollouts)" in said
    assert "pass@2 - (tasks with 2 graded rollouts: 0)" in said


def test_an_evaluation_can_be_replayed(own_agent):
    done = evaluate(own_agent, "--dump")
    again = own_agent.call("run", "--replay", done.folder, "--json")
    assert again.code == 0, again.summary
    assert again.summary["same"] == 2


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("[eval]\nrolouts_per_task = 2", "rollouts_per_task"),
        ("[eval.sampling]\ntemprature = 0", "temperature"),
        ("[eval.sampling]\ntemperature = -1", "temperature"),
        ('[eval]\npath = "gone.jsonl"', "gone.jsonl"),
    ],
)
def test_what_is_wrong_in_its_section_is_said(own_agent, section, said):
    with Path("run.toml").open("a") as file:
        file.write(f"\n{section}\n")
    done = own_agent.call("eval", "run.toml")
    assert done.code == 2
    assert said in done.stderr
    assert not Path("runs").exists()


AGENTS = '''
from contextlib import nullcontext
import msgspec
from agent_flow.errors import EngineError


class Own:
    """A flow that imports no base class, whose agent in an evaluation brings a model of its own."""

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        pass

    tools = ()

    def __init__(self, config, context):
        self._file = context.file

    def load(self):
        from agent_flow import load_tasks
        return load_tasks(self._file.resolve("tasks.jsonl"))

    def session(self):
        return nullcontext()

    async def preprocess(self, rollout):
        pass

    async def generate(self, rollout, model):
        agent = self._file.run.agent
        if agent["provider"] == "of-training":
            await model.ask([{"role": "user", "content": rollout.task.problem_statement}])
        rollout.messages = ({"role": "assistant", "content": str(dict(agent))},)
        rollout.exit_status = "Submitted"

    async def reward(self, rollout):
        rollout.reward = 1.0

    def describe(self):
        return {"grader": "own"}
'''


@pytest.mark.original("A-eval-agent")
@pytest.mark.parametrize(
    ("section", "agent"),
    [
        ("", {"provider": "of-training", "limit": 3}),
        ("[eval.agent]\nlimit = 9", {"provider": "of-training", "limit": 9}),
        ('[eval.agent]\nprovider = "other"\nkind = 2', {"provider": "other", "kind": 2}),
    ],
)
def test_it_may_have_an_agent_of_its_own(own_agent, section, agent):
    own_agent.source(AGENTS)
    own_agent.config(
        (
            '"my_flow:Guess"\nsystem = "Guess the number. Write each guess as <guess>50</guess>."',
            '"my_flow:Own"',
        ),
        ("max_guesses = 4", '[agent]\nprovider = "of-training"\nlimit = 3'),
    )
    with Path("run.toml").open("a") as file:
        file.write(f"\n{section}\n")
    done = evaluate(own_agent)
    assert done.code == 0, done.stdout
    assert done.summary["mean_reward"] == 1.0
    for path in done.folder.glob("rollouts/*/messages.json"):
        assert json.loads(path.read_text())["messages"][0]["content"] == str(agent)
    for path in done.folder.glob("rollouts/*/provenance.json"):
        assert json.loads(path.read_text())["in_loss"] is False, "whatever the flow says"
    assert len(list(done.folder.glob("rollouts/*/view.html"))) == 2
