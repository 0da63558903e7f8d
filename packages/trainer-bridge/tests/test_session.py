"""The state machines of both ends over a network that loses, repeats and reorders: applied exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_bridge.codec import Frames, decode_frames, draft
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.memory_transport import Fault, MemoryClient, MemoryServer
from trainer_bridge.messages import Ack, Credit, Error, Hello, Report, Welcome
from trainer_bridge.payload import Buffer
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import (
    Identity,
    ObserverSession,
    negotiate,
)
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.session.rank import RankSession
from trainer_bridge.session.refusal_kinds import REFUSAL_KINDS, SESSION_ERRORS, kind_of_refusal
from trainer_bridge.session.watermark import Watermark
from trainer_bridge.testing import make_sample

from .sessions import PRODUCER, TIMING, SessionReceiver, SessionSender


class Producer(SessionSender[MemoryClient]):
    """A sender of samples by number."""

    def __init__(self, server: MemoryServer, *, window: int = 8, out: Fault, back: Fault) -> None:
        super().__init__(MemoryClient(server, outward=out, inward=back), window=window)

    def send(self, rollout: int) -> None:
        self.put([make_sample(rollout, tokens=8)])


class Consumer(SessionReceiver):
    """A receiver, and the rollouts in the order of being applied."""

    def __init__(self, server: MemoryServer, **more: Any) -> None:
        super().__init__(server, **more)
        self.applied: list[int] = []
        self.queue: list[tuple[Identity, int, int]] = []
        self.longest_queue = 0

    def step(self, now_s: float, *, take: int = 100) -> None:
        for accepted, _ in self.take_in(now_s):
            self.queue.append((accepted.identity, int(accepted.data.rollout_id, 16), accepted.nbytes))
        self.longest_queue = max(self.longest_queue, len(self.queue))
        for identity, rollout, nbytes in self.queue[:take]:
            self.session.mark_taken(identity, nbytes)
            self.applied.append(rollout)
            self.session.mark_committed(identity, now_s)
        del self.queue[:take]
        self.answer(now_s)


def faults(seed: int, loss: float, repeat: float, reorder: float) -> Fault:
    """Loses, repeats and delays messages; a delayed one comes out with the next."""
    rng = np.random.default_rng(seed)
    held: list[Sequence[Buffer]] = []

    def fault(frames: Sequence[Buffer]) -> Sequence[Sequence[Buffer]]:
        out: list[Sequence[Buffer]] = []
        if rng.random() >= loss:
            out.append(frames)
        if rng.random() < repeat:
            out.append(frames)
        if out and rng.random() < reorder:
            held.append(out.pop())
        if held and rng.random() < 0.5:
            out.insert(int(rng.integers(len(out) + 1)), held.pop(int(rng.integers(len(held)))))
        return out

    return fault


NETWORKS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "loss": st.sampled_from([0.0, 0.1, 0.4]),
        "repeat": st.sampled_from([0.0, 0.3]),
        "reorder": st.sampled_from([0.0, 0.5]),
        "cuts": st.sets(st.integers(1, 40), max_size=4),
        "window": st.integers(1, 12),
        "queue": st.integers(1, 8),
    }
)


def check_applied_exactly_once(
    seed: int, loss: float, repeat: float, reorder: float, cuts: set[int], window: int, queue: int
) -> None:
    server = MemoryServer()
    consumer = Consumer(server, config=ReceiverConfig(timing=TIMING, queue_messages=queue))
    producer = Producer(
        server,
        window=window,
        out=faults(seed, loss, repeat, reorder),
        back=faults(seed + 1, loss, repeat, reorder),
    )
    count, now_s = 40, 0.0
    for step in range(2000):
        if step < count:
            producer.send(step)
        if step in cuts:
            producer.client.cut()
            producer.client.reopen()
        producer.step(now_s)
        consumer.step(now_s, take=1 + step % 3)
        now_s += 0.5
        if step >= count and producer.session.unsettled == 0:
            break
    assert producer.session.unsettled == 0
    assert sorted(consumer.applied) == list(range(count))
    if not (loss or reorder):
        assert consumer.applied == list(range(count))
    # Credit bounds the queue: a stale limit lets at most a window more through.
    assert consumer.longest_queue <= queue + window
    assert not producer.session.dropped
    state = consumer.session.ledger.producers[PRODUCER].streams[1]
    assert state.committed == SeqSet(count)
    assert state.received.gaps == 0


@settings(max_examples=20, deadline=None)
@given(NETWORKS)
def test_applied_exactly_once(network: dict[str, Any]) -> None:
    check_applied_exactly_once(**network)


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=200, deadline=None)
@given(NETWORKS)
def test_applied_exactly_once_over_many_networks(network: dict[str, Any]) -> None:
    check_applied_exactly_once(**network)


def pair(**config: object) -> tuple[Producer, Consumer]:
    server = MemoryServer()
    consumer = Consumer(server, config=ReceiverConfig(**{"timing": TIMING, **config}))
    return Producer(server, out=lambda f: (f,), back=lambda f: (f,)), consumer


def run(producer: Producer, consumer: Consumer, steps: int = 10, now_s: float = 0.0, take: int = 100) -> None:
    for step in range(steps):
        producer.step(now_s + step * 0.01)
        consumer.step(now_s + step * 0.01, take=take)


def test_a_receiver_that_forgot_everything_gets_what_was_not_committed() -> None:
    producer, consumer = pair()
    for n in range(6):
        producer.send(n)
    run(producer, consumer, take=2, steps=2)
    assert consumer.applied == [0, 1]
    run(producer, consumer, take=0)
    assert producer.session.received.upto == 6
    reborn = Consumer(MemoryServer())
    producer.client.reopen(reborn.server)
    run(producer, reborn)
    assert reborn.applied == [2, 3, 4, 5]
    assert producer.session.unsettled == 0


def test_an_old_acknowledgement_does_not_count_for_a_new_connection() -> None:
    producer, consumer = pair()
    producer.send(1)
    producer.step(0.0)
    consumer.step(0.0, take=0)
    late = producer.client.events(100)
    producer.client.reopen(Consumer(MemoryServer()).server)
    producer.step(0.1)
    for event in late:
        if event.kind == "message":
            producer.session.on_message(decode_head(event.frames[0]), 0.1)
    assert 1 not in producer.session.received


def test_data_before_hello_is_answered_and_heals() -> None:
    producer, consumer = pair()
    producer.send(1)
    run(producer, consumer)
    # The receiver is replaced behind a connection that the sender believes to stand.
    reborn = Consumer(consumer.server)
    producer.send(2)
    run(producer, reborn, now_s=1.0)
    assert reborn.applied == [2]
    assert producer.session.unsettled == 0


def test_one_rollout_under_two_identities_is_applied_once_and_acknowledged_twice() -> None:
    producer, consumer = pair()
    producer.send(7)
    producer.send(7)
    run(producer, consumer, take=0)
    state = consumer.session.ledger.producers[PRODUCER].streams[1]
    assert state.received.upto == 2
    assert state.committed.upto == 0  # the second waits for the first
    run(producer, consumer, now_s=2.0)
    assert consumer.applied == [7]
    assert state.committed.upto == 2
    assert consumer.session.ledger.producers[PRODUCER].duplicates == 1


def test_an_attempt_that_was_replaced_is_not_applied_any_more() -> None:
    producer, consumer = pair()
    for seq, attempt in ((1, 1), (2, 0)):
        sample = msgspec.structs.replace(make_sample(7, tokens=8), attempt=attempt)
        producer.messages.append(draft([sample]).numbered(PRODUCER, 1, seq, 0))
        producer.session.last = seq
    run(producer, consumer)
    assert consumer.applied == [7]
    assert consumer.session.ledger.producers[PRODUCER].fenced == 1
    assert producer.session.unsettled == 0


def test_a_message_that_is_refused_three_times_is_dropped_with_a_counted_reason() -> None:
    producer, consumer = pair()
    good = draft([make_sample(1, tokens=8)])
    bad = msgspec.structs.replace(
        good.head, schema="sample/9", producer=PRODUCER, epoch=1, sequence=1, created_ns=0
    )
    producer.messages.append(Frames(encode_head(bad), good.payload))
    producer.session.last = 1
    producer.send(2)
    run(producer, consumer, steps=10)
    assert producer.session.dropped == {ErrorCode.UNKNOWN_SCHEMA: 1}
    assert consumer.session.rejected == {ErrorCode.UNKNOWN_SCHEMA: 3}
    assert consumer.applied == [2]
    assert producer.session.unsettled == 0
    assert producer.session.damaged == 0


def test_a_message_that_is_damaged_on_every_way_is_never_dropped_and_asked_for_less_and_less() -> None:
    producer, consumer = pair()
    good = draft([make_sample(1, tokens=8)]).numbered(PRODUCER, 1, 1, 0)
    producer.messages.append(Frames(good.head, bytes(len(good.payload))))
    producer.session.last = 1
    producer.send(2)
    sent_s: list[float] = []
    for tick in range(400):
        before = producer.session.resent
        producer.step(tick * 0.1)
        consumer.step(tick * 0.1)
        sent_s += [tick * 0.1] * (producer.session.resent - before)
    assert (producer.session.dropped, producer.session.unsettled) == ({}, 1)
    assert consumer.applied == [2]  # it holds up nobody else
    waits = np.diff(sent_s)
    assert waits[0] < waits[2] <= max(waits) < TIMING.resend_s + 2 * TIMING.heartbeat_s
    assert (
        producer.session.damaged == consumer.session.rejected[ErrorCode.BAD_PAYLOAD_HASH] == 1 + len(sent_s)
    )
    assert producer.session.damage.startswith(f"message 1 ({1 + len(sent_s)} copies of it so far) arrived")
    producer.messages[0] = good  # the network is mended
    run(producer, consumer, now_s=50.0)
    assert consumer.applied == [2, 1]
    assert producer.session.unsettled == 0


def test_every_refusal_has_a_kind_and_those_of_a_newer_peer_too() -> None:
    assert set(REFUSAL_KINDS) == set(ErrorCode)
    assert all((kind == "session") == (code >= SESSION_ERRORS) for code, kind in REFUSAL_KINDS.items())
    assert (kind_of_refusal(31), kind_of_refusal(99)) == ("content", "session")


def test_only_what_no_hash_vouched_for_counts_as_damage() -> None:
    """A bit flipped anywhere in either frame is refused with a code that a whole copy mends."""
    whole = draft([make_sample(1, tokens=8)]).numbered(PRODUCER, 1, 1, 0)
    frames = (whole.head, bytes(whole.payload))
    for n in (0, 1):
        for bit in range(0, 8 * len(frames[n]), 5):
            raw = bytearray(frames[n])
            raw[bit // 8] ^= 1 << bit % 8
            hurt = (bytes(raw), frames[1]) if n == 0 else (frames[0], bytes(raw))
            with pytest.raises(ProtocolError) as refused:
                decode_frames(Frames(*hurt))
            assert kind_of_refusal(refused.value.code) == "damage", (n, bit, refused.value)


def test_a_sender_in_quarantine_waits_and_is_not_refused_for_ever() -> None:
    producer, consumer = pair()
    producer.send(1)
    producer.step(0.0)
    session = producer.session
    session.on_message(Error(session.session, ErrorCode.QUARANTINED, "too many malformed messages"), 0.0)
    assert session.state != "refused"
    assert session.damage == "too many malformed messages"
    run(producer, consumer)
    assert consumer.applied == [1]


def test_a_trainer_that_restarts_on_a_clock_that_is_behind_is_heard() -> None:
    """Generations count from the start time; over a restart they say nothing."""
    producer, consumer = pair()
    run(producer, consumer)
    view = producer.session.control
    consumer.session.say_bye("the trainer is restarted")
    before = ControlBoard(base=10**9).set(run_state="pause", weights_version=5)
    producer.session.on_message(before.message(producer.session.session), 0.0)
    reborn = Consumer(MemoryServer(), receiver=b"s" * 16, board=ControlBoard(base=10))
    producer.client.reopen(reborn.server)
    run(producer, reborn, now_s=1.0)
    assert (view.state.generation, view.state.run_state) == (0, "pause")  # it has said nothing yet
    after = reborn.board.set(run_state="run", weights_version=4)
    reborn.session.publish()
    run(producer, reborn, now_s=2.0)
    assert view.state == after
    producer.client.cut()
    producer.client.reopen(reborn.server)  # the same start of it: nothing is forgotten
    run(producer, reborn, now_s=3.0)
    assert view.state == after


def test_guests_hear_a_restarted_trainer_on_a_clock_that_is_behind() -> None:
    for guest in (
        ObserverSession(observer=b"o" * 16, name="o", timing=TIMING),
        RankSession(process=b"m" * 16, rank=1, timing=TIMING),
    ):
        for receiver, base in ((b"r" * 16, 10**9), (b"s" * 16, 10)):
            guest.connected(0.0)
            guest.on_message(
                Welcome(guest.session, receiver, 0, "sample/1", (), 4, 1 << 20, sequence_limit=0), 0.0
            )
            state = ControlBoard(base=base).set(weights_version=base % 7)
            guest.on_message(state.message(guest.session), 0.0)
            assert guest.control.state == state
            guest.disconnected()


def test_a_producer_that_leaves_says_what_it_leaves_behind() -> None:
    producer, consumer = pair()
    for n in range(5):
        producer.send(n)
    run(producer, consumer, take=2, steps=3)
    run(producer, consumer, take=0, now_s=5.0)  # a heartbeat
    known = consumer.session.ledger.producers[PRODUCER]
    assert known.reported_unsettled > 0
    run(producer, consumer, now_s=5.2)
    producer.session.say_bye("closed")
    run(producer, consumer, now_s=5.3)
    assert (known.presence, known.reported_unsettled) == ("finished", 0)


def test_what_a_producer_left_behind_here_is_settled_by_commits_after_it() -> None:
    producer, consumer = pair()
    for n in range(5):
        producer.send(n)
    run(producer, consumer, take=0)
    producer.session.say_bye("closed")
    run(producer, consumer, take=0, now_s=1.0)
    known = consumer.session.ledger.producers[PRODUCER]
    assert (known.presence, known.reported_unsettled) == ("finished", 5)
    consumer.step(2.0)
    assert known.reported_unsettled == 0


def test_credit_stops_a_producer_until_its_messages_are_taken() -> None:
    producer, consumer = pair(queue_messages=4)
    for n in range(20):
        producer.send(n)
    run(producer, consumer, take=0, steps=20)
    assert len(consumer.queue) == 4
    run(producer, consumer, take=1, steps=40, now_s=1.0)
    assert consumer.applied == list(range(20))


def test_bytes_are_bounded_too_but_one_message_always_fits() -> None:
    producer, consumer = pair(queue_bytes=150)  # a message counts 100
    for n in range(6):
        producer.send(n)
    run(producer, consumer, take=0, steps=20)
    assert len(consumer.queue) <= 3
    run(producer, consumer, take=1, steps=40, now_s=2.0)
    assert consumer.applied == list(range(6))


def test_control_is_state_and_the_newest_wins() -> None:
    producer, consumer = pair()
    run(producer, consumer)
    board = ControlBoard(base=100)
    first, second = board.set(run_state="pause"), board.set(weights_version=5)
    session = producer.session.session
    producer.session.on_message(second.message(session), 0.0)
    producer.session.on_message(first.message(session), 0.0)
    assert producer.session.control.state == second
    assert (second.run_state, second.weights_version) == ("pause", 5)


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "session": 1,
        "role": "producer",
        "peer": PRODUCER,
        "name": "worker",
        "minor_min": 0,
        "minor_max": 0,
        "schemas": SCHEMAS,
        "epoch": 1,
        "streams": ((1, 1),),
    }
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def refusal_of(message: Hello) -> tuple[int, str]:
    consumer = Consumer(MemoryServer())
    consumer.session.on_message(b"x", message, 0.0)
    ((_, answer),) = consumer.session.take_messages(0.0)
    return answer.code, answer.text  # type: ignore[union-attr]


def test_peers_that_have_nothing_in_common_are_told_why() -> None:
    code, text = refusal_of(hello(minor_min=3, minor_max=4))
    assert code == ErrorCode.NO_COMMON_VERSION
    assert "upgrade trainer-bridge on the receiver's side" in text
    code, text = refusal_of(hello(schemas=(("sample/1", 1),)))
    assert code == ErrorCode.NO_COMMON_SCHEMA
    assert "install the same trainer-bridge on both sides" in text
    assert refusal_of(hello(streams=()))[0] == ErrorCode.BAD_BODY


def test_a_newer_peer_is_met_at_our_level() -> None:
    assert negotiate(hello(minor_max=9, features=("teleport",))) == (0, "sample/1", ())


def test_an_identity_has_one_owner_and_the_latest_epoch_wins() -> None:
    consumer = Consumer(MemoryServer())
    consumer.session.on_message(b"old", hello(epoch=2, streams=((2, 1),)), 0.0)
    consumer.session.on_message(b"new", hello(epoch=2, streams=((2, 1),), session=4), 0.0)
    answers = consumer.session.take_messages(0.0)
    codes = {peer: m.code for peer, m in answers if hasattr(m, "code")}
    assert codes == {b"old": ErrorCode.SUPERSEDED}
    consumer.session.on_message(b"zombie", hello(epoch=1), 0.0)
    ((peer, answer),) = consumer.session.take_messages(0.0)
    assert (peer, answer.code) == (b"zombie", ErrorCode.FENCED)  # type: ignore[union-attr]


def test_the_late_hello_of_an_older_connection_does_not_end_the_new_one() -> None:
    """It was read after its successor's, and the sender was refused for ever."""
    consumer = Consumer(MemoryServer())
    consumer.session.on_message(b"new", hello(session=2), 0.0)
    consumer.session.on_message(b"old", hello(session=1), 0.0)
    answers = consumer.session.take_messages(0.0)
    assert [(peer, m.session, m.code) for peer, m in answers if isinstance(m, Error)] == [
        (b"old", 1, ErrorCode.SUPERSEDED)
    ]
    assert consumer.session.ledger.producers[PRODUCER].peer == b"new"


