"""The command line as users run it: real processes, their exit codes and what they print."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from trainer_bridge import (
    ReceiverConfig,
    SampleObserver,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    Timing,
)
from trainer_bridge.cli import main
from trainer_bridge.commands.gauge import Gauge
from trainer_bridge.commands.replay import replay
from trainer_bridge.segment_log import segment_paths
from trainer_bridge.testing import make_rollout, make_sample

COMMAND = [sys.executable, "-m", "trainer_bridge"]
Start = Callable[..., subprocess.Popen[str]]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def spawn(*argv: object, stdout: int | IO[Any] = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *map(str, argv)], stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield spawn
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; its exit code and what it prints."""

    def command(*argv: object) -> tuple[int, str, str]:
        return main([str(each) for each in argv]), *capsys.readouterr()

    return command


@pytest.fixture
def fails(run: Run) -> Callable[..., str]:
    """Runs a command that cannot start; its one line of error."""

    def command(*argv: object) -> str:
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1, err
        return err

    return command


def listening(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert (first["event"], first["pid"]) == ("listening", process.pid)
    return str(first["address"])


def end(process: subprocess.Popen[str], number: int) -> list[str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_receive_ends_with_the_counts(start: Start, number: int) -> None:
    process = start("receive", "--json")
    with SampleSender(listening(process), producer="w1") as sender:
        sender.send([*make_rollout(1, parts=2), make_sample(2)])
        assert sender.wait_settled(40.0)
    lines = [json.loads(line) for line in end(process, number)]
    assert [(e["event"], e.get("rollout_id"), e.get("part"), e.get("parts")) for e in lines] == [
        ("sample", f"{1:032x}", 0, 2),
        ("sample", f"{1:032x}", 1, 2),
        ("sample", f"{2:032x}", 0, 1),
        ("end", None, None, None),
    ]
    sample = make_sample(2)
    assert {k: lines[2][k] for k in ("producer", "task_id", "tokens", "trained_tokens", "status")} == {
        "producer": "w1", "task_id": "task-2", "tokens": 64, "trained_tokens": sample.trained_tokens,
        "status": "completed",
    }  # fmt: skip
    assert (lines[-1]["rollouts"], lines[-1]["samples"], lines[-1]["committed"]) == (2, 3, 2)


def test_receive_for_people(start: Start) -> None:
    process = start("receive")
    assert process.stdout is not None
    address = process.stdout.readline().split()[2]
    header = process.stdout.readline()
    with SampleSender(address, producer="w1") as sender:
        sender.send(make_sample(1))
        assert sender.wait_settled(40.0)
        producer = sender.stats().producer
    sample, counts = end(process, signal.SIGINT)
    assert header.split()[:3] == ["time", "producer", "task"]
    assert sample.split()[1:6] == [producer[:8], "task-1", "000000000000", "1/1", "64"]
    assert counts.startswith("1 rollouts, 1 samples, 64 tokens; 1 committed")


def test_bad_starts_say_what_where_and_what_to_do(tmp_path: Path, fails: Callable[..., str]) -> None:
    with SampleReceiver() as receiver:
        said = fails("receive", "--bind", receiver.address)
        assert said == f"trainer-bridge receive: {receiver.address} is in use: " + (
            "stop the program that listens there, or give another port (0: any free)\n"
        )
    assert "write tcp://HOST:PORT" in fails("receive", "--bind", "localhost:5000")
    assert "insecure=True (--insecure)" in fails("receive", "--bind", "tcp://0.0.0.0:0")
    (tmp_path / "file").write_text("")
    assert "choose a folder that can be written to" in fails("receive", "--out", tmp_path / "file" / "x")
    nobody = "tcp://127.0.0.1:1"
    assert f"no trainer-bridge receiver has answered at {nobody}" in fails("tail", nobody, "--timeout", 0.3)
    assert "holds no segments" in fails("audit", tmp_path)
    assert "holds no segments" in fails("replay", tmp_path, "--to", nobody)


def test_debug_shows_the_traceback() -> None:
    done = subprocess.run(
        [*COMMAND, "receive", "--debug", "--bind", "nowhere"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_tail_looks_on_and_takes_nothing(start: Start) -> None:
    with SampleReceiver() as receiver:
        process = start("tail", receiver.address, "--json", "--count", 3)
        wait_for_observer(receiver)
        with SampleSender(receiver.address) as sender:
            sender.send([make_sample(1), *make_rollout(2, parts=2), make_sample(3)])
            out, _ = process.communicate(timeout=50)
            assert process.returncode == 0
            events = [e for e in map(json.loads, out.splitlines()) if e["event"] != "status"]
            assert [e.get("task_id") for e in events] == ["task-1", "task-2", "task-2", None]
            assert events[-1] == {"event": "end", "rollouts": 2, "samples": 3, "reason": "count"}
            assert sender.stats().acknowledged == 0
            assert receiver.stats().queued == 3
            for _ in range(3):
                lease = receiver.next(40.0)
                assert lease is not None
                lease.commit()


def wait_for_observer(receiver: SampleReceiver, count: int = 1) -> None:
    import threading

    pause = threading.Event()
    for _ in range(1000):
        if receiver.stats().observers == count:
            return
        pause.wait(0.01)
    raise AssertionError("no observer came")


def test_tail_killed_9_leaves_the_receiver_unharmed(start: Start) -> None:
    with SampleReceiver() as receiver, SampleSender(receiver.address) as sender:
        process = start("tail", receiver.address)
        wait_for_observer(receiver)
        process.kill()
        process.wait()
        for n in range(200):
            sender.send(make_sample(n, tokens=2000))
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
        assert sender.wait_settled(40.0)
        wait_for_observer(receiver, 0)


def test_tail_ends_when_the_receiver_does(start: Start) -> None:
    with SampleReceiver() as receiver:
        process = start("tail", receiver.address)
        wait_for_observer(receiver)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "saw 0 samples of 0 rollouts (the receiver closed)"


def test_tail_is_a_live_table_on_a_terminal(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    with SampleReceiver() as receiver:
        monkeypatch.setenv("COLUMNS", "120")
        process = start("tail", receiver.address, stdout=theirs)
        os.close(theirs)
        wait_for_observer(receiver)
        with SampleSender(receiver.address) as sender:
            sender.send(make_sample(1))
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        shown += chunk
    os.close(ours)
    assert process.wait(5) == 0
    text = shown.decode()
    assert "1 samples seen" in text
    assert "credit" in text
    assert "task-1" in text
    assert "completed" in text


def test_audit_and_replay(tmp_path: Path, start: Start, run: Run) -> None:
    with SampleReceiver(out=tmp_path) as receiver, SampleSender(receiver.address) as sender:
        sender.send([*make_rollout(1, parts=2), make_sample(2)])
        for _ in range(2):
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
    code, out, _ = run("audit", tmp_path)
    assert code == 0
    assert out.startswith("2 records, 2 rollouts, 3 samples, 192 tokens in store ")
    process = start("receive", "--json")
    address = listening(process)
    for new, known in ((2, 0), (0, 2)):  # again: the receiver drops what it has, and says so
        code, out, err = run("replay", tmp_path, "--to", address)
        said = f"the receiver says: {new} rollouts were new, {known} were here already"
        assert (code, out) == (0, f"sent 2 rollouts, 2 acknowledged; {said}\n"), err
    last = json.loads(end(process, signal.SIGTERM)[-1])
    assert (last["rollouts"], last["samples"], last["duplicates"]) == (2, 3, 2)
    (path,) = segment_paths(tmp_path / "samples")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, out, _ = run("audit", path, "--json")
    assert code == 1
    assert "record 2 at byte" in json.loads(out)["faults"][0]


def test_replayed_groups_are_groups(tmp_path: Path, run: Run) -> None:
    with SampleReceiver(out=tmp_path) as receiver, SampleSender(receiver.address) as sender:
        sender.send_group([make_rollout(n, group=1)[0] for n in range(2)])
        batch = receiver.next_batch(groups=1, deadline_s=40.0)
        assert batch is not None
        batch.commit()
    with SampleReceiver(config=ReceiverConfig(commit_on="checkpoint")) as receiver:
        _, out, _ = run("replay", tmp_path, "--to", receiver.address, "--timeout", 0.2, "--json")
        assert json.loads(out)["receiver"] == "2 rollouts were new, 0 were here already"
        batch = receiver.next_batch(groups=1, deadline_s=40.0)
        assert batch is not None
        assert len(batch.rollouts) == 2


def test_replay_gives_up_on_a_receiver_whose_consumer_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with SampleReceiver(out=tmp_path) as receiver, SampleSender(receiver.address) as sender:
        sender.send([make_sample(n, tokens=8) for n in range(30)])
        for _ in range(30):
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
    few = SenderConfig(max_unsettled=10)
    monkeypatch.setattr("trainer_bridge.commands.replay.SenderConfig", lambda **_: few)
    with SampleReceiver() as receiver:
        code = replay(tmp_path, receiver.address, as_json=False, timeout_s=0.2, insecure=False, keys=None)
        out, err = capsys.readouterr()
        assert (code, out.split(";")[0]) == (1, "sent 10 rollouts, 0 acknowledged")
        assert "record 11: the receiver made no room for 0.2 s" in err
        assert receiver.stats().messages == 10


def test_replay_to_nobody_advises_what_replay_can_do(tmp_path: Path, fails: Callable[..., str]) -> None:
    with SampleReceiver(out=tmp_path) as receiver, SampleSender(receiver.address) as sender:
        sender.send(make_sample(1))
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
        address = receiver.address
    text = fails("replay", tmp_path, "--to", address, "--timeout", "0.2")
    assert "start one (`trainer-bridge receive --bind ...`) and replay again" in text
    assert "spool" not in text


def test_an_idle_receive_ends_when_its_parent_is_gone(start: Start) -> None:
    """agent-flow killed by -9 leaves no receiver behind."""
    process = start("receive", "--json")
    address = listening(process)
    with SampleSender(address):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        assert process.wait(40.0) == 1
    process.stdout = process.stderr = None


def test_a_reader_that_goes_away_ends_receive_quietly(start: Start) -> None:
    process = start("receive", "--json")
    address = listening(process)
    assert process.stdout is not None
    process.stdout.close()
    with SampleSender(address) as sender:
        sender.send(make_sample(1))
        assert process.wait(40.0) == 1
        sender.close(drain_s=0.0)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_bench_measures_this_machine(run: Run) -> None:
    code, out, err = run("bench", "--seconds", 0.05, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [row["tokens"] for row in found["rows"]] == [4096, 32768]
    for row in found["rows"]:
        assert row["nbytes"] == row["tokens"] * 13
        assert row["mb_per_s"] == pytest.approx(row["per_s"] * row["nbytes"] / 1e6)
        assert 0 < row["ack_ms"] <= row["ack_p99_ms"]
        assert row["sender_us"] > 0
        assert row["receiver_us"] > 0


def test_bench_feeds_no_trainer(run: Run) -> None:
    with SampleReceiver() as receiver:
        code, _, err = run("bench", receiver.address)
        assert code == 2
        assert "made-up samples would go to a trainer" in err
        assert receiver.stats().messages == 0


@pytest.mark.slow
def test_bench_of_a_link(start: Start) -> None:
    other = start("bench", "--serve", "--json")
    assert other.stdout is not None
    address = json.loads(other.stdout.readline())["address"]
    process = start("bench", address, "--seconds", 0.05)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["tokens", "bytes", "samples/s", "MB/s"]
    assert [line.split()[0] for line in lines[1:3]] == ["4096", "32768"]
    assert [line.split()[5] for line in lines[1:3]] == ["-", "-"], "its CPU is not seen from here"
    assert end(other, signal.SIGTERM)[0].startswith('{"event":"mark","samples":')


def test_tail_shows_rates_lags_credits_and_drops(wait: Callable[..., None]) -> None:
    config = ReceiverConfig(timing=Timing(heartbeat_s=0.1), max_nacks=0, queue_messages=10)
    with (
        SampleReceiver(config=config) as receiver,
        SampleSender(receiver.address, producer="w1\x1b[2J") as sender,
    ):
        for n in range(3):
            sender.send(make_rollout(n, parts=2))
        wait(lambda: receiver.stats().queued == 3)  # else the observer may get copies of these too
        lease = receiver.next(40.0)
        assert lease is not None
        lease.nack("no use")
        gauge = Gauge()
        with SampleObserver(receiver.address, timing=Timing(heartbeat_s=0.1)) as observer:
            for now_s in (1.0, 3.0):
                sender.send(make_rollout(int(now_s) + 10))
                seen = observer.next(40.0)
                assert seen is not None
                gauge.take_copy(seen, seen.created_ns + 250_000_000)
                known = observer.status
                while observer.status is known:
                    assert observer.next(0.05) is None
                assert observer.status is not None
                assert gauge.take_status(observer.status, now_s)
                assert not gauge.take_status(observer.status, now_s)
        sender.close(drain_s=0.0)
    found = gauge.event()
    assert found["samples_per_s"] == pytest.approx(0.5)
    assert found["metrics"]["rollouts_received_total"] == 5  # type: ignore[index]
    (producer,) = found["producers"]  # type: ignore[misc]
    assert {k: producer[k] for k in ("presence", "queued", "credit", "lag_s")} == {
        "presence": "connected",
        "queued": 4,
        "credit": 6,
        "lag_s": 0.25,
    }
    lines = gauge.lines()
    assert lines[0].startswith("in 0.5 samples/s, ")
    assert "queued 4, leased 0" in lines[1]
    assert "dropped 1 (nacked 1)" in lines[1]
    assert gauge.producer_rows()[0][:3] == ("w1?[2J", seen.producer[:8], "connected"), "samples show the id"
