"""Bounds of the pool and what they must not do: keep groups from being completed, or let one come twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from trainer_bridge import (
    AsyncSampleSender,
    BridgeError,
    ConfigError,
    ReceiverConfig,
    ReceiverEvent,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    StuckError,
    Timing,
)
from trainer_bridge.checkpoint import encode_rollouts, state_from
from trainer_bridge.closed_groups import EndedGroups
from trainer_bridge.codec import decode_frames, draft
from trainer_bridge.control import ControlBoard
from trainer_bridge.lease import BatchLease
from trainer_bridge.member import Member
from trainer_bridge.messages import Hello, Report, Welcome
from trainer_bridge.pool import Pool, PoolLease
from trainer_bridge.pool_state import load_state, state_of
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Identity, ReceiverSession, SenderSession, Stream
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.session.peers import Producer
from trainer_bridge.stuck import cause_of_standstill, what_is_awaited
from trainer_bridge.testing import make_rollout

PRODUCER = b"p" * 16


class Trainer:
    """A receiver's pool without its network, with a worker that sends what it has credit for."""

    def __init__(self, **config: object) -> None:
        self.config = ReceiverConfig(**config)  # type: ignore[arg-type]
        self.board = ControlBoard()
        self.session = ReceiverSession(receiver=b"r" * 16, config=self.config, board=self.board)
        self.pool = Pool(
            session=self.session,
            config=self.config,
            board=self.board,
            read=lambda position: pytest.fail(f"{position} was read"),
            bury=lambda *letter: None,
            now_s=0.0,
        )
        self.sequence = 0
        greeting = Hello(1, "producer", PRODUCER, "w7", 0, 0, SCHEMAS, (), 1, ((1, 1),))
        self.session.on_message(b"peer", greeting, 0.0)

    def credit(self) -> int:
        """Settle, and tell; 0 also if no bytes are left."""
        self.session.limit(self.pool.allowance, starved=self.pool.starved)
        self.session.take_messages(1.0)
        peer = self.session.peers[b"peer"]
        return max(peer.sequence_limit - self.sequence, 0) if peer.byte_limit else 0

    def send(
        self, rollout: int, *, group: int = 0, size: int = 0, attempt: int = 0, now_s: float = 0.0
    ) -> None:
        self.sequence += 1
        samples = make_rollout(rollout, tokens=16, group=group, attempt=attempt)
        frames = draft(samples, group_size=size).numbered(PRODUCER, 1, self.sequence, 0)
        data = decode_frames(frames)
        assert self.session.on_data(b"peer", data.head, now_s)
        accepted = self.session.accept(data, frames.nbytes)
        if accepted is not None:
            self.pool.meter.arrive(1, 0)
            self.pool.offer(Member.arrived(accepted, frames, 0), now_s)

    def work(self, order: Iterable[tuple[int, int]], *, groups: int, size: int) -> PoolLease | None:
        """Send (rollout, group) in order, never more than there is credit for, until the step is complete."""
        for rollout, group in order:
            lease = self.pool.lease_groups(groups, 0.0)
            if lease is not None or not self.credit():
                return lease
            self.send(rollout, group=group, size=size)
        return self.pool.lease_groups(groups, 0.0)

    def trained(self, *, singles: bool = False) -> list[tuple[int, int]] | None:
        """Take a step of one and commit it."""
        lease = self.pool.lease_one(0.0) if singles else self.pool.lease_groups(1, 0.0)
        if lease is None:
            return None
        self.pool.commit(lease.number, 0.0)
        return shown(lease)


def shown(lease: PoolLease) -> list[tuple[int, int]]:
    return [(int.from_bytes(m.rollout_id, "big"), m.attempt) for m in lease.members()]


def in_turn(groups: int, size: int) -> list[tuple[int, int]]:
    return [(group * size + n, group) for n in range(size) for group in range(groups)]


# -- full queues


@pytest.mark.parametrize("bound", [{"queue_messages": 16}, {"queue_bytes": 10_000}])
def test_groups_in_turn_are_completed_though_the_queue_is_full_before_any_is(bound: dict[str, int]) -> None:
    """One worker with 64 groups of 8 in turn: 256 waited, none made a group, and no more could come."""
    trainer = Trainer(**bound)
    lease = trainer.work(in_turn(16, 8), groups=1, size=8)
    assert lease is not None
    assert shown(lease) == [(n, 0) for n in range(8)]
    assert trainer.session.beyond_queue > 0
    (news,) = trainer.pool.take_news()
    assert "taken beyond queue_messages" in news
    trainer.session.beyond_queue += 1
    assert trainer.pool.take_news() == []


