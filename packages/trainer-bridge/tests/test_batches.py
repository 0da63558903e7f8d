"""`next_batch` over real sockets: groups, leases, drops, dead letters, metrics, and standing still."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from token_tracking.sample import Sample
from trainer_bridge import (
    BridgeError,
    ClosedError,
    ConfigError,
    ReceiverConfig,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    StuckError,
    UnsendableError,
)
from trainer_bridge.lease import BatchLease
from trainer_bridge.testing import differences, make_rollout

RECEIVED = SenderConfig(settle="received")


def group(n: int, *, size: int = 2, version: int = 3) -> list[Sample]:
    """Rollouts 10n, 10n + 1, ...; the odd ones in two parts."""
    samples = [s for m in range(size) for s in make_rollout(10 * n + m, parts=1 + m % 2, tokens=16, group=n)]
    return [
        msgspec.structs.replace(s, versions=np.where(s.versions != -1, version, -1).astype(np.int32))
        for s in samples
    ]


def numbers(batch: BatchLease | None) -> list[list[int]]:
    assert batch is not None
    return [[int(rollout.rollout_id, 16) for rollout in each.rollouts] for each in batch.groups]


def test_a_batch_is_whole_groups_of_whole_rollouts() -> None:
    with SampleReceiver() as receiver, SampleSender(receiver.address, producer="w7") as sender:
        sent = [group(1), group(2)]
        for each in sent:
            assert len(sender.send_group(each).seqs) == 2
        batch = receiver.next_batch(groups=2, deadline_s=40.0)
        assert numbers(batch) == [[10, 11], [20, 21]]
        assert batch is not None
        pairs = zip([*sent[0], *sent[1]], batch.samples, strict=True)
        assert [name for pair in pairs for name in differences(*pair)] == []
        first = batch.groups[0]
        assert (first.size, first.complete, len(batch.rollouts), len(batch.samples)) == (2, True, 4, 6)
        assert (batch.rollouts[3].producer_name, batch.rollouts[3].sequence) == ("w7", 4)
        assert sender.stats().pending == 4
        batch.commit()
        batch.commit()
        assert sender.wait_settled(40.0)
        with pytest.raises(BridgeError, match="committed or given back before"):
            batch.nack("too late")
    with pytest.raises(ClosedError):
        receiver.next_batch(groups=1)


def test_members_from_several_workers_meet(receiver_config: Callable[..., ReceiverConfig]) -> None:
    with (
        SampleReceiver(config=receiver_config(group_size=2)) as receiver,
        SampleSender(receiver.address, config=RECEIVED) as one,
        SampleSender(receiver.address, config=RECEIVED) as two,
    ):
        one.send(make_rollout(10, group=1))
        assert receiver.next_batch(groups=1, deadline_s=0.05) is None
        waiter: list[BatchLease | None] = []
        thread = threading.Thread(
            target=lambda: waiter.append(receiver.next_batch(groups=1, deadline_s=40.0))
        )
        thread.start()
        two.send(make_rollout(11, group=1))
        thread.join(40.0)
        assert numbers(waiter[0]) == [[10, 11]]


def test_what_is_given_back_comes_again_and_then_goes_to_the_dead_letters(
    tmp_path: Path, receiver_config: Callable[..., ReceiverConfig]
) -> None:
    with (
        SampleReceiver(out=tmp_path, config=receiver_config(max_nacks=1)) as receiver,
        SampleSender(receiver.address, config=RECEIVED) as sender,
    ):
        for n in (1, 2):
            sender.send_group(group(n))
        batch = receiver.next_batch(groups=2, deadline_s=40.0)
        assert batch is not None
        bad = batch.rollouts[2].rollout_id
        batch.nack("reward model died", rollouts=[bad])
        assert numbers(batch) == [[10, 11]]
        with pytest.raises(BridgeError, match=f"rollout {bad} is not in this lease"):
            batch.nack("again", rollouts=[bad])
        batch.commit()
        again = receiver.next_batch(groups=1, deadline_s=40.0)
        assert numbers(again) == [[20, 21]]
        assert again is not None
        assert [rollout.nacks for rollout in again.rollouts] == [1, 0]
        again.nack("reward model died again", rollouts=[bad])
        with pytest.raises(BridgeError, match="given back"):
            again.commit()
        (letter,) = receiver.dead_letters()
        assert (letter.reason, letter.detail) == ("nacked", "reward model died again")
        assert (letter.rollout_id, letter.sequence, letter.position) == (bad, 3, 3)
        stats = receiver.stats()
        assert stats.dropped == {"nacked": 1, "group_broken": 1}
        assert (stats.nacks, stats.committed, stats.unaccounted) == (2, 2, 0)
    rows = sqlite3.connect(tmp_path / "dead_letters.sqlite").execute("select reason, times from letters")
    assert rows.fetchall() == [("nacked", 1)]


def test_malformed_messages_are_dead_letters_once_however_often_they_come(
    tmp_path: Path, wait: Callable[..., None]
) -> None:
    with SampleReceiver(out=tmp_path) as receiver:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(receiver.address)
        for _ in range(3):
            dealer.send_multipart([b"TB\x01\x00 this is no head at all", b"and no payload"])
        wait(lambda: receiver.stats().rejected.get("bad_head_hash") == 3)
        (letter,) = receiver.dead_letters()
        assert (letter.reason, letter.times, letter.sequence) == ("bad_head_hash", 3, 0)
        assert letter.head.startswith(b"TB\x01\x00 this is no head")
        dealer.close(0)
        context.term()
    with pytest.raises(ClosedError, match="is closed: ask for dead letters before"):
        receiver.dead_letters()  # it was "cannot read: Cannot operate on a closed database"


def test_stale_samples_are_dropped_and_their_worker_goes_on(
    tmp_path: Path, receiver_config: Callable[..., ReceiverConfig]
) -> None:
    """SkyRL#1173: dropped groups never gave their capacity back."""
    config = receiver_config(max_staleness=1, queue_messages=4)
    with SampleReceiver(config=config) as receiver, SampleSender(receiver.address, spool=tmp_path) as sender:
        assert receiver.publish(policy_run="run-1", weights_version=7).min_version == 6
        for n in range(6):
            sender.send_group(group(n, version=3))
        for n in (6, 7):
            sender.send_group(group(n, version=6))
        batch = receiver.next_batch(groups=2, deadline_s=40.0)
        assert numbers(batch) == [[60, 61], [70, 71]]
        assert batch is not None
        assert {rollout.staleness for rollout in batch.rollouts} == {1}
        batch.commit()
        assert sender.wait_settled(40.0)  # also what was dropped
        metrics = receiver.metrics()
    assert {type(value) for value in metrics.values()} == {float}
    trained = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    said = {
        "dropped_stale_total": 12.0,
        "rollouts_dropped_total": 12.0,
        "rollouts_committed_total": 4.0,
        "rollouts_received_total": 16.0,
        "staleness_mean": 1.0,
        "staleness_max": 1.0,
        "tokens_trained_total": float(trained),
        "steps_total": 1.0,
        "queued": 0.0,
        "leased": 0.0,
    }
    assert {name: metrics[name] for name in said} == said
    assert metrics["wait_s_total"] > 0


