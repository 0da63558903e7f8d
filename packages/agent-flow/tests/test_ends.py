"""How a run ends when something is cut: an interrupt, a trainer that dies, a trainer of one's own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_flow.journal import read_ledger

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart"


@contextmanager
def running(*command, cwd, env=None):
    """A process whose stdout is read line by line; killed at the end if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait(30)


def wait_for(process, wanted):
    """Events up to and including the first of a kind."""
    seen = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1].get("event") == wanted:
            return seen
    raise AssertionError(f"{wanted} never came: {process.stderr.read()}")


def processes_naming(text):
    """Command lines of living processes that mention a path."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:  # it ended while we looked
            continue
        if text in line and "pytest" not in line:
            found.append(line)
    return found


def small(folder, *lines, tasks=3):
    """A configuration with the first few tasks of the quickstart, and lines of its own."""
    text = (EXAMPLE / "run.toml").read_text()
    for name in ("qwen3.jinja", "recordings", "repos"):
        text = text.replace(f'"{name}"', f'"{EXAMPLE / name}"')
    rows = (EXAMPLE / "tasks.jsonl").read_text().splitlines(keepends=True)
    (folder / "tasks.jsonl").write_text("".join(rows[:tasks]))
    (folder / "run.toml").write_text("\n".join([text, *lines]) + "\n")
    return folder / "run.toml"


SHORT_DRAIN = ("[trainer]", "drain_s = 1.0")


@pytest.fixture
def scratch():
    """A temporary folder with a short path, so that sandboxes live below it."""
    with tempfile.TemporaryDirectory(prefix="aft-") as folder:
        yield Path(folder)


@pytest.mark.original("A-raised", "A-one-end")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_and_the_journal_says_what_was_cut(tmp_path, scratch, number):
    env = {"TMPDIR": str(scratch)}
    with running("agent_flow", "run", small(tmp_path), "--json", cwd=tmp_path, env=env) as process:
        seen = wait_for(process, "turn")
        process.send_signal(number)
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(30) == 130, process.stderr.read()
        assert "Traceback" not in process.stderr.read()
    folder = Path(seen[0]["values"]["folder"])
    ledger = read_ledger(folder / "journal")
    assert ledger.balanced
    assert ledger.live == 0
    assert ledger.dropped.get("flow/interrupted", 0) >= 1
    assert rest[-1]["dropped"] == dict(ledger.dropped)
    assert list(scratch.iterdir()) == []
    assert processes_naming(str(scratch)) == []
    assert processes_naming(str(folder)) == []


def test_a_trainer_that_already_runs_gets_the_samples(cli, tmp_path):
    with running(
        "trainer_bridge",
        "receive",
        "--bind",
        "tcp://127.0.0.1:0",
        "--json",
        "--out",
        tmp_path / "out",
        cwd=tmp_path,
    ) as trainer:
        address = wait_for(trainer, "listening")[0]["address"]
        run = cli("run", small(tmp_path), "--trainer", address, "--json", cwd=tmp_path)
        assert run.code == 0, run.stderr
        trainer.send_signal(signal.SIGTERM)
        got = [json.loads(line) for line in trainer.stdout]
    samples = [event for event in got if event["event"] == "sample"]
    assert len({event["rollout_id"] for event in samples}) == run.summary["received_by_trainer"] == 3
    assert not (run.folder / "trainer").exists()


def test_a_trainer_killed_in_mid_run_loses_nothing(tmp_path):
    """The run says what was not received and where it lies; a replay brings it to the next trainer."""
    config = small(tmp_path, *SHORT_DRAIN)
    with running(
        "trainer_bridge", "receive", "--bind", "tcp://127.0.0.1:0", "--json", cwd=tmp_path
    ) as trainer:
        address = wait_for(trainer, "listening")[0]["address"]
        with running("agent_flow", "run", config, "--trainer", address, "--json", cwd=tmp_path) as process:
            seen = wait_for(process, "rollout_delivered")
            trainer.kill()
            rest = [json.loads(line) for line in process.stdout]
            said = process.stderr.read()
            assert process.wait(60) == 1
    folder = Path(seen[0]["values"]["folder"])
    assert "were not acknowledged" in said
    assert str(folder / "samples") in said
    assert "trainer-bridge replay" in said
    assert rest[-1]["delivered"] == 3, "the sender took them all"
    assert rest[-1]["received_by_trainer"] < 3
    with running(
        "trainer_bridge", "receive", "--bind", "tcp://127.0.0.1:0", "--json", cwd=tmp_path
    ) as second:
        address = wait_for(second, "listening")[0]["address"]
        replay = subprocess.run(
            [sys.executable, "-m", "trainer_bridge", "replay", str(folder / "samples"), "--to", address],
            capture_output=True,
            text=True,
            check=False,
        )
        assert replay.returncode == 0, replay.stderr
        second.send_signal(signal.SIGTERM)
        got = {event["rollout_id"] for event in map(json.loads, second.stdout) if event["event"] == "sample"}
    assert len(got) == 3


def test_the_runs_own_trainer_killed_in_mid_run_is_told(tmp_path):
    config = small(tmp_path, *SHORT_DRAIN)
    with running("agent_flow", "run", config, "--json", cwd=tmp_path) as process:
        seen = wait_for(process, "rollout_delivered")
        folder = Path(seen[0]["values"]["folder"])
        for folder_name in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder_name / "cmdline").read_bytes()
            except OSError:  # it ended while we looked
                continue
            if b"trainer_bridge" in line and str(folder).encode() in line:
                os.kill(int(folder_name.name), signal.SIGKILL)
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(60) == 1
        said = process.stderr.read()
    assert any("the trainer process ended by itself" in event.get("text", "") for event in rest)
    assert "trainer-bridge replay" in said


def test_a_temporary_folder_with_a_long_path_is_no_obstacle(cli, tmp_path):
    """Batch systems give every job a deep TMPDIR; unix sockets have about 100 bytes for their path."""
    deep = tmp_path / ("a-job-of-a-batch-system-" * 4)
    deep.mkdir()
    done = cli("run", small(tmp_path, tasks=1), "--json", cwd=tmp_path, env={"TMPDIR": str(deep)})
    assert done.code == 0, done.stderr


def test_a_reader_that_goes_away_does_not_cut_the_rollouts(tmp_path):
    """`agent-flow run ... --json | head -1`"""
    with running("agent_flow", "run", small(tmp_path), "--json", cwd=tmp_path) as process:
        first = json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    ledger = read_ledger(Path(first["values"]["folder"]) / "journal")
    assert (ledger.started, ledger.delivered) == (3, 3)


def test_a_second_interrupt_does_not_tear_the_clean_up(tmp_path, scratch):
    env = {"TMPDIR": str(scratch)}
    with running("agent_flow", "run", small(tmp_path), "--json", cwd=tmp_path, env=env) as process:
        seen = wait_for(process, "turn")
        process.send_signal(signal.SIGINT)
        seen += wait_for(process, "warning")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(30) == 130
        assert process.stderr.read() == ""
    assert rest[-1]["started"] == rest[-1]["delivered"] + sum(rest[-1]["dropped"].values())
    assert list(scratch.iterdir()) == []
    assert processes_naming(seen[0]["values"]["folder"]) == []


@pytest.mark.parametrize("when", ["connecting", "draining"])
def test_an_interrupt_is_never_behind_a_wait_for_the_trainer(tmp_path, when):
    """Nobody answers, or nobody acknowledges: both waits are long, and end at once with the interrupt."""
    config = small(tmp_path, "[trainer]", "drain_s = 600", "connect_timeout_s = 600")
    with running(
        "trainer_bridge", "receive", "--bind", "tcp://127.0.0.1:0", "--json", cwd=tmp_path
    ) as trainer:
        address = wait_for(trainer, "listening")[0]["address"]
        if when == "connecting":
            trainer.kill()
            trainer.wait(30)
        with running("agent_flow", "run", config, "--trainer", address, "--json", cwd=tmp_path) as process:
            if when == "draining":
                seen = wait_for(process, "rollout_delivered")
                trainer.kill()
                delivered = 1
                while delivered < 3:
                    delivered += len(wait_for(process, "rollout_delivered")) > 0
                assert seen
            else:
                wait_for_connection_attempt(process)
            process.send_signal(signal.SIGINT)
            rest = [json.loads(line) for line in process.stdout]
            assert process.wait(50) == 130, process.stderr.read()
    assert rest[-1]["received_by_trainer"] < 3


def wait_for_connection_attempt(process):
    """Until the process has set itself up: the spool's folder is made just before it connects."""
    runs = Path(f"/proc/{process.pid}/cwd").resolve() / "runs"
    while not list(runs.glob("*/samples/producer.json")):
        assert process.poll() is None, process.stderr.read()