@pytest.mark.parametrize("hello_first", [True, False])
def test_what_an_older_checkpoint_lacks_is_counted_also_if_a_hello_is_read_before_it_is_loaded(
    hello_first: bool,
) -> None:
    consumer = Consumer(MemoryServer())
    ledger = consumer.session.ledger
    done = Watermark()
    done.add(Identity(PRODUCER, 1, 1))
    greeting = hello(streams=((1, 4),))  # 2 and 3 are forgotten
    if hello_first:
        consumer.session.on_message(b"p", greeting, 0.0)
    ledger.load(done, [], frozenset())
    if not hello_first:
        consumer.session.on_message(b"p", greeting, 0.0)
    assert ledger.unavailable == 2


def test_an_observer_cannot_send_data_and_a_producer_only_its_own() -> None:
    consumer = Consumer(MemoryServer())
    consumer.session.on_message(b"o", hello(role="observer", epoch=0, streams=()), 0.0)
    consumer.session.on_message(b"p", hello(peer=b"q" * 16), 0.0)
    assert {type(m) for _, m in consumer.session.take_messages(0.0) if isinstance(m, Welcome)} == {Welcome}
    frames = draft([make_sample(1)]).numbered(PRODUCER, 1, 1, 0)
    for peer in (b"o", b"p"):
        consumer.server.arrive(peer, frames)
    consumer.step(0.0)
    assert consumer.applied == []
    assert consumer.session.rejected == {ErrorCode.WRONG_ROLE: 2}


