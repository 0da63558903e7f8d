"""`regrade`: the patches that a run stored, graded again; nothing of the run is changed."""

import hashlib
import json
import shutil

import anyio
import pytest
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.regrade import regrade as regrade_run

GRADERS = """
import asyncio
import sys

from agent_flow.errors import GraderError, TaskRowError
from agent_flow.rollout import Verdict
from agent_flow.runtimes.command import CommandRuntime


class Down(CommandRuntime):
    async def grade(self, task, patch, environment):
        raise GraderError("judge_down", "the judge does not answer")


class Unreadable(CommandRuntime):
    async def grade(self, task, patch, environment):
        raise GraderError("unreadable", "no report", fault="agent")


class NoNumber(CommandRuntime):
    async def grade(self, task, patch, environment):
        return Verdict(reward=object(), log="")


class Odd(CommandRuntime):
    def environment(self, task):
        if task.instance_id == "weightcache-31":
            raise TaskRowError("the row has no image", where=task.where)
        return super().environment(task)

    async def grade(self, task, patch, environment):
        if task.instance_id == "verspec-52":
            return {}[task.instance_id]
        if task.instance_id == "layerconf-17":
            sys.exit(3)
        if task.instance_id == "globpath-8":
            raise asyncio.CancelledError
        return Verdict(reward=0.5, log="")
"""
REWARDS = {
    "spanset-14": 1.0,
    "weightcache-31": 1.0,
    "verspec-52": 1.0,
    "globpath-8": 0.0,
    "layerconf-17": 1.0,
}
NOT_GRADED = {"patchlet-23": "RepeatedFormatError", "ratekeeper-40": "LimitsExceeded"}


@pytest.fixture
def run_folder(quickstart, tmp_path):
    """A copy of the quickstart's run folder."""
    return shutil.copytree(quickstart.folder, tmp_path / "run")


@pytest.fixture
def regrade(run_folder, tmp_path, capfd, monkeypatch):
    """Calls the command on the run; returns exit code, rows and summary."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "graders_of_regrade.py").write_text(GRADERS)

    def call(*arguments):
        code = main(["regrade", str(run_folder), "--json", *map(str, arguments)])
        rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        return code, {row["task_id"]: row for row in rows[:-1]}, rows[-1]

    return call


@pytest.fixture
def other(example, tmp_path):
    """A configuration like the quickstart's with something replaced."""
    project = shutil.copytree(example, tmp_path / "other")

    def write(old, new, file="run.toml"):
        text = (project / file).read_text()
        assert old in text
        (project / file).write_text(text.replace(old, new))
        return project / "run.toml"

    return write


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.timeout(180)  # it may be the one that has to wait for the run
def test_the_same_grader_gives_the_same_rewards_and_changes_no_file(regrade, run_folder):
    before = digests(run_folder)
    code, rows, summary = regrade()
    assert code == 0
    graded = {name: row for name, row in rows.items() if row["state"] == "graded"}
    assert {name: row["new"] for name, row in graded.items()} == REWARDS
    assert {name: row["old"] for name, row in graded.items()} == REWARDS
    assert {name: row["why"] for name, row in rows.items() if row["state"] == "skipped"} == {
        name: f"{status} is not graded" for name, status in NOT_GRADED.items()
    }
    assert (summary["changed"], summary["error"]) == (0, 0)
    assert set(graded["globpath-8"]["tests"].values()) == {"passed", "failed"}
    after = digests(run_folder)
    assert after.pop("regraded.jsonl")
    assert after == before
    lines = (run_folder / "regraded.jsonl").read_text().splitlines()
    assert {row["task_id"]: row for row in map(json.loads, lines)} == rows


def test_a_mended_task_gives_another_reward(regrade, other, run_folder):
    """The row demanded a test that its own reference cannot pass; without it the patch is right."""
    _, rows, _ = regrade("--task", "globpath-8")
    failing = [test for test, state in rows["globpath-8"]["tests"].items() if state == "failed"]
    config = other('name = "quickstart"', 'name = "mended"')
    path = config.parent / "tasks.jsonl"
    tasks = [json.loads(line) for line in path.read_text().splitlines()]
    for task in tasks:
        for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
            task[column] = [test for test in task[column] if test not in failing]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks if task["FAIL_TO_PASS"]))
    code, rows, summary = regrade("--config", config, "--task", "globpath-8")
    row = rows["globpath-8"]
    assert (code, row["old"], row["new"]) == (0, 0.0, 1.0)
    assert summary["changed"] == 1
    assert summary["out"].endswith("regraded-2.jsonl"), "the earlier result is kept"


def test_a_grader_that_is_down_is_an_error_and_not_0(regrade, other):
    config = other('provider = "command"', 'provider = "graders_of_regrade:Down"')
    code, rows, summary = regrade("--config", config, "--task", "spanset-14", "--task", "globpath-8")
    assert code == 1
    assert (summary["error"], summary["graded"], summary["changed"]) == (2, 0, 0)
    for row in rows.values():
        assert row["new"] is None
        assert row["why"] == "grader/judge_down: the judge does not answer"


