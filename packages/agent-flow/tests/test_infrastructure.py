"""What fails around a grader or a disk, in whole runs: counted under its reason, and never a reward of 0."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from agent_flow.journal import read_ledger


def call(command):
    made = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"Next.\n<tool_call>\n{made}\n</tool_call>"


DONE = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def answer(code):
    """A patch after which the tests run this line first."""
    return call(f"echo '{code}' > answer.py")


@pytest.mark.original("A-errors")
@pytest.mark.parametrize(
    ("code", "runtime", "reason"),
    [
        ("while True: pass", {"timeout_s": 1.0}, "grader/timeout"),
        ("import os; os._exit(0)", {}, "grader/unreadable"),
    ],
)
def test_a_log_that_says_nothing_is_evidence(scripted_run, code, runtime, reason):
    scripted_run.task("demo", [answer(code), DONE])
    done = scripted_run.run(runtime=scripted_run.config["runtime"] | runtime)
    assert done.code == 0, done.stderr
    summary = done.summary
    assert summary["ungraded"] == {reason: 1}
    assert (summary["delivered"], summary["dropped"], summary["rewards"]) == (1, {}, {"demo": None})


@pytest.mark.original("A-reward-infrastructure")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "grader/killed"),
        ('open("/dev/full", "w", buffering=1).write("x\\n")', "grader/unreadable"),
    ],
)
def test_a_grader_whose_machine_fails_is_tried_again_and_then_a_counted_drop(scripted_run, code, reason):
    """Killed for its memory, or no space on its disk."""
    scripted_run.task("demo", [answer(code), DONE])
    done = scripted_run.run()
    assert done.code == 1
    summary = done.summary
    assert summary["dropped"] == {reason: 2}, "and it was refilled once"
    assert (summary["delivered"], summary["ungraded"], summary["rewards"]) == (0, {}, {"demo": None})
    again = [event["text"] for event in done.events if event.get("event") == "attempt_failed"]
    assert len(again) == 2
    assert read_ledger(done.folder / "journal").balanced


SMALL_DISK = """
mount -t tmpfs -o size=24m none "$1"
shift
exec "$@"
"""


@pytest.fixture
def on_a_small_disk(scripted_run):
    """Runs the command where a folder has a disk of its own, of 24 MiB."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", SMALL_DISK, "disk"]
    folder = Path(tempfile.mkdtemp(prefix="afd"))  # short, as unix sockets lie below it
    tried = subprocess.run([*unshare, folder, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        folder.rmdir()
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")

    def run(environment, **sections):
        command = [sys.executable, "-m", "agent_flow", "run", scripted_run.file(**sections), "--json"]
        done = subprocess.run(
            [*unshare, folder, *command],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    run.folder = str(folder)
    yield run
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sandboxes_whose_disk_is_full(scripted_run, on_a_small_disk):
    scripted_run.task("demo", [answer("ANSWER = 42"), f"!fill {on_a_small_disk.folder}", DONE])
    code, events, said = on_a_small_disk({"TMPDIR": on_a_small_disk.folder})
    assert code == 1, said
    assert "Traceback" not in said
    summary = events[-1]
    assert summary["dropped"] == {"environment/no_space": 2}, events
    assert (summary["delivered"], summary["rewards"]) == (0, {"demo": None})
    dropped = [event for event in events if event.get("event") == "rollout_dropped"]
    again = [event for event in events if event.get("event") == "attempt_failed"]
    assert len(dropped) == len(again) == 2
    assert {(event["row"]["fault"], "No space left" in event["text"]) for event in dropped} == {
        ("infra", True)
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_own_disk_is_full(scripted_run, on_a_small_disk):
    scripted_run.task("demo", [answer("ANSWER = 42"), f"!fill {on_a_small_disk.folder}", DONE])
    code, events, said = on_a_small_disk({}, run_dir=on_a_small_disk.folder)
    assert code == 1, said
    assert "Traceback" not in said
    assert "no index.html: [Errno 28] No space left on device" in said
    summary = events[-1]
    assert summary["dropped"] == {"delivery/refused": 1}, events
    assert (summary["delivered"], summary["rewards"]) == (0, {"demo": None})