def test_a_producer_that_ignores_its_credit_is_not_read() -> None:
    """Else a worker could fill the trainer's memory however small the queue is."""
    consumer = Consumer(MemoryServer(), config=ReceiverConfig(timing=TIMING, queue_messages=4))
    consumer.session.on_message(b"p", hello(), 0.0)
    for n in range(1, 9):
        consumer.server.arrive(b"p", draft([make_sample(n)]).numbered(PRODUCER, 1, n, 0))
    consumer.step(0.0, take=0)
    assert len(consumer.queue) == 4
    assert (consumer.session.beyond_credit, consumer.session.rejected) == (4, {})


def test_a_slow_observer_misses_copies_and_nobody_else_notices() -> None:
    producer, consumer = pair(observer_copies=3)
    observer = ObserverSession(observer=b"o" * 16, name="looker", timing=TIMING)
    observer.connected(0.0)
    for message in observer.take_messages():
        consumer.session.on_message(b"obs", message, 0.0)
    observer.on_message(consumer.session.take_messages(0.0)[0][1], 0.0)
    credit = observer.take_messages()
    copies = [list(consumer.session.observers()) for _ in range(5)]
    assert copies == [[b"obs"]] * 3 + [[]] * 2, "WELCOME is enough: its first CREDIT may be late"
    for message in credit:
        consumer.session.on_message(b"obs", message, 0.0)
    assert list(consumer.session.observers()) == [b"obs"]
    assert consumer.session.skipped_copies == 2
    producer.send(1)
    run(producer, consumer)
    assert consumer.applied == [1]


