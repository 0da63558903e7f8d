"""`[eval]` is looked at before a run: whoever trains for a day must not learn of its mistakes afterwards."""

import json
from pathlib import Path

import pytest
from agent_flow.config import load_config
from agent_flow.errors import UsageError
from agent_flow.eval_section import check_eval


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("[eval.sampling]\ntemprature = 0", "did you mean 'temperature'?"),
        ("[eval.sampling]\ntemperature = -1", "eval.sampling.temperature"),
    ],
)
def test_a_run_says_what_is_wrong_in_it(own_agent, section, said):
    with Path("run.toml").open("a") as file:
        file.write(f"\n{section}\n")
    done = own_agent.call("run", "run.toml")
    assert done.code == 2
    assert said in done.stderr
    assert not Path("runs").exists()


def test_a_run_with_a_good_one_runs(own_agent):
    with Path("run.toml").open("a") as file:
        file.write("\n[eval.sampling]\ntemperature = 0\n")
    assert own_agent.run().code == 0


@pytest.fixture
def checked(example, tmp_path):
    """`check_eval` of the quickstart with a section; gives the error's text."""

    def check(section):
        path = tmp_path / "run.toml"
        text = (example / "run.toml").read_text()
        path.write_text(f'base = "{example}"\n{text}\n{section}\n')
        with pytest.raises(UsageError) as failed:
            check_eval(load_config(path))
        line = path.read_text().splitlines()[int(failed.value.where.rpartition(":")[2]) - 1]
        return str(failed.value), line

    return check


@pytest.mark.parametrize(
    ("section", "said", "line"),
    [
        ("[eval.agent]\nstep_limt = 3", "unknown key 'eval.agent.step_limt'", "step_limt = 3"),
        ('[eval.agent]\nstep_limit = "3"', "eval.agent.step_limit: expected `int`", 'step_limit = "3"'),
        ('[eval.agent]\nprovider = "swagent"', "did you mean 'sweagent'?", 'provider = "swagent"'),
        ('[eval.agent]\nprovider = "gone_module:Agent"', "gone_module", 'provider = "gone_module:Agent"'),
        ("[eval.agent]\nprovider = 3", "not a name: 'eval.agent.provider'", "provider = 3"),
        ('[eval]\npath = "gone.jsonl"', "gone.jsonl", 'path = "gone.jsonl"'),
        ("[eval.sampling]\ntop_p = 2", "eval.sampling.top_p", "top_p = 2"),
    ],
)
def test_every_mistake_is_named_with_its_line(checked, section, said, line):
    text, at = checked(section)
    assert said in text
    assert at == line


def test_doctor_goes_as_far_as_an_evaluation_does_before_its_first_rollout(own_agent):
    rows = Path("tasks.jsonl").read_text()
    Path("heldout.jsonl").write_text(rows.replace("guess-37", "guess-38"))
    with Path("run.toml").open("a") as file:
        file.write('\n[eval]\npath = "heldout.jsonl"\n')
    done = own_agent.call("doctor", "run.toml")
    assert done.code == 3
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == ["eval"]
    assert "no recording of task 'guess-38'" in " ".join(done.stdout.split())
    recording = json.loads(Path("recordings/guess-37.json").read_text())
    Path("recordings/guess-38.json").write_text(json.dumps({**recording, "instance_id": "guess-38"}))
    done = own_agent.call("doctor", "run.toml")
    assert done.code == 0, done.stdout
    assert "1 of heldout.jsonl, the first is guess-38" in " ".join(done.stdout.split())
