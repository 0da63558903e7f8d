"""What happens to a run in the ordinary disasters, each with its counted outcome.

Trainers restarted from an older checkpoint are in `test_checkpoint.py`, full disks of a worker in
`test_spool.py`, suspended machines over real sockets in `test_clock_jumps.py`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig, Timing
from trainer_bridge.commands.balance import balance_of
from trainer_bridge.commands.books import read_books
from trainer_bridge.testing import Faults, VirtualNetwork, make_sample

TIMING = Timing(heartbeat_s=1.0, peer_timeout_s=10.0, greet_again_s=1.0, resend_s=5.0)


class World:
    """A trainer with its checkpoint, and workers with their spools, in virtual time."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.network = VirtualNetwork()
        self.folder = folder
        self.config = ReceiverConfig(timing=TIMING, commit_on="checkpoint", patience_s=None, **config)
        self.weights: list[int] = []
        self.saved: tuple[list[int], dict[str, Any] | None] = ([], None)
        self.senders: list[SampleSender] = []
        self.clients: list[Any] = []
        self.sent = 0
        self.open_trainer()

    def open_trainer(self) -> None:
        self.server = self.network.server()
        self.receiver = SampleReceiver(transport=self.server, clock=self.network, config=self.config)
        self.weights, state = list(self.saved[0]), self.saved[1]
        if state is not None:
            self.receiver.load_state_dict(state)

    def open_worker(self, number: int | None = None) -> SampleSender:
        number = len(self.senders) if number is None else number
        client = self.network.client()
        sender = SampleSender(
            "memory://virtual",
            transport=client,
            clock=self.network,
            spool=self.folder / f"spool-{number}",
            durability="none",
            config=SenderConfig(timing=TIMING, keep_segments=True),
        )
        self.senders[number:], self.clients[number:] = [sender], [client]
        return sender

    def send(self, sender: SampleSender) -> None:
        sender.send(make_sample(self.sent, tokens=8))
        self.sent += 1

    def train(self, most: int = 1_000_000) -> None:
        """Take what is there, and save a checkpoint."""
        for _ in range(most):
            lease = self.receiver.next(0.0)
            if lease is None:
                break
            self.weights.append(int(lease.rollout_id, 16))
            lease.commit()
        state = self.receiver.state_dict()
        self.saved = (list(self.weights), state)
        self.receiver.checkpoint_saved(state)

    def settle(self, seconds: float = 120.0) -> None:
        def settled() -> bool:
            self.train()
            return not any(sender.stats().pending for sender in self.senders)

        assert self.network.run(seconds, until=settled), [sender.stats() for sender in self.senders]
        assert sorted(self.weights) == list(range(self.sent))
        assert self.receiver.stats().unaccounted == 0

    def close(self) -> None:
        self.network.release()
        for sender in self.senders:
            sender.close(drain_s=0.0)
        self.receiver.close()


@pytest.fixture
def world(in_memory: Path) -> Iterator[Callable[..., World]]:
    opened: list[World] = []
    logging.disable(logging.ERROR)

    def make(**config: Any) -> World:
        opened.append(World(in_memory, **config))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
    logging.disable(logging.NOTSET)


def test_the_trainer_is_down_for_a_minute(world: Callable[..., World]) -> None:
    run = world()
    workers = [run.open_worker() for _ in range(3)]
    for second in range(100):
        for worker in workers:
            run.send(worker)
        run.network.run(1.0)
        if second == 20:
            run.network.crash(run.server)
        elif second == 80:
            assert [worker.stats().pending for worker in workers] == [61, 61, 61]
            run.open_trainer()
        elif second < 20 or second > 80:
            run.train()
    run.settle()
    assert run.sent == 300
    assert [worker.stats().reconnects for worker in workers] == [1, 1, 1]
    assert [worker.stats().acknowledged for worker in workers] == [100, 100, 100]
    # What the dead trainer had taken and not saved came again, and was taken once.
    assert run.receiver.stats().committed == 300 - 60


