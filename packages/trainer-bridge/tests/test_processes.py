"""Two real processes, real sockets, real files, kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_bridge.codec import decode_frames
from trainer_bridge.commands.audit import audit
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import segment_paths
from trainer_bridge.testing import differences, make_rollout

Spawn = Callable[..., subprocess.Popen[str]]
Receive = Callable[..., "Receiver"]


class Receiver:
    """`trainer-bridge receive --json --out OUT`; its lines go to a file, as nobody reads a pipe meanwhile."""

    def __init__(self, out: Path, lines: Path, bind: str, wait: Callable[..., None]) -> None:
        self._lines = lines
        self._errors = lines.with_suffix(".err")
        with lines.open("w") as stdout, self._errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "trainer_bridge",
                    "receive",
                    "--json",
                    "--bind",
                    bind,
                    "--out",
                    str(out),
                ],
                stdout=stdout,
                stderr=stderr,
            )
        wait(lambda: "\n" in self._lines.read_text())
        first = self.lines()[0]
        self.address = str(first["address"])
        assert first == {"event": "listening", "address": self.address, "pid": self.process.pid}

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._lines.read_text().splitlines()]

    def errors(self) -> str:
        return self._errors.read_text()

    def finish(self, number: int = signal.SIGTERM) -> list[dict[str, object]]:
        """End it in order; all its lines but the first."""
        self.process.send_signal(number)
        assert self.process.wait(40.0) == 0, self.errors()
        lines = self.lines()
        assert lines[-1]["event"] == "end"
        return lines[1:]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def spawn(processes: list[subprocess.Popen[str]], programs: Path) -> Spawn:
    def start(*argv: str | Path | int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(programs / "send.py"), *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    return start


@pytest.fixture
def receive(
    processes: list[subprocess.Popen[str]], tmp_path: Path, wait: Callable[..., None]
) -> Callable[..., Receiver]:
    def start(out: Path, bind: str = "tcp://127.0.0.1:0") -> Receiver:
        receiver = Receiver(out, tmp_path / f"receiver-{len(processes)}.jsonl", bind, wait)
        processes.append(receiver.process)  # type: ignore[arg-type]
        return receiver

    return start


def kill(process: subprocess.Popen[Any]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(40.0)


def stored(out: Path) -> list[int]:
    """Rollouts in a store, in order of arrival, each compared bit for bit with what was sent."""
    rollouts: list[int] = []
    for path in segment_paths(out / "samples"):
        segment, fault = Segment.scan(path, verify=True)
        assert not fault
        for record in segment.records():
            data = decode_frames(record.frames)
            n = int(data.rollout_id, 16)
            sent = make_rollout(n, parts=len(data.samples), tokens=len(data.samples[0]))
            assert [differences(a, b) for a, b in zip(sent, data.samples, strict=True)] == [[]] * len(sent)
            rollouts.append(n)
    return rollouts


def read_until(process: subprocess.Popen[str], number: int) -> int:
    """Read a sending program's lines up to a number (or its end); the last number read."""
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        if line.startswith("pending"):
            break
        last = int(line)
        if last >= number:
            break
    return last


def test_a_round_trip_is_exact(spawn: Spawn, receive: Receive, tmp_path: Path) -> None:
    receiver = receive(tmp_path)
    sender = spawn(receiver.address, 0, 30, "--parts", 2, "--tokens", 5000)
    out, err = sender.communicate(timeout=50)
    assert out.endswith("pending 0\n"), err
    lines = receiver.finish()
    assert [line["rollout_id"] for line in lines if line["event"] == "sample"] == [
        f"{n:032x}" for n in range(30) for _ in range(2)
    ]
    end = lines[-1]
    assert (end["rollouts"], end["samples"], end["committed"], end["duplicates"]) == (30, 60, 30, 0)
    assert stored(tmp_path) == list(range(30))