def test_silence_is_noticed_on_both_sides() -> None:
    producer, consumer = pair()
    run(producer, consumer)
    assert producer.session.tick(29.0)
    assert not producer.session.tick(31.0)
    consumer.session.tick(31.0)
    assert consumer.session.ledger.producers[PRODUCER].presence == "lost"


def test_bye_is_answered_and_the_producer_is_finished_not_lost() -> None:
    producer, consumer = pair()
    producer.send(1)
    run(producer, consumer)
    producer.session.say_bye("closed")
    run(producer, consumer, now_s=1.0)
    assert producer.session.state == "finished"
    assert consumer.session.ledger.producers[PRODUCER].presence == "finished"


def test_more_lost_messages_than_an_acknowledgement_names_stall_nobody() -> None:
    producer, consumer = pair()
    for n in range(1, 901):
        producer.send(n)
    for n in range(1, 901, 2):
        producer.session.lose(n)
    run(producer, consumer, steps=200)
    assert consumer.applied == list(range(2, 901, 2))
    assert (producer.session.unsettled, producer.session.in_flight) == (0, 0)
    stream = consumer.session.ledger.producers[PRODUCER].stream(1)
    assert (stream.received.upto, stream.received.gaps, stream.committed.gaps) == (900, 0, 0)


def test_with_a_share_of_one_a_lost_message_takes_no_place() -> None:
    producer, consumer = pair()
    for n in range(1, 41):
        producer.send(n)
    run(producer, consumer, steps=2, take=0)
    consumer.session.limit(1)
    for n in (*range(10, 14), 20, 40):
        producer.session.lose(n)
    run(producer, consumer, steps=100, now_s=0.1)
    assert consumer.applied == [n for n in range(1, 41) if n not in (10, 11, 12, 13, 20, 40)]
    assert consumer.session.has_credit(consumer.session.ledger.producers[PRODUCER])