def test_a_worker_is_restarted_and_sends_its_last_rollout_again(world: Callable[..., World]) -> None:
    run = world()
    worker = run.open_worker()
    for _ in range(20):
        run.send(worker)
    run.network.run(0.5, until=lambda: run.receiver.stats().messages >= 10)
    run.network.crash(run.clients[0])
    run.train()
    again = run.open_worker(0)
    again.send(make_sample(run.sent - 1, tokens=8))  # it does not know whether that was accepted
    run.send(again)
    run.settle()
    stats = again.stats()
    assert (stats.epoch, stats.sent, stats.pending) == (2, 2, 0)
    assert run.receiver.stats().doubled == 1
    run.network.run(2.0)  # with a heartbeat the spool notes what is settled
    balance = balance_of(read_books(run.folder))
    assert balance.adds_up
    assert (balance.sent, balance.committed, balance.repeated) == (22, 22, 1)


def test_a_slow_trainer_holds_the_workers_back_and_nothing_is_sent_twice(world: Callable[..., World]) -> None:
    run = world(queue_messages=8)
    workers = [run.open_worker() for _ in range(4)]
    for worker in workers:
        for _ in range(30):
            run.send(worker)
    for second in range(60):
        run.network.run(1.0)
        stats = run.receiver.stats()
        assert stats.queued <= 4 * 8, "credit bounds what waits in the trainer's memory"
        assert stats.messages == min(stats.committed + stats.queued, 120)
        run.train(1)
        assert len(run.weights) == second + 1
    run.settle()
    assert [worker.stats().resent for worker in workers] == [0, 0, 0, 0]
    assert run.receiver.stats().duplicates == 0


def test_clocks_are_set_and_everything_sleeps_for_an_hour(world: Callable[..., World]) -> None:
    run = world()
    workers = [run.open_worker() for _ in range(2)]
    for step in range(40):
        if step in (10, 20):
            run.network.wall_offset_s = -3600.0 if step == 10 else 86_400.0
        if step == 30:
            run.network.now_s += 3600.0
        for worker in workers:
            run.send(worker)
        run.network.run(1.0)
        run.train()
    run.settle()
    assert run.receiver.stats().dropped == {}
    assert run.receiver.stats().committed == 80


def test_64_workers_at_once(world: Callable[..., World]) -> None:
    run = world()
    run.network.set_faults(Faults(reorder=0.5, delay_s=0.2))
    workers = [run.open_worker() for _ in range(64)]
    for _ in range(5):
        for worker in workers:
            run.send(worker)
    run.settle()
    stats = run.receiver.stats()
    assert (stats.committed, len(stats.producers)) == (320, 64)
    assert {producer.messages for producer in stats.producers} == {5}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_64_workers_at_once_over_real_sockets(
    in_memory: Path,
    sender_config: Callable[..., SenderConfig],
    receiver_config: Callable[..., ReceiverConfig],
) -> None:
    count, each = 64, 50
    failures: list[BaseException] = []

    def work(number: int, address: str) -> None:
        try:
            spool = in_memory / str(number)
            with SampleSender(address, spool=spool, config=sender_config()) as sender:
                for n in range(each):
                    sender.send(make_sample(number * each + n))
                assert sender.wait_settled(60.0)
        except BaseException as error:
            failures.append(error)

    with SampleReceiver(config=receiver_config()) as receiver:
        threads = [threading.Thread(target=work, args=(n, receiver.address)) for n in range(count)]
        for thread in threads:
            thread.start()
        got: list[int] = []
        while len(got) < count * each:
            lease = receiver.next(30.0)
            assert lease is not None
            got.append(int(lease.rollout_id, 16))
            lease.commit()
        for thread in threads:
            thread.join(60.0)
        assert failures == []
        assert sorted(got) == list(range(count * each))
        stats = receiver.stats()
        assert (stats.committed, stats.unaccounted, stats.lost_producers) == (count * each, 0, ())


def test_the_disk_of_the_store_runs_full(tmp_path: Path, programs: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(programs / "full_store.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert "cannot write" in got["error"]
    assert "store/samples/segment-000000.tbs" in got["error"]
    assert got["before"] < 100
    assert sorted(set(got["trained"])) == list(range(100)), "nothing is lost"
    assert got["repeated"] == 0
    assert (got["pending"], got["acknowledged"], got["unaccounted"]) == (0, 100, 0)