def test_a_dead_worker_ends_the_wait_with_its_name(receiver_config: Callable[..., ReceiverConfig]) -> None:
    """NVIDIA-NeMo/RL#3488: the collector was dead, and the trainer polled an empty buffer for 3.7 hours."""
    with SampleReceiver(config=receiver_config(patience_s=0.2)) as receiver:
        assert receiver.next_batch(groups=1, deadline_s=0.3) is None  # a first worker is waited for
        with SampleSender(receiver.address, producer="w7", config=RECEIVED) as sender:
            sender.send(make_rollout(1, group=1), group_size=2)
            assert receiver.next_batch(groups=1, deadline_s=0.5) is None  # the second one may still come
        words = r"nothing has moved for 0\.\d s .* no producer is connected \(producer w7 said BYE\); group"
        with pytest.raises(StuckError, match=words):
            receiver.next_batch(groups=1, deadline_s=40.0)
        with SampleSender(receiver.address, config=RECEIVED) as sender:
            sender.send(make_rollout(2, group=1), group_size=2)
            assert numbers(receiver.next_batch(groups=1, deadline_s=40.0)) == [[1, 2]]


def test_a_group_is_given_up_while_nobody_asks(
    receiver_config: Callable[..., ReceiverConfig], wait: Callable[..., None]
) -> None:
    config = receiver_config(group_deadline_s=0.05, partial_groups="drop")
    with SampleReceiver(config=config) as receiver, SampleSender(receiver.address) as sender:
        sender.send(make_rollout(1, group=1), group_size=2)
        assert sender.wait_settled(40.0)
        assert receiver.stats().dropped == {"group_deadline": 1}


def test_what_cannot_be_asked_for_is_refused() -> None:
    with SampleReceiver() as receiver, SampleSender(receiver.address, config=RECEIVED) as sender:
        with pytest.raises(ConfigError, match="groups must be 1 or more"):
            receiver.next_batch(groups=0)
        with pytest.raises(UnsendableError, match="belong to 2"):
            sender.send_group([*group(1), *group(2)])
        with pytest.raises(UnsendableError, match="group_size is 0"):
            sender.send(make_rollout(1), group_size=0)