def test_a_patch_that_cannot_be_judged_has_no_reward(regrade, other):
    config = other('provider = "command"', 'provider = "graders_of_regrade:Unreadable"')
    code, rows, summary = regrade("--config", config, "--task", "spanset-14")
    assert (code, summary["ungraded"], summary["changed"]) == (0, 1, 1)
    assert rows["spanset-14"]["new"] is None


def test_a_task_that_is_gone_is_an_error(regrade, other):
    config = other('"instance_id": "spanset-14"', '"instance_id": "spanset-15"', file="tasks.jsonl")
    code, rows, _ = regrade("--config", config, "--task", "spanset-14")
    assert code == 1
    assert rows["spanset-14"]["why"] == "the configuration has no such task"


def test_for_people_it_prints_old_and_new(run_folder, capfd):
    assert main(["regrade", str(run_folder), "--task", "verspec-52"]) == 0
    said = capfd.readouterr().out
    assert "graded    verspec-52 " in said
    assert "1 -> 1" in said
    assert "1 graded, 0 ungraded, 0 error, 0 skipped; 0 changed" in said


def test_what_nobody_foresaw_costs_one_row_alone(regrade, other, run_folder):
    config = other('provider = "command"', 'provider = "graders_of_regrade:Odd"')
    patches = {path.parent.name: path for path in run_folder.glob("rollouts/*/patch.diff")}
    (spanset,) = [name for name in patches if _task_of(run_folder, name) == "spanset-14"]
    patches[spanset].unlink()
    patches[spanset].mkdir()
    code, rows, summary = regrade("--config", config)
    assert code == 1
    why = {name: row["why"] for name, row in rows.items() if row["state"] == "error"}
    assert why.pop("verspec-52").startswith("KeyError: 'verspec-52' (graders_of_regrade.py:")
    assert why.pop("layerconf-17").startswith("RuntimeError: SystemExit: 3 (graders_of_regrade.py:")
    assert why.pop("globpath-8").startswith("RuntimeError: CancelledError:  (graders_of_regrade.py:")
    assert "the row has no image" in why.pop("weightcache-31")
    assert "Is a directory" in why.pop("spanset-14")
    assert not why
    assert (summary["error"], summary["skipped"]) == (5, 2)
    lines = (run_folder / "regraded.jsonl").read_text().splitlines()
    assert {row["task_id"]: row for row in map(json.loads, lines)} == rows


def test_a_verdict_that_no_file_can_hold_is_an_error(regrade, other):
    config = other('provider = "command"', 'provider = "graders_of_regrade:NoNumber"')
    code, rows, summary = regrade("--config", config, "--task", "spanset-14")
    assert (code, summary["error"], rows["spanset-14"]["new"]) == (1, 1, None)
    assert rows["spanset-14"]["why"].startswith("TypeError: Encoding objects of type object is unsupported (")


def test_each_verdict_is_written_as_it_is_done(regrade, other, run_folder):
    file = load_config(other('provider = "command"', 'provider = "graders_of_regrade:Odd"'))
    seen = []

    def stop_at_the_third(row):
        lines = (run_folder / "regraded.jsonl").read_text().splitlines()
        seen.append(len(lines))
        assert json.loads(lines[-1])["rollout_id"] == row.rollout_id
        if len(seen) == 3:
            scopes[0].cancel()

    scopes = []

    async def call():
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await regrade_run(run_folder, file, tasks=(), clock=Clock(), listener=stop_at_the_third)
        assert scope.cancelled_caught

    anyio.run(call)
    assert seen == [1, 2, 3]
    assert len((run_folder / "regraded.jsonl").read_text().splitlines()) == 3


def _task_of(run_folder, rollout_id):
    return json.loads((run_folder / "rollouts" / rollout_id / "provenance.json").read_text())["task_id"]


def test_a_run_without_patches_is_said_before_an_environment_is_asked_for(own_agent):
    done = own_agent.run()
    again = own_agent.call("regrade", done.folder)
    assert again.code == 2
    assert "this run keeps no patches (its flow is " in again.stderr
    assert "run --replay RUN` of a run with --dump asks the reward function again" in again.stderr
    checked = own_agent.call("check-tasks", "run.toml")
    assert checked.code == 2
    assert "run.toml:" in checked.stderr
    assert "keeps no patches, so there are no tests to check and nothing to grade again" in checked.stderr
    own_agent.config(('provider = "my_flow:Guess"', 'provider = "plain"'), ("max_guesses = 4\n", ""))
    assert "flow 'plain' keeps no patches" in own_agent.call("check-tasks", "run.toml").stderr


def test_what_is_no_run_or_not_in_it_is_named(run_folder, tmp_path, capfd):
    assert main(["regrade", str(run_folder), "--task", "nowhere-1"]) == 2
    assert "the run has no rollout of 'nowhere-1'" in capfd.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run_folder / "run.toml", empty)
    for folder in (tmp_path / "nothing", empty, empty / "run.toml"):
        assert main(["regrade", str(folder)]) == 2
        said = capfd.readouterr().err
        assert f"{folder}: no run folder: it has no journal" in said
        assert "agent-flow regrade runs/NAME" in said
        assert "init" not in said
