"""What fails around one rollout ends that one, and says what it was; see also test_every_exit.py."""

import json
import shutil
from pathlib import Path

import pytest
from agent_flow.cli import main

PROVIDERS = '''
from contextlib import asynccontextmanager
from agent_flow.environments.local import LocalEnvironments
from agent_flow.errors import EnvError
from agent_flow.engines.replay import ReplayEngine
from token_tracking import GenerationRecord
import numpy as np


class Flaky(LocalEnvironments):
    """The first sandbox of every run does not come up."""

    failures = 1

    @asynccontextmanager
    async def open(self, spec):
        if self.failures:
            self.failures -= 1
            raise EnvError("start", "no sandbox today", retryable=True)
        async with super().open(spec) as environment:
            yield environment


class Broken(LocalEnvironments):
    @asynccontextmanager
    async def open(self, spec):
        raise KeyError("a fault of ours")
        yield


class BadRecord(ReplayEngine):
    async def generate(self, request):
        return (GenerationRecord(
            prompt_ids=request.prompt_ids,
            output_ids=np.array([1, 2], dtype=np.int32),
            logprobs=np.array([0.5, -0.1], dtype=np.float32),
            finish_reason="length",
            stop_id=None,
            weight_version=0,
            logprob_kind="raw",
        ),)
'''


@pytest.fixture
def run(example, tmp_path, monkeypatch, capfd, qwen_tokenizer):
    """Runs two tasks of the quickstart with parts replaced; returns exit code, events and stderr."""
    project = tmp_path / "quickstart"
    shutil.copytree(example, project)
    (project / "failing_providers.py").write_text(PROVIDERS)
    monkeypatch.setattr("agent_flow.run.tokenizer_of", lambda file: qwen_tokenizer)
    monkeypatch.syspath_prepend(project)
    monkeypatch.chdir(project)
    rows = [json.loads(line) for line in (project / "tasks.jsonl").read_text().splitlines()]
    keep = [json.dumps(row) for row in rows if row["instance_id"] in ("weightcache-31", "ratekeeper-40")]
    (project / "tasks.jsonl").write_text("\n".join(keep) + "\n")

    def call(*edits):
        text = (project / "run.toml").read_text()
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        (project / "run.toml").write_text(text)
        code = main(["run", "run.toml", "--json"])
        said = capfd.readouterr()
        return code, [json.loads(line) for line in said.out.splitlines()], said.err

    return call


def environment(name):
    return ('provider = "local"', f'provider = "failing_providers:{name}"')


@pytest.mark.original("A-generate-start-error")
def test_a_sandbox_that_comes_up_at_the_second_try_costs_an_attempt_and_nothing_else(run):
    code, events, _ = run(environment("Flaky"), ("max_rollouts = 2", "max_rollouts = 1"))
    assert code == 0
    assert events[-1]["rewards"] == {"weightcache-31": 1.0, "ratekeeper-40": 0.0}
    (failed,) = [event for event in events if event.get("event") == "attempt_failed"]
    assert "environment/start: no sandbox today" in failed["text"]


@pytest.mark.original("A-errors", "A-executor-exception")
def test_a_fault_of_a_provider_ends_one_rollout_with_evidence_and_not_the_run(run):
    code, events, _ = run(environment("Broken"))
    assert code == 1
    assert events[-1]["dropped"] == {"flow/raised:KeyError": 2}
    journal = (Path(events[0]["values"]["folder"]) / "journal" / "worker-0.jsonl").read_text()
    assert "Traceback" in journal


def test_rollouts_of_one_task_are_one_group(run):
    code, events, _ = run(("rollouts_per_task = 1", "rollouts_per_task = 2"))
    assert code == 0
    records = [
        json.loads(path.read_text())
        for path in (Path(events[0]["values"]["folder"]) / "rollouts").glob("*/provenance.json")
    ]
    assert len({record["rollout_id"] for record in records}) == 4
    groups = {(record["task_id"], record["group_id"]) for record in records}
    assert len(groups) == 2
    assert sorted(record["member"] for record in records) == [0, 0, 1, 1]
    assert events[-1]["rewards"] == {"weightcache-31": 1.0, "ratekeeper-40": 0.0}


