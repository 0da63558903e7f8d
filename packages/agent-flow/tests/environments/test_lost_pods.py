"""Whole runs whose pods do not come up, or are lost while a command runs: counted, never a reward of 0."""

import json
import os
import re

import pytest
from agent_flow.journal import read_ledger
from agent_flow.outcome import ERRORS

pytestmark = pytest.mark.timeout(300)


def call(command):
    made = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"Next.\n<tool_call>\n{made}\n</tool_call>"


FIX, SUBMIT = call("sed -i s/41/42/ answer.py"), call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SECONDS = f"61.{os.getpid()}"
HANG = call(f"sleep {SECONDS}")
HANGING_TESTS = call(f"printf 'import os\\nos.system(\"sleep {SECONDS}\")\\n' > answer.py")


@pytest.fixture
def run(scripted_run, why_not, request, tmp_path, monkeypatch):
    """Runs one task in pods of the fake cluster."""
    if why := why_not("fake"):
        pytest.skip(why)
    fake = request.getfixturevalue("fake")
    environment = {
        "provider": "scripted:Doomed", "injection": "image_volume", "kubeconfig": str(fake.kubeconfig),
        "run": f"af-{os.urandom(6).hex()}", "run_key_file": str(tmp_path / "key"),
        "image": "example.com/any:1", "tools_image": "example.com/tools:1", "cpu": 0.3, "memory_mib": 256,
        "failing_timeout_s": 1.0,
    }  # fmt: skip

    def call(turns, **doom):
        for name, value in {"cluster": fake, "seconds": SECONDS, **doom}.items():
            monkeypatch.setattr(scripted_run.providers.Doomed, name, value)
        scripted_run.task("demo", turns)
        return scripted_run.run(environment=environment)

    return call


def check(done, reason, fault, *, attempts, started):
    """It is a counted drop, and what is tried again is what the table says."""
    assert done.code == 1, done.stderr
    summary = done.summary
    ((said, count),) = summary["dropped"].items()
    assert (re.fullmatch(reason, said) is not None, count) == (True, started), done.stdout
    assert (summary["started"], summary["delivered"], summary["samples"]) == (started, 0, 0)
    assert summary["rewards"] == {"demo": None}
    assert read_ledger(done.folder / "journal").balanced
    again = [event for event in done.events if event.get("event") == "attempt_failed"]
    assert len(again) == (attempts - 1) * started
    rows = [event["row"] for event in done.events if event.get("event") == "rollout_dropped"]
    assert {(row["fault"], row["reward"]) for row in rows} == {(fault, None)}
    boundary = reason.partition("/")[0]
    row = next(row for row in ERRORS if row.ends == boundary and row.fault in (fault, "*"))
    assert (row.retry or attempts == 1, row.refill) == (True, started == 2)


@pytest.mark.original("A-generate-start-error", "A-executor-failure-zero")
@pytest.mark.parametrize("purpose", ["agent", "grader"])
@pytest.mark.parametrize(
    ("cause", "reason", "fault"),
    [
        ("image-not-found", "environment/image_not_found", "image"),
        ("oom-at-start", "environment/oom_at_start", "task"),
    ],
)
def test_a_pod_that_never_comes_up(run, purpose, cause, reason, fault):
    done = run([FIX, SUBMIT], dooms={purpose: cause})
    check(done, reason, fault, attempts=1, started=1)


@pytest.mark.original("A-executor-failure-zero")
@pytest.mark.slow
@pytest.mark.parametrize("turns", [[HANG], [HANGING_TESTS, SUBMIT]], ids=["agent", "grader"])
@pytest.mark.parametrize(
    ("killed", "reason", "fault", "often"),
    [
        ("OOMKilled", "environment/oom_at_(start|run)", "task", 1),
        ("Evicted", "environment/evicted_storage_limit", "task", 1),
        ("drained", "environment/drained", "infra", 2),
    ],
)
def test_a_pod_that_is_lost_while_a_command_runs(run, turns, killed, reason, fault, often):
    """No memory, no disk; and its node is drained, which another node mends."""
    done = run(turns, killed=killed)
    check(done, reason, fault, attempts=often, started=often)