@pytest.mark.parametrize("deaths", [(60,), pytest.param((50, 150, 250), marks=pytest.mark.slow)])
def test_kill_9_of_the_receiver(
    spawn: Spawn, receive: Receive, tmp_path: Path, deaths: tuple[int, ...]
) -> None:
    receiver = receive(tmp_path / "out")
    sender = spawn(receiver.address, 0, 300, "--tokens", 1000)
    for stop_at in deaths:
        assert read_until(sender, stop_at) == stop_at
        kill(receiver.process)
        receiver = receive(tmp_path / "out", receiver.address)
    out, err = sender.communicate(timeout=50)
    assert out.endswith("pending 0\n"), err
    receiver.finish()
    assert stored(tmp_path / "out") == list(range(300))
    assert audit(tmp_path / "out", as_json=True) == 0


@pytest.mark.parametrize("deaths", [(60,), pytest.param((3, 90, 300), marks=pytest.mark.slow)])
def test_kill_9_of_the_sender(
    spawn: Spawn, receive: Receive, tmp_path: Path, deaths: tuple[int, ...]
) -> None:
    receiver = receive(tmp_path / "out")
    accepted = -1
    for stop_at in deaths:
        sender = spawn(receiver.address, accepted + 1, 1000, "--spool", tmp_path / "spool", "--tokens", 1000)
        accepted = read_until(sender, stop_at)
        assert accepted == stop_at
        kill(sender)
    last = spawn(receiver.address, accepted + 1, 5, "--spool", tmp_path / "spool")
    out, err = last.communicate(timeout=50)
    assert out.endswith("pending 0\n"), err
    end = receiver.finish()[-1]
    rollouts = stored(tmp_path / "out")
    assert len(rollouts) == len(set(rollouts)) == end["rollouts"]
    assert set(rollouts) >= set(range(accepted + 6))


def test_kill_9_of_both(spawn: Spawn, receive: Receive, tmp_path: Path) -> None:
    receiver = receive(tmp_path / "out")
    spool = ("--spool", tmp_path / "spool")
    sender = spawn(receiver.address, 0, 1000, *spool)
    accepted = read_until(sender, 120)
    kill(receiver.process)
    kill(sender)
    # The next life of the sender has nobody to send to; the one after it finds a receiver.
    lonely = spawn(receiver.address, accepted + 1, 10, *spool, "--drain", 0)
    out, err = lonely.communicate(timeout=50)
    assert "pending 0" not in out
    assert "are not acknowledged (committed); they lie in" in err
    receiver = receive(tmp_path / "out", receiver.address)
    last = spawn(receiver.address, accepted + 11, 1, *spool)
    out, err = last.communicate(timeout=50)
    assert out.endswith("pending 0\n"), err
    receiver.finish(signal.SIGINT)
    rollouts = stored(tmp_path / "out")
    assert len(rollouts) == len(set(rollouts))
    assert set(rollouts) >= set(range(accepted + 12))


def test_a_producer_that_dies_is_named_at_once(
    spawn: Spawn, receive: Receive, tmp_path: Path, wait: Callable[..., None]
) -> None:
    """NVIDIA-NeMo/RL#3488: the collector was dead, and the trainer polled an empty buffer for 3.7 hours."""
    receiver = receive(tmp_path / "out")
    sender = spawn(receiver.address, 0, 100_000)
    assert read_until(sender, 20) == 20
    kill(sender)
    wait(lambda: re.search(r"producer program \([0-9a-f]{8}\) lost", receiver.errors()) is not None)
    assert receiver.finish()[-1]["lost_producers"] == ["program"]


def test_a_step_is_committed_whole_or_not_at_all(tmp_path: Path, programs: Path) -> None:
    """kill -9 in a commit left half a group: no step took it any more, and it held its places for ever."""
    command = [sys.executable, str(programs / "killed_commit.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    assert held[-1] == 3 * 32
    assert [n for n in held if n % 32] == []