@pytest.mark.original("A-executor-timeout")
@pytest.mark.parametrize(("stage", "drops"), [("generate", {2, 3, 4}), ("reward", {2})])
def test_a_stage_that_takes_too_long_is_a_counted_drop(run, stage, drops):
    """Of two tasks. What is no fault of the agent's is filled up once: grading, and a wait for a sandbox."""
    code, events, _ = run(("[worker]", f"[worker]\n{stage}_timeout_s = 0.05"))
    assert code == 1
    dropped = events[-1]["dropped"]
    assert dropped.keys() == {f"flow/{stage}_timeout"}
    assert dropped[f"flow/{stage}_timeout"] in drops
    assert f"worker.{stage}_timeout_s = 0.05 s" in str(events)


def test_a_test_command_that_does_not_exist_is_told_and_no_reward(run):
    code, events, _ = run(("python3 -m unittest", "pyton3 -m unittest"))
    assert code == 1
    assert events[-1]["dropped"] == {"grader/test_command": 1}
    assert events[-1]["rewards"]["weightcache-31"] is None


def test_an_engine_whose_answer_cannot_be_true_is_the_engines_fault(run):
    code, events, _ = run(('provider = "replay"', 'provider = "failing_providers:BadRecord"'))
    assert code == 1
    assert events[-1]["dropped"] == {"engine/record": 4}


def replace_turns(*turns):
    path = Path("recordings/weightcache-31.json")
    recording = json.loads(path.read_text())
    recording["rollouts"] = [{"turns": [{"text": text} for text in turns]}]
    path.write_text(json.dumps(recording))


def call(command):
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": {json.dumps(command)}}}}}\n</tool_call>'


SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def test_a_command_that_is_no_text_is_a_format_error_for_the_model(run):
    replace_turns(call(5), SUBMIT)
    code, events, _ = run()
    assert code == 0
    assert events[-1]["rewards"]["weightcache-31"] == 0.0


def test_an_agent_that_removes_its_repository_and_submits_is_evidence_and_not_a_drop(run):
    replace_turns(call('rm -rf "$PWD"; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'))
    code, events, _ = run()
    assert code == 0
    assert events[-1]["delivered"] == 2
    assert events[-1]["rewards"]["weightcache-31"] is None


def test_an_agent_without_a_working_directory_is_told_so_by_its_shell(run):
    replace_turns(call('rm -rf "$PWD"'), *[SUBMIT] * 7)
    code, events, _ = run()
    assert code == 0
    (ended,) = [e for e in events if e.get("event") == "rollout_delivered" and e["task"] == "weightcache-31"]
    assert ended["row"]["exit_status"] == "LimitsExceeded"
    messages = (
        Path(events[0]["values"]["folder"]) / "rollouts" / ended["rollout_id"] / "messages.json"
    ).read_text()
    assert "weightcache" in messages
    assert "not a folder" in messages or "No such file" in messages


def test_a_turn_that_is_cut_at_the_token_limit_goes_on(run):
    path = Path("recordings/weightcache-31.json")
    recording = json.loads(path.read_text())
    turns = recording["rollouts"][0]["turns"]
    cut = {"text": "Let me look at the whole", "finish_reason": "length"}
    recording["rollouts"] = [{"turns": [cut, *turns]}]
    path.write_text(json.dumps(recording))
    code, events, _ = run()
    assert code == 0
    assert events[-1]["rewards"]["weightcache-31"] == 1.0


def test_a_mistyped_test_name_is_the_rows_mistake_and_no_reward(run):
    rows = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
    for row in rows:
        row["FAIL_TO_PASS"][0] += "_typo"
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, events, _ = run()
    assert code == 1
    assert events[-1]["dropped"] == {"grader/no_such_test": 1}
    assert events[-1]["rewards"]["weightcache-31"] is None
    folder = Path(events[0]["values"]["folder"])
    dropped = [json.loads(p.read_text()) for p in folder.glob("rollouts/*/provenance.json")]
    assert "weightcache-31" in {record["task_id"] for record in dropped}, (
        "its files are there to be looked at"
    )
