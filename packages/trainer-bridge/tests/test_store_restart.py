"""A store that is opened again, with its disk, its checkpoints and its groups as a crash left them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_bridge import (
    BatchLease,
    ReceiverConfig,
    ReceiverEvent,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    SpoolError,
)
from trainer_bridge.codec import draft
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import segment_paths
from trainer_bridge.seqset import SeqSet
from trainer_bridge.state_file import CursorFile, load
from trainer_bridge.store import Store
from trainer_bridge.store_cursor import StoreCursor
from trainer_bridge.testing import make_rollout

Config = Callable[..., ReceiverConfig]
Wait = Callable[..., None]
SMALL = 1000
"""A segment of so many bytes holds two of these rollouts."""


@pytest.fixture
def none(receiver_config: Config) -> Config:
    """Committed records go at once."""
    return lambda **more: receiver_config(**{"keep_committed": "none", "segment_bytes": SMALL, **more})


def send(sender: SampleSender, *numbers: int, attempt: int = 0, group: int | None = None) -> None:
    for n in numbers:
        of = n if group is None else group
        sender.send(make_rollout(n, parts=1, tokens=16, attempt=attempt, group=of))


def taken(receiver: SampleReceiver, count: int) -> list[int]:
    got: list[int] = []
    for _ in range(count):
        lease = receiver.next(40.0)
        assert lease is not None
        got.append(int(lease.rollout_id, 16))
        lease.commit()
    return got


def step(receiver: SampleReceiver, groups: int = 1) -> BatchLease:
    lease = receiver.next_batch(groups=groups, deadline_s=40.0)
    assert lease is not None
    return lease


# -- what is known of deleted records


def test_a_later_attempt_of_a_deleted_rollout_that_was_replaced_still_waits(
    tmp_path: Path, none: Config, wait: Wait
) -> None:
    """It was dropped as late: of what was deleted, all counted as trained on."""
    with SampleReceiver(out=tmp_path, config=none()) as receiver, SampleSender(receiver.address) as sender:
        send(sender, 1, 50, 51)
        wait(lambda: receiver.stats().queued == 3)
        send(sender, 1, attempt=1)
        send(sender, 52)
        wait(lambda: receiver.stats().messages == 5)
        assert taken(receiver, 2) == [50, 51]
        wait(lambda: receiver.stats().trimmed == 2)
        sender.close(drain_s=0.0)
    with SampleReceiver(out=tmp_path, config=none()) as receiver:
        assert taken(receiver, 2) == [1, 52]
        assert receiver.stats().dropped == {}


@pytest.mark.parametrize("restart", [False, True])
def test_a_later_attempt_of_a_deleted_rollout_that_was_dropped_is_new(
    tmp_path: Path, none: Config, wait: Wait, restart: bool
) -> None:
    config = none(max_nacks=0)

    def again(receiver: SampleReceiver) -> None:
        with SampleSender(receiver.address) as sender:
            send(sender, 1, 2, attempt=1)
            send(sender, 9)
            assert taken(receiver, 2) == [1, 9]
            assert receiver.stats().dropped == ({"late": 1} if restart else {"nacked": 1, "late": 1})

    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        send(sender, 1, 2, 3, 4)
        lease = receiver.next(40.0)
        assert lease is not None
        lease.nack("bad")
        assert taken(receiver, 3) == [2, 3, 4]
        wait(lambda: receiver.stats().trimmed >= 2)
        assert sender.wait_settled(40.0)
        if not restart:
            again(receiver)
    if restart:
        with SampleReceiver(out=tmp_path, config=config) as receiver:
            again(receiver)


# -- room


def test_a_full_store_is_trimmed_at_the_start(tmp_path: Path, none: Config, wait: Wait) -> None:
    """No credit, so nothing came; nothing came, so nothing was flushed, and nothing deleted."""
    everything = none(keep_committed="all", store_quota_bytes=3 * SMALL)
    with SampleReceiver(out=tmp_path, config=everything) as receiver:
        with SampleSender(receiver.address) as sender:
            send(sender, *range(40))
            taken(receiver, 4)
            wait(lambda: receiver.metrics()["store_left_bytes"] < SMALL)
            sender.close(drain_s=0.0)
        wait(lambda: all(each.presence != "connected" for each in receiver.stats().producers))
        while receiver.stats().queued:
            taken(receiver, 1)
    with (
        SampleReceiver(out=tmp_path, config=none(store_quota_bytes=3 * SMALL)) as receiver,
        SampleSender(receiver.address) as sender,
    ):
        assert receiver.stats().queued == 0
        send(sender, 1000)
        assert taken(receiver, 1) == [1000]
        wait(lambda: receiver.stats().trimmed > 0)


def test_segments_of_equal_size_all_go(tmp_path: Path, wait: Wait) -> None:
    """The second looked like the first, which had been looked at."""
    config = ReceiverConfig(segment_bytes=1, keep_committed="none")
    store = Store(tmp_path, config=config, now_ns=1, progressed=lambda: None)
    for n in range(1, 6):
        store.append(draft(make_rollout(n, parts=1, tokens=16)).numbered(b"p" * 16, 1, n, 0))
        store.commit_many([(n, "")])
        wait(lambda n=n: store.trimmed.upto == n - 1)  # one closed segment at a time
    store.close()


def test_what_the_disk_refused_once_is_deleted_without_further_news(
    tmp_path: Path, none: Config, wait: Wait
) -> None:
    """Full, and nothing could come that would have had it tried again."""
    obstacle = tmp_path / "samples" / "trimmed.new"
    with SampleReceiver(out=tmp_path, config=none()) as receiver, SampleSender(receiver.address) as sender:
        obstacle.mkdir()
        send(sender, *range(4))
        assert taken(receiver, 4) == [0, 1, 2, 3]
        wait(lambda: receiver.metrics()["store_faults_total"] >= 1.0)
        assert receiver.stats().trimmed == 0
        obstacle.rmdir()
        wait(lambda: receiver.stats().trimmed >= 2)
        assert receiver.metrics()["store_faults_total"] <= 3.0, "not at each flush"


def test_a_restart_needs_no_more_room_for_its_checkpoints(
    tmp_path: Path, none: Config, wait: Wait, sender_config: Callable[..., SenderConfig]
) -> None:
    """Until as many checkpoints were saved anew, nothing was deleted; the room for that was not there."""
    config = none(keep_committed="checkpoint", keep_checkpoints=6, commit_on="checkpoint")
    spool, store = tmp_path / "spool", tmp_path / "store"

    def save(receiver: SampleReceiver, steps: int) -> dict[str, object]:
        state: dict[str, object] = {}
        for _ in range(steps):
            taken(receiver, 4)
            state = receiver.state_dict()
            receiver.checkpoint_saved(state)
        return state

    with (
        SampleReceiver(out=store, config=config) as receiver,
        SampleSender(receiver.address, spool=spool, config=sender_config()) as sender,
    ):
        send(sender, *range(48))
        state = save(receiver, 8)
        wait(lambda: receiver.stats().trimmed == 12)  # 5 checkpoints later nobody goes back before it
        sender.close(drain_s=0.0)
    with SampleReceiver(out=store, config=config) as receiver:
        receiver.load_state_dict(state)
        with SampleSender(receiver.address, spool=spool, config=sender_config()) as sender:
            save(receiver, 1)
            wait(lambda: receiver.stats().trimmed == 16)
            save(receiver, 3)
            wait(lambda: receiver.stats().trimmed == 28)
            assert receiver.stats().unaccounted == 0
            sender.close(drain_s=0.0)


# -- the cursor


def test_half_a_step_is_not_deleted_before_its_commit_is_on_the_disk(tmp_path: Path, wait: Wait) -> None:
    """The other half came again after a crash, as a group that lacks members."""
    config = ReceiverConfig(segment_bytes=SMALL, keep_committed="none")
    store = Store(tmp_path, config=config, now_ns=1, progressed=lambda: None)
    for n in range(1, 6):
        store.append(draft(make_rollout(n, parts=1, tokens=16, group=0)).numbered(b"p" * 16, 1, n, 0))
    assert len(segment_paths(tmp_path / "samples")) > 1
    cursor = tmp_path / "samples" / "cursor.json"
    with store.steady:  # the flush has written its cursor, and is about to delete
        store.commit_many([(1, "")])
        wait(cursor.exists)
        (tmp_path / "samples" / "cursor.new").mkdir()  # no later one reaches the disk, as if power went
        store.commit_many([(n, "") for n in range(2, 6)])

    def failed() -> bool:
        try:
            store.check()
        except SpoolError:
            return True
        return False

    wait(failed)
    store.close()
    file = load(cursor, CursorFile)
    assert file is not None
    assert (file.upto, store.trimmed.upto) == (1, 0)


def test_what_a_load_takes_back_is_told_once_when_it_is_committed_again(tmp_path: Path) -> None:
    """Two loads and a commit within one flush told it twice; that ended the receiver."""
    cursor = StoreCursor(tmp_path)
    cursor.commit([(1, ""), (2, "")])
    first = cursor.snapshot()
    assert first is not None
    cursor.rewind(SeqSet(1))
    cursor.commit([(2, "")])
    cursor.save(first)
    assert cursor.take_saved() == [1]
    second = cursor.snapshot()
    assert second is not None
    cursor.save(second)
    cursor.rewind(SeqSet(1))
    assert cursor.take_saved() == []


# -- killed between the saving of a checkpoint and `checkpoint_saved`


def test_a_drop_that_the_store_was_not_told_of_closes_no_group(
    tmp_path: Path, receiver_config: Config, wait: Wait
) -> None:
    config = receiver_config(commit_on="checkpoint", group_size=2)
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        send(sender, 1, group=7)
        wait(lambda: receiver.stats().queued == 1)
        send(sender, 1, attempt=1, group=7)
        wait(lambda: receiver.stats().dropped == {"replaced": 1})
        state = receiver.state_dict()
        sender.close(drain_s=0.0)
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        receiver.load_state_dict(state)
        send(sender, 2, group=7)
        lease = step(receiver)
        assert [int(each.rollout_id, 16) for each in lease.rollouts] == [1, 2]
        lease.commit()
        receiver.checkpoint_saved(receiver.state_dict())
        assert sender.wait_settled(40.0)


def test_a_drop_that_the_store_was_not_told_of_is_a_drop(tmp_path: Path, receiver_config: Config) -> None:
    """The store wrote down that it was trained on, and its later attempt was late."""
    config = receiver_config(commit_on="checkpoint", max_nacks=0)
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        send(sender, 1)
        lease = receiver.next(40.0)
        assert lease is not None
        lease.nack("bad")
        state = receiver.state_dict()
        sender.close(drain_s=0.0)
    with SampleReceiver(out=tmp_path, config=config) as receiver:
        receiver.load_state_dict(state)
        stats = receiver.stats()
        assert (stats.committed, stats.dropped, stats.unaccounted) == (0, {"before_checkpoint": 1}, 0)
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        send(sender, 1, attempt=1)
        assert taken(receiver, 1) == [1]
        sender.close(drain_s=0.0)


# -- damage


@pytest.fixture
def half_damaged(tmp_path: Path, receiver_config: Config, sender_config: Callable[..., SenderConfig]) -> Path:
    """A store with a damaged record of a group of two, whose sender has forgotten it."""
    store = tmp_path / "store"
    with (
        SampleReceiver(out=store, config=receiver_config()) as receiver,
        SampleSender(receiver.address, config=sender_config(settle="stored")) as sender,
    ):
        for n in range(4):
            sender.send(make_rollout(n, parts=1, group=n // 2), group_size=2)
        assert sender.wait_settled(40.0)
    (path,) = segment_paths(store / "samples")
    segment, _ = Segment.scan(path, verify=True)
    raw = bytearray(path.read_bytes())
    raw[segment.offsets[1] - 8] ^= 1
    path.write_bytes(raw)
    return store


def test_a_group_with_a_damaged_member_ends_by_its_deadline(
    half_damaged: Path, receiver_config: Config, wait: Wait
) -> None:
    config = receiver_config(group_deadline_s=0.05, partial_groups="drop")
    with SampleReceiver(out=half_damaged, config=config) as receiver:
        lease = step(receiver)
        assert [int(each.rollout_id, 16) for each in lease.rollouts] == [2, 3]
        lease.commit()
        wait(lambda: receiver.stats().dropped == {"unreadable": 1, "group_deadline": 1})
        stats = receiver.stats()
        assert (stats.queued, stats.unaccounted) == (0, 0)


def test_without_a_deadline_a_group_with_a_damaged_member_is_named_and_may_still_be_completed(
    half_damaged: Path, receiver_config: Config, wait: Wait
) -> None:
    """Nobody can know whether its sender still has it: it waits."""
    events: list[ReceiverEvent] = []
    config = receiver_config(patience_s=0.2)
    with (
        SampleReceiver(out=half_damaged, config=config, on_event=events.append) as receiver,
        SampleSender(receiver.address) as sender,
    ):
        wait(lambda: len(receiver.stats().producers) == 2)
        step(receiver).commit()
        assert receiver.next_batch(groups=1, deadline_s=0.6) is None
        wait(lambda: any(event.kind == "waiting" and f"{0:032x}" in event.text for event in events))
        sender.send(make_rollout(0, parts=1, group=0), group_size=2)
        assert [int(each.rollout_id, 16) for each in step(receiver).rollouts] == [1, 0]
        sender.close(drain_s=0.0)
