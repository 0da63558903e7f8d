"""A trainer that is killed -9 goes on from its latest or an older checkpoint: nothing lost, nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer_bridge import BridgeError, ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.testing import make_rollout

ROLLOUTS = 60


class Trainer:
    """`tests/programs/train.py`, and what it says."""

    def __init__(
        self, programs: Path, folder: Path, *more: str | Path, bind: str = "tcp://127.0.0.1:0"
    ) -> None:
        command = [sys.executable, str(programs / "train.py"), bind, str(folder), "--rollouts", str(ROLLOUTS)]
        self.process = subprocess.Popen(
            [*command, *map(str, more)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self, steps: int) -> None:
        """Let it take so many steps."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n" * steps)
        self.process.stdin.flush()

    def kill_after(self, steps: int, *, more: int = 0) -> None:
        """Kill it after so many steps, somewhere in the next `more`."""
        self.go(steps + more)
        for _ in range(steps):
            assert self.line()
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            pass


@pytest.fixture
def train(programs: Path, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    running: list[Trainer] = []

    def start(*more: str | Path, **options: str) -> Trainer:
        running.append(Trainer(programs, tmp_path, *more, **options))
        return running[-1]

    yield start
    for trainer in running:
        trainer.kill()


def send_all(address: str, spool: Path, config: SenderConfig) -> SampleSender:
    sender = SampleSender(address, spool=spool, config=config)
    for n in range(0, ROLLOUTS, 2):
        for member in (n, n + 1):
            sender.send(make_rollout(member, parts=1 + member % 2, tokens=16, group=n))
    return sender


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.json"))


def weights(path: Path) -> list[int]:
    return json.loads(path.read_text())["weights"]


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_goes_on_from_its_latest_checkpoint(
    train: Callable[..., Trainer],
    tmp_path: Path,
    sender_config: Callable[..., SenderConfig],
    wait: Callable[..., None],
    stored: bool,
) -> None:
    more = ("--out", tmp_path / "store") if stored else ()
    trainer = train(*more)
    with send_all(trainer.address, tmp_path / "spool", sender_config()) as sender:
        trainer.go(5)
        assert [trainer.line() for _ in range(5)] == ["2", "4", "6", "8", "10"]
        wait(lambda: sender.stats().acknowledged >= 8)
        assert sender.stats().acknowledged == 8, "the fifth step is in no checkpoint"
        for steps in (0, 4):
            trainer.kill_after(steps, more=3)
            latest = checkpoints(tmp_path)[-1]
            trainer = train("--load", latest, *more, bind=trainer.address)
        trainer.go(ROLLOUTS)
        while trainer.line().isdigit():
            pass
        assert sender.wait_settled(40.0)
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()
    assert trainer.process.wait(40.0) == 0
    assert sorted(weights(checkpoints(tmp_path)[-1])) == list(range(ROLLOUTS))


def test_from_an_older_checkpoint_it_gets_everything_after_it_and_nothing_before_it(
    train: Callable[..., Trainer], tmp_path: Path, sender_config: Callable[..., SenderConfig]
) -> None:
    """verl PR #4199, OpenRLHF#1322: what lay between the two checkpoints was skipped."""
    trainer = train("--out", tmp_path / "store")
    with send_all(trainer.address, tmp_path / "spool", sender_config()) as sender:
        trainer.kill_after(9)
        old, *later = checkpoints(tmp_path)[1:]
        assert len(later) == 2
        before = weights(old)
        assert len(before) == 8
        trainer = train("--load", old, "--out", tmp_path / "store", bind=trainer.address)
        trainer.go(ROLLOUTS)
        lines = []
        while (line := trainer.line()).isdigit():
            lines.append(int(line))
        assert lines == list(range(10, ROLLOUTS + 1, 2))
        assert sender.wait_settled(40.0)
    metrics = json.loads(line)
    assert metrics["rollouts_restored_total"] > 0
    end = weights(checkpoints(tmp_path)[-1])
    assert end[:8] == before
    assert sorted(end) == list(range(ROLLOUTS))


def test_what_comes_again_comes_in_its_place(
    tmp_path: Path, sender_config: Callable[..., SenderConfig], receiver_config: Callable[..., ReceiverConfig]
) -> None:
    """The oldest groups came last, and so were the stalest, or too stale."""
    config = receiver_config(group_size=1, commit_on="checkpoint")

    def trained(receiver: SampleReceiver, steps: int) -> list[int]:
        found: list[int] = []
        for _ in range(steps):
            lease = receiver.next_batch(groups=1, deadline_s=40.0)
            assert lease is not None
            found.append(int(lease.rollouts[0].rollout_id, 16))
            lease.commit()
        return found

    with (
        SampleReceiver(out=tmp_path, config=config) as receiver,
        SampleSender(receiver.address, config=sender_config(settle="stored")) as sender,
    ):
        for n in range(10):
            sender.send(make_rollout(n, group=n))
        assert sender.wait_settled(40.0)
        assert trained(receiver, 2) == [0, 1]
        old = receiver.state_dict()
        assert trained(receiver, 4) == [2, 3, 4, 5]
        receiver.checkpoint_saved(receiver.state_dict())
    with SampleReceiver(out=tmp_path, config=config) as receiver:
        receiver.load_state_dict(old)
        assert trained(receiver, 8) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_without_a_store_an_older_checkpoint_says_what_is_gone(
    tmp_path: Path,
    sender_config: Callable[..., SenderConfig],
    receiver_config: Callable[..., ReceiverConfig],
    wait: Callable[..., None],
) -> None:
    config = receiver_config(group_size=1, commit_on="checkpoint")
    receiver = SampleReceiver(config=config)
    with SampleSender(receiver.address, spool=tmp_path, config=sender_config()) as sender:
        for n in range(3):
            sender.send(make_rollout(n, group=n))
        states = []
        for _ in range(2):
            lease = receiver.next_batch(groups=1, deadline_s=40.0)
            assert lease is not None
            lease.commit()
            states.append(receiver.state_dict())
        assert sender.stats().pending == 3  # committed by the trainer, saved by nobody
        receiver.checkpoint_saved(states[1])
        wait(lambda: sender.stats().pending == 1)  # the sender has forgotten two: the later end of this race
        receiver.close()
        second = SampleReceiver(receiver.address, config=config)
        second.load_state_dict(states[0])
        lease = second.next_batch(groups=1, deadline_s=40.0)
        assert lease is not None
        assert lease.rollouts[0].rollout_id == f"{2:032x}"
        assert second.stats().unavailable == 1
        assert second.metrics()["unavailable_total"] == 1.0
        with pytest.raises(BridgeError, match="load it first"):
            second.load_state_dict(states[0])
        second.close()
        sender.close(drain_s=0.0)


def test_states_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with SampleReceiver() as receiver:
        state = receiver.state_dict()
        for changed, words in (
            ({}, "not a state of a SampleReceiver"),
            ({**state, "version": 2}, "version 2, this version reads 1"),
            ({**state, "done": {"xyz": []}}, "damaged"),
            ({**state, "rollouts": "AAAA"}, "damaged: 3 bytes of ids"),
            ({**state, "done": 1}, "damaged"),
        ):
            with pytest.raises(BridgeError, match=words):
                receiver.load_state_dict(changed)
        receiver.load_state_dict(state)