def test_a_refused_message_stops_being_waited_for_two_heartbeats_later() -> None:
    """Before, an acknowledgement of it means that a copy has arrived after all."""
    producer, consumer = pair(queue_messages=1)
    good = draft([make_sample(1, tokens=8)])
    bad = msgspec.structs.replace(
        good.head, schema="sample/9", producer=PRODUCER, epoch=1, sequence=1, created_ns=0
    )
    producer.messages.append(Frames(encode_head(bad), good.payload))
    producer.session.last = 1
    producer.send(2)
    run(producer, consumer, steps=20)
    assert consumer.applied == []
    run(producer, consumer, steps=20, now_s=1.1)
    run(producer, consumer, steps=20, now_s=2.3)
    assert consumer.applied == [2]
    assert producer.session.dropped == {ErrorCode.UNKNOWN_SCHEMA: 1}


def welcome_of(message: Hello, **config: object) -> tuple[Consumer, Welcome]:
    consumer = Consumer(MemoryServer(), config=ReceiverConfig(**{"timing": TIMING, **config}))  # type: ignore[arg-type]
    consumer.session.on_message(b"p", message, 0.0)
    answer = consumer.session.take_messages(0.0)[0][1]
    assert isinstance(answer, Welcome)
    return consumer, answer


def test_credit_counts_what_is_missing_in_all_epochs() -> None:
    """The numbers of the epoch that begins stand behind a backlog that has not come yet."""
    fresh = hello(epoch=2, streams=((1, 1), (2, 3001)), starts=(1, 3001))
    assert welcome_of(fresh, queue_messages=16)[1].sequence_limit == 16
    # 1 to 4 and 3001 to 3089 are settled; 2996 numbers of the first epoch are missing, then come 3090 and on.
    later = hello(epoch=2, streams=((1, 5), (2, 3090)), starts=(1, 3001))
    assert welcome_of(later, queue_messages=16)[1].sequence_limit == 20
    assert welcome_of(later, queue_messages=2996)[1].sequence_limit == 3089
    consumer, answer = welcome_of(later, queue_messages=3000)
    assert answer.sequence_limit == 3093
    consumer.session.on_message(b"p", Report(1, 0, holes=((1, 5, 2**62), (2, 3092, 3092))), 0.0)
    ack, credit = consumer.session.take_messages(0.0)
    assert isinstance(ack[1], Ack)
    assert [level.received.upto for level in ack[1].levels] == [3000, 3091 - 2]
    assert isinstance(credit[1], Credit)
    assert credit[1].sequence_limit == 3089 + 3000 + 1


def test_a_number_belongs_to_one_epoch() -> None:
    consumer, _ = welcome_of(hello(epoch=2, streams=((1, 1), (2, 4)), starts=(1, 4)))
    consumer.server.arrive(b"p", draft([make_sample(4)]).numbered(PRODUCER, 1, 4, 0))
    consumer.step(0.0)
    assert consumer.session.rejected == {ErrorCode.BAD_SEQUENCE: 1}
    for streams, starts in (
        (((1, 5), (2, 9)), (6, 8)),
        (((1, 5), (2, 9)), (5,)),
        (((1, 9), (2, 5)), ()),
        (((2, 5), (1, 9)), ()),
    ):
        assert refusal_of(hello(epoch=2, streams=streams, starts=starts))[0] == ErrorCode.BAD_BODY


def test_holes_without_end_cost_no_memory() -> None:
    consumer, _ = welcome_of(hello())
    stream = consumer.session.ledger.producers[PRODUCER].stream(1)
    for report in range(300):
        at = 2 + 512 * report
        holes = tuple((1, n, n) for n in range(at, at + 512, 2))
        consumer.session.on_message(b"p", Report(1, 0, holes=holes), 0.0)
    assert stream.received.gaps <= 1 << 16
