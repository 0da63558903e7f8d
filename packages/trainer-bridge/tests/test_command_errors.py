"""What the command line says when something is not as it should be, and that it says it once."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from trainer_bridge import ErrorCode, ProtocolError, SampleSender
from trainer_bridge.cli import main
from trainer_bridge.receiver_events import KEPT, REPEAT_S, Refusals
from trainer_bridge.testing import make_sample

COMMAND = [sys.executable, "-m", "trainer_bridge"]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def spawn(*argv: object) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [*COMMAND, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return running[-1]

    yield spawn
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def first_word_after(process: subprocess.Popen[str], count: int) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[count]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "--seconds", "0"], "'0' is no span of time: give seconds, more than 0"),
        (["bench", "--seconds", "-1"], "'-1' is no span of time"),
        (["tail", "tcp://127.0.0.1:9", "--timeout", "nan"], "'nan' is no span of time"),
        (["replay", "x", "--to", "tcp://127.0.0.1:9", "--timeout", "inf"], "'inf' is no span of time"),
        (["tail", "tcp://127.0.0.1:9", "--count", "-1"], "'-1' is no count: give a whole number, 0 or more"),
        (["inspect", "x", "--limit", "many"], "'many' is no count"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--timeout nan` waited for ever, `--seconds 0` was a ZeroDivisionError."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert said in capsys.readouterr().err


def test_without_a_command_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "keygen" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"trainer-bridge {version('trainer-bridge')}\n"


@pytest.mark.parametrize("place", ["before", "after"])
def test_options_stand_before_or_after_the_command(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["keygen", str(tmp_path / "w")]
    assert main(["--json", *argv] if place == "before" else [*argv, "--json"]) == 0
    paths = json.loads(capsys.readouterr().out)
    modes = [stat.S_IMODE(Path(paths[half]).stat().st_mode) for half in ("public", "secret")]
    assert modes == [0o644, 0o600], "one is made to be shared"


def test_a_key_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "/"]) == 2
    assert capsys.readouterr().err == (
        "trainer-bridge keygen: / has no name that the key could take: give it one with --name\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [["receive"], ["keygen", "{}/w"]])
def test_a_full_disk_behind_stdout_is_one_line(command: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *(word.format(tmp_path) for word in command)],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=50,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1,
        f"trainer-bridge {command[0]}: the output cannot be written: No space left on device\n",
    )


def test_closed_outputs_are_no_fault(tmp_path: Path) -> None:
    """A daemon may be started without any: the first sockets would take their places."""
    script = f'"{sys.executable}" -m trainer_bridge keygen "{tmp_path}/w" >&- 2>&-'
    assert subprocess.run(["sh", "-c", script], timeout=50).returncode == 0
    assert (tmp_path / "w" / "w.pub").exists()


def test_bench_serve_speaks_to_people_and_says_how_to_connect(start: Start) -> None:
    process = start("bench", "--serve")
    assert process.stdout is not None
    first = process.stdout.readline()
    address = first.split()[2].rstrip(";")
    assert first == (
        f"listening on {address}; on this machine: trainer-bridge bench {address}; for others, --bind "
        "tcp://0.0.0.0:PORT and keys\n"
    )
    with SampleSender(address) as sender:
        sender.send(make_sample(1))
        sender.send(make_sample(2))
        assert sender.wait_settled(40.0)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=50)
        assert (out, err) == ("", "")
    wide = start("bench", "--serve", "--bind", "tcp://0.0.0.0:0", "--insecure")
    assert wide.stdout is not None
    said = wide.stdout.readline()
    assert f"on the other machine: trainer-bridge bench tcp://{os.uname().nodename}:" in said


def test_receive_names_who_was_refused_once(start: Start) -> None:
    """32 lines of "a message was refused" said nothing of whose they were."""
    import zmq

    process = start("receive")
    address = first_word_after(process, 2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        for number in range(32):
            dealer.send(b"no head, number %d" % number)
        for _ in range(33):  # an ERROR for each, and for the quarantine
            assert dealer.poll(10_000)
            dealer.recv_multipart()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=50)
    lines = [line for line in err.splitlines() if "refused" in line or "quarantine" in line]
    assert 2 <= len(lines) <= 3, lines
    for line in lines:
        assert " connection 00" in line, "whose they were"
        assert "(without a session)" in line


def test_refusals_are_told_at_once_and_then_as_a_number() -> None:
    refusals = Refusals()
    damaged = ProtocolError(ErrorCode.BAD_HEAD_HASH, "says 1, is 2")
    refusals.add("producer w1 (ab12cd34)", damaged)
    assert [e.text for e in refusals.take(0.0)] == [
        "a message of producer w1 (ab12cd34) was refused: bad_head_hash: says 1, is 2"
    ]
    for _ in range(31):
        refusals.add("producer w1 (ab12cd34)", damaged)
    refusals.add("producer w2 (00000000)", damaged)
    assert [e.text.split(" was")[0] for e in refusals.take(1.0)] == ["a message of producer w2 (00000000)"]
    (told,) = refusals.take(REPEAT_S)
    assert told.text.startswith("31 messages of producer w1 (ab12cd34) were refused, the last: bad_head_hash")
    assert refusals.take(3 * REPEAT_S) == []
    for number in range(1000):
        refusals.add(f"connection {number}", damaged)
    told_of = refusals.take(4 * REPEAT_S)
    assert len(told_of) == KEPT + 1, "peers choose their names: there is an end"
    assert told_of[-1].text.startswith(f"{1000 - KEPT} messages of others were refused")