def test_a_step_larger_than_the_queue_is_completed() -> None:
    trainer = Trainer(queue_messages=4)
    lease = trainer.work([(n, n // 2) for n in range(20)], groups=10, size=2)
    assert lease is not None
    assert len(lease.members()) == 20


def test_nothing_comes_beyond_the_queue_while_nobody_waits() -> None:
    trainer = Trainer(queue_messages=4)
    for n in range(4):
        trainer.send(n, group=n, size=2)
    assert trainer.credit() == 0
    assert trainer.pool.lease_groups(1, 0.0) is None
    assert trainer.credit() == 1  # a quarter of the queue at a time
    trainer.pool.demand.withdraw()
    trainer.send(4, group=4, size=2)
    assert trainer.credit() == 0


def test_beyond_the_queue_there_is_an_end_that_says_what_to_raise() -> None:
    trainer = Trainer(queue_messages=2, queue_bytes=1 << 30)
    assert trainer.work(in_turn(100, 2), groups=1, size=2) is None
    assert trainer.pool.queued == 2 + 16 * 2
    text = cause_of_standstill(trainer.session, trainer.pool, 9.0)
    assert text is not None
    assert "34 rollouts" in text
    assert "16 queues are full beyond their own" in text
    assert "raise ReceiverConfig.queue_messages (2) or queue_bytes (1073741824)" in text


# -- the step that is asked for


def test_a_larger_step_than_the_last_may_come_under_the_staleness_rule() -> None:
    """The world grew from 2 groups to 8, and only 2 were ever allowed to be ahead."""
    trainer = Trainer(max_staleness=0)
    order = [(n, n // 4) for n in range(200)]
    small = trainer.work(order, groups=2, size=4)
    assert small is not None
    assert trainer.sequence == 8
    trainer.pool.commit(small.number, 0.0)
    large = trainer.work(order[8:], groups=8, size=4)
    assert large is not None
    assert len(large.members()) == 32
    assert trainer.sequence == 40
    trainer.pool.commit(large.number, 0.0)
    trainer.pool.ask(1)
    assert trainer.credit() == 4, "and a smaller one asks for less again"


def test_a_step_counts_from_when_it_is_asked_for_also_while_ranks_are_missing(
    receiver_config: Callable[..., ReceiverConfig], wait: Callable[..., None]
) -> None:
    config = receiver_config(max_staleness=0, group_size=1)
    with SampleReceiver(config=config) as receiver:
        assert receiver.next_batch(groups=1, deadline_s=0.0) is None
        sender = SampleSender(receiver.address)
        for n in range(9):
            sender.send(make_rollout(n, group=n))
        wait(lambda: receiver.stats().groups_ready == 1)
        assert receiver.next_batch(groups=4, world=2, deadline_s=0.0) is None
        wait(lambda: receiver.stats().groups_ready == 4)
        sender.close(drain_s=0.0)


# -- groups of unknown size


def test_a_group_of_unknown_size_holds_up_no_other() -> None:
    trainer = Trainer(group_deadline_s=60.0, partial_groups="drop")
    trainer.send(99, group=99)
    for n in (1, 2):
        trainer.send(n, group=1, size=2)
    assert trainer.trained() == [(1, 0), (2, 0)]
    for _ in range(2):
        assert trainer.trained() is None
    (news,) = trainer.pool.take_news()
    assert f"group {99:032x} has: use send_group()" in news
    assert trainer.pool.groups.unsized_count == 1
    trainer.pool.expire(60.0)
    assert trainer.pool.meter.dropped == {"group_deadline": 1}
    assert trainer.pool.groups.unsized_count == 0


def test_if_there_are_only_groups_of_unknown_size_it_is_an_error_that_says_so(
    receiver_config: Callable[..., ReceiverConfig],
) -> None:
    with (
        SampleReceiver(config=receiver_config(patience_s=0.1)) as receiver,
        SampleSender(receiver.address) as sender,
    ):
        sender.send(make_rollout(1, group=1))
        with pytest.raises(
            ConfigError, match=r"nothing has moved .* nobody says how many rollouts group 0+1 has"
        ):
            receiver.next_batch(groups=1, deadline_s=40.0)
        assert receiver.metrics()["groups_unsized"] == 1.0
        lease = receiver.next(40.0)
        assert lease is not None, "single rollouts need no size"
        sender.close(drain_s=0.0)


# -- late, for ever


def lease_of(receiver: SampleReceiver, groups: int = 1) -> BatchLease:
    lease = receiver.next_batch(groups=groups, deadline_s=40.0)
    assert lease is not None
    return lease


@pytest.mark.parametrize("keep", ["all", "none"])
def test_a_store_knows_which_groups_are_over(
    tmp_path: Path, receiver_config: Callable[..., ReceiverConfig], wait: Callable[..., None], keep: str
) -> None:
    """After a restart the fourth of a group that was trained on with three came as a group of its own."""
    config = receiver_config(
        partial_groups="deliver", group_deadline_s=0.2, keep_committed=keep, segment_bytes=1000
    )
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        for n in range(3):
            sender.send(make_rollout(n, group=1), group_size=4)
        lease_of(receiver).commit()
        for n in (10, 11):
            sender.send(make_rollout(n, group=2), group_size=2)
        lease_of(receiver).commit()
        assert sender.wait_settled(40.0)
        if keep == "none":
            wait(lambda: receiver.stats().trimmed >= 3)
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        sender.send(make_rollout(3, group=1), group_size=4)
        sender.send(make_rollout(12, group=2), group_size=2)
        for n in (20, 21):
            sender.send(make_rollout(n, group=3), group_size=2)
        assert [int(r.rollout_id, 16) for r in lease_of(receiver).rollouts] == [20, 21]
        assert receiver.stats().dropped == {"late": 2}
        sender.close(drain_s=0.0)


def test_a_consumer_of_single_rollouts_closes_no_group(
    tmp_path: Path, receiver_config: Callable[..., ReceiverConfig]
) -> None:
    for n in (0, 1):
        with (
            SampleReceiver(out=tmp_path, config=receiver_config()) as receiver,
            SampleSender(receiver.address) as sender,
        ):
            sender.send(make_rollout(n, group=1), group_size=2)
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
            assert sender.wait_settled(40.0)


def test_a_checkpoint_knows_which_groups_are_over_without_a_store() -> None:
    old = Trainer()
    for n in (0, 1):
        old.send(n, group=1, size=2)
    assert old.trained() == [(0, 0), (1, 0)]
    new = Trainer()
    load_state(new.pool, state_of(old.pool), [], 0.0)
    new.sequence = 2
    new.send(0, group=1, size=2, attempt=1)
    new.send(7, group=1, size=2)
    assert new.trained() is None
    assert new.pool.meter.dropped == {"late": 2}


def test_which_records_say_that_a_group_is_over() -> None:
    ended = EndedGroups()
    ended.note_trimmed([b"gone", b"half gone"])
    ended.note_live(b"half gone")
    ended.note_ended(b"trained", dropped="")
    ended.note_live(b"trained")  # a crash came between the two halves of a step: both were trained on
    ended.note_ended(b"given up", dropped="group_deadline")
    ended.note_ended(b"all stale", dropped="stale")
    ended.note_ended(b"partly stale", dropped="stale")
    ended.note_live(b"partly stale")
    ended.note_ended(b"not known why", dropped=None)
    ended.note_live(b"not known why")
    assert ended.over() == [b"gone", b"trained", b"given up", b"all stale"]


# -- attempts


def test_a_later_attempt_of_a_rollout_that_was_trained_on_is_late() -> None:
    trainer = Trainer()
    trainer.send(5)
    assert trainer.trained(singles=True) == [(5, 0)]
    trainer.send(5, attempt=1)
    trainer.send(5, attempt=2)
    assert trainer.trained(singles=True) is None
    assert trainer.pool.meter.dropped == {"late": 2}
    again = Trainer()
    load_state(again.pool, state_of(trainer.pool), [], 0.0)
    again.sequence = 3
    again.send(5, attempt=3)
    assert again.pool.meter.dropped == {"late": 1}


@pytest.mark.parametrize("nacked", [False, True])
def test_a_later_attempt_waits_for_what_becomes_of_the_one_in_hand(nacked: bool) -> None:
    trainer = Trainer()
    trainer.send(5)
    lease = trainer.pool.lease_one(0.0)
    assert lease is not None
    trainer.send(5, attempt=1)
    trainer.send(6)
    assert trainer.trained(singles=True) == [(6, 0)]
    assert trainer.pool.lease_one(0.0) is None
    if nacked:
        trainer.pool.nack(lease.number, None, "NaN", 0.0)
        assert trainer.trained(singles=True) == [(5, 1)]
        assert trainer.pool.meter.dropped == {"replaced": 1}
    else:
        trainer.pool.commit(lease.number, 0.0)
        assert trainer.pool.meter.dropped == {"late": 1}
    assert trainer.pool.queued == 0


def test_a_later_attempt_of_a_rollout_that_was_dropped_is_new() -> None:
    trainer = Trainer(group_deadline_s=1.0, partial_groups="drop")
    trainer.send(5, group=1, size=2)
    trainer.pool.expire(1.0)
    state = state_of(trainer.pool)
    again = Trainer()
    load_state(again.pool, state, [], 0.0)
    again.sequence = 1
    again.send(5, attempt=1, group=2, size=1)
    assert again.trained() == [(5, 1)]


# -- checkpoints


@pytest.mark.parametrize("commit_on", ["commit", "checkpoint"])
def test_what_was_dropped_before_a_checkpoint_was_loaded_stays_dropped(commit_on: str) -> None:
    """Its sender was never told: it held it for ever."""
    trainer = Trainer(group_deadline_s=1.0, partial_groups="drop", commit_on=commit_on)
    trainer.send(1, group=1, size=2)
    trainer.send(1, group=1, size=2)  # once more: it ends with the first
    trainer.pool.expire(1.0)
    load_state(trainer.pool, state_of(Trainer().pool), [], 0.0)
    state = state_of(trainer.pool)
    trainer.pool.ends.saved(state)
    for ended in trainer.pool.ends.take_finished():
        for resolved in ended:
            trainer.session.mark_committed(resolved.identity, 0.0)
    assert trainer.session.ledger.producers[PRODUCER].streams[1].committed.upto == 2
    assert state.watermark().lacks(trainer.session.ledger.done) == []
    assert Identity(PRODUCER, 1, 2) in state.watermark()


def test_what_was_dropped_and_stored_before_a_load_does_not_come_again(
    tmp_path: Path, receiver_config: Callable[..., ReceiverConfig], wait: Callable[..., None]
) -> None:
    config = receiver_config(group_deadline_s=0.05, partial_groups="drop")
    with SampleReceiver(out=tmp_path, config=config) as receiver, SampleSender(receiver.address) as sender:
        empty = receiver.state_dict()
        sender.send(make_rollout(1, group=1), group_size=2)
        assert sender.wait_settled(40.0)
        receiver.load_state_dict(empty)
        stats = receiver.stats()
        assert (stats.queued, stats.dropped, stats.unaccounted) == (0, {"group_deadline": 1}, 0)


@pytest.mark.parametrize("commit_on", ["commit", "checkpoint"])
def test_the_ends_of_a_step_are_handed_over_together(commit_on: str) -> None:
    """A crash between two commits left half a group, which waited for the rest for ever."""
    trainer = Trainer(commit_on=commit_on)
    for n in range(4):
        trainer.send(n, group=n // 2, size=2)
    lease = trainer.pool.lease_groups(2, 0.0)
    assert lease is not None
    trainer.pool.commit(lease.number, 0.0)
    trainer.pool.ends.saved(state_of(trainer.pool))
    finished = trainer.pool.ends.take_finished()
    assert [[resolved.identity.sequence for resolved in ended] for ended in finished] == [[1, 2, 3, 4]]
    assert trainer.pool.ends.take_finished() == []


STATE = msgspec.to_builtins(state_of(Trainer().pool))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "a NoneType"),
        ([], "a list"),
        ({1: 2, "a": 3}, "it holds"),
        ({**STATE, "done": {"00" * 16: [[1, -5, []]]}}, "Expected `int` >= 0"),
        ({**STATE, "done": {"00" * 16: [[1, 2**80, []]]}}, "Expected `int` <="),
        ({**STATE, "done": {"00" * 16: [[2**32, 1, []]]}}, "Expected `int` <="),
        ({**STATE, "done": {"00" * 16: [[1, 1, [[9, 3]]]]}}, "range 9 to 3"),
        ({**STATE, "rollouts": "é"}, "damaged"),
        ({**STATE, "dropped_rollouts": "AAAA"}, "3 bytes of ids"),
        ({**STATE, "closed_groups": "AAAA"}, "3 bytes of ids"),
    ],
)
def test_a_state_that_is_none_is_refused_in_words(state: object, words: str) -> None:
    with pytest.raises(BridgeError, match=words):
        state_from(state)


def test_an_attempt_that_no_message_can_carry_is_named() -> None:
    with pytest.raises(BridgeError, match=r"rollout 70707070.* has attempt 4294967296"):
        encode_rollouts([(PRODUCER, 2**32)])


# -- what is waited for


def test_a_group_that_waits_for_members_of_a_worker_with_credit_is_told_once(
    receiver_config: Callable[..., ReceiverConfig], wait: Callable[..., None]
) -> None:
    """One of four came, and the trainer waited: the worker was there, and nothing said what was missing."""
    told: list[ReceiverEvent] = []
    config = receiver_config(patience_s=0.1)
    with (
        SampleReceiver(config=config, on_event=told.append) as receiver,
        SampleSender(receiver.address) as sender,
    ):
        sender.send(make_rollout(1, group=1), group_size=4)
        for _ in range(2):
            assert receiver.next_batch(groups=1, deadline_s=0.4) is None
        wait(lambda: any(event.kind == "waiting" for event in told))
        (event,) = [event for event in told if event.kind == "waiting"]
        assert f"group {1:032x} waits for 3 of 4" in event.text
        metrics = receiver.metrics()
        assert metrics["groups_incomplete"] == 1.0
        assert metrics["oldest_incomplete_s"] > 0.1
        sender.close(drain_s=0.0)


def test_senders_that_wait_for_a_checkpoint_are_named(
    receiver_config: Callable[..., ReceiverConfig], sender_config: Callable[..., SenderConfig]
) -> None:
    """Senders without a spool were full of what no checkpoint held, and the trainer waited for ever."""
    config = receiver_config(patience_s=0.2, commit_on="checkpoint")
    with (
        SampleReceiver(config=config) as receiver,
        SampleSender(receiver.address, producer="w7", config=sender_config(max_unsettled=2)) as sender,
    ):
        worker = threading.Thread(target=lambda: [sender.send(make_rollout(n)) for n in range(3)])
        worker.start()
        for _ in range(2):
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
        words = (
            r"producer w7 has no room: .* 2 rollouts .* in no saved checkpoint: senders wait for checkpoint_s"
        )
        with pytest.raises(StuckError, match=words):
            receiver.next(40.0)
        receiver.checkpoint_saved(receiver.state_dict())
        worker.join(40.0)
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
        receiver.checkpoint_saved(receiver.state_dict())


def test_an_asyncio_sender_without_room_says_so_as_well(
    receiver_config: Callable[..., ReceiverConfig], sender_config: Callable[..., SenderConfig]
) -> None:
    with SampleReceiver(config=receiver_config(patience_s=0.2)) as receiver:

        async def work() -> None:
            async with AsyncSampleSender(
                SampleSender(receiver.address, config=sender_config(max_unsettled=1))
            ) as sender:
                await sender.send(make_rollout(1))
                await sender.send(make_rollout(2))

        worker = threading.Thread(target=asyncio.run, args=(work(),))
        worker.start()
        lease = receiver.next(40.0)
        assert lease is not None
        with pytest.raises(
            StuckError, match=r"has no room: .* 1 leases with 1 rollouts are neither committed"
        ):
            receiver.next(40.0)
        lease.commit()
        second = receiver.next(40.0)
        assert second is not None
        second.commit()
        worker.join(40.0)


def test_a_worker_that_dropped_its_last_sample_is_not_without_room() -> None:
    session = SenderSession(
        producer=PRODUCER,
        name="w7",
        streams=[Stream(1, 1)],
        last=2,
        settled=SeqSet(),
        window=8,
        settle="committed",
        timing=Timing(),
    )
    session.connected(0.0)
    session.on_message(Welcome(session.session, b"r" * 16, 0, "sample/1", (), 8, 1 << 20), 0.0)
    session.drop(2, 18)
    session.take_messages()
    session.tick(1.0)
    (report,) = session.take_messages()
    assert isinstance(report, Report)
    assert report.last_sequence == 1
    producer = Producer(PRODUCER, "w7")
    producer.stream(1).received.add(1)
    producer.report(report, 1.0)
    assert producer.crowded_s is None
    producer.report(msgspec.structs.replace(report, last_sequence=2), 2.0)
    assert producer.crowded_s == 2.0


def test_nothing_is_awaited_of_workers_that_are_at_work() -> None:
    trainer = Trainer()
    assert what_is_awaited(trainer.pool, 9.0) == []
