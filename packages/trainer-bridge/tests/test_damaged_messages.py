"""Bits that flip on the way from a receiver: asked for again, counted, and no end of anything."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
import zmq
from trainer_bridge import (
    RankReceiver,
    ReceiverConfig,
    RefusedError,
    SampleObserver,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    Timing,
)
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import Error, Hello, Message, Welcome
from trainer_bridge.rank_messages import Ask, Done, Verdict
from trainer_bridge.session import ObserverSession
from trainer_bridge.session.handshake import GREETINGS_BEFORE_REFUSAL
from trainer_bridge.session.rank import MISUNDERSTANDINGS_BEFORE_REFUSAL, RankSession
from trainer_bridge.testing import FaultProxy, Faults, make_rollout

SLOW = Timing(heartbeat_s=1.0, peer_timeout_s=30.0, greet_again_s=1.0)
DAMAGE = ProtocolError(ErrorCode.BAD_HEAD_HASH, "the head's bytes do not match their hash")
HELLO_UNREAD = Error(0, ErrorCode.BAD_HEAD_HASH, "the head's bytes do not match their hash")


def welcome(session: int) -> Welcome:
    return Welcome(session, b"r" * 16, 0, "sample/1", (), 4, 1 << 20, sequence_limit=9, byte_limit=99)


def of_kind(kind: int) -> bytes:
    """A whole head of a kind that may come with a later version."""
    head = struct.pack("<2sBBBBH", b"TB", 1, 0, kind, 0, 0) + b"\x91\x01"
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def test_a_sender_counts_what_it_cannot_read_and_says_it_once(
    wait: Callable[..., None], caplog: pytest.LogCaptureFixture, sender_config: Callable[..., SenderConfig]
) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, 10_000)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    caplog.set_level(logging.WARNING, logger="trainer_bridge")
    with ThreadPoolExecutor(1) as thread:
        opened = thread.submit(SampleSender, f"tcp://127.0.0.1:{port}", config=sender_config())
        peer, raw = router.recv_multipart()
        hello = decode_head(raw)
        assert isinstance(hello, Hello)
        for damaged in (b"noise", of_kind(200), encode_head(welcome(hello.session))[:-1] + b"?"):
            router.send_multipart([peer, damaged])
        router.send_multipart([peer, encode_head(welcome(hello.session))])
        sender = opened.result(40.0)
    assert sender.stats().unreadable == 3
    router.send_multipart([peer, of_kind(99)])  # also on an open session
    wait(lambda: sender.stats().unreadable == 4)
    assert sender.stats().connected
    assert [record.levelname for record in caplog.records if "cannot be read" in record.message] == [
        "WARNING"
    ]
    sender.close(drain_s=0.0)
    router.close(0)
    context.term()


def greetings(messages: list[Message]) -> list[int]:
    return [message.session for message in messages if isinstance(message, Hello)]


def test_a_damaged_greeting_of_a_guest_is_repeated_at_once_and_not_for_ever() -> None:
    """One flipped bit in HELLO, or in its answer, ended an observer and a rank for good."""
    for session in (
        ObserverSession(observer=b"o" * 16, name="o", timing=SLOW),
        RankSession(process=b"p" * 16, rank=1, timing=SLOW),
    ):
        session.connected(0.0)
        assert greetings(session.take_messages()) == [1]
        session.on_message(HELLO_UNREAD, 0.0)
        for _ in range(GREETINGS_BEFORE_REFUSAL - 2):
            assert session.state == "greeting"
            session.tick(0.0)
            assert greetings(session.take_messages()) == [1]
            session.on_garbage(DAMAGE, 0.0)
        session.on_message(welcome(1), 0.0)
        assert session.state == "open"
        assert session.unreadable == GREETINGS_BEFORE_REFUSAL - 2
        # Whoever answers nothing else speaks something else.
        session.disconnected()
        session.connected(1.0)
        for _ in range(GREETINGS_BEFORE_REFUSAL):
            session.on_garbage(DAMAGE, 1.0)
        assert session.state == "refused"
        assert session.refusal is not None
        assert "the peer's answer to HELLO cannot be read" in session.refusal.text


def test_a_damaged_report_ends_no_observer() -> None:
    session = ObserverSession(observer=b"o" * 16, name="o", timing=SLOW)
    session.connected(0.0)
    session.on_message(welcome(1), 0.0)
    session.take_messages()
    session.on_message(Error(1, ErrorCode.BAD_HEAD_HASH, ""), 0.0)
    session.on_garbage(DAMAGE, 0.0)
    assert (session.state, session.take_messages(), session.unreadable) == ("open", [], 1)


@pytest.mark.parametrize("role", ["observer", "rank"])
def test_a_quarantine_ends_no_guest(role: str) -> None:
    """It ends by itself, and what was malformed may have been damaged on the way."""
    session = (
        ObserverSession(observer=b"o" * 16, name="o", timing=SLOW)
        if role == "observer"
        else RankSession(process=b"p" * 16, rank=1, timing=SLOW)
    )
    session.connected(0.0)
    session.on_message(welcome(1), 0.0)
    session.on_message(Error(1, ErrorCode.QUARANTINED, "too much"), 0.0)
    assert (session.state, session.refusal, session.quarantine) == ("open", None, "too much")
    session.disconnected()
    session.connected(1.0)
    session.on_message(welcome(2), 1.0)
    assert session.quarantine == ""
    session.on_message(Error(2, ErrorCode.WRONG_ROLE, ""), 1.0)
    assert session.state == "refused"


def test_a_noisy_link_does_not_refuse_a_rank_that_waits_for_hours() -> None:
    """The count went back to 0 with an answer alone: one damaged message in minutes was too much one day."""
    session = RankSession(process=b"p" * 16, rank=1, timing=SLOW)
    session.connected(0.0)
    session.on_message(welcome(1), 0.0)
    session.ask(2, 4)
    now_s = 0.0
    for number in range(1, 4 * MISUNDERSTANDINGS_BEFORE_REFUSAL):
        now_s += 2 * SLOW.heartbeat_s
        session.on_garbage(DAMAGE, now_s)
        session.on_garbage(DAMAGE, now_s, is_data=True)  # of a share that was on its way
        session.on_message(welcome(number + 1), now_s)
        assert session.state == "open"


def test_damaged_rollouts_that_were_on_their_way_are_no_answer_to_a_greeting() -> None:
    session = RankSession(process=b"p" * 16, rank=1, timing=SLOW)
    session.connected(0.0)
    for _ in range(2 * GREETINGS_BEFORE_REFUSAL):
        session.on_garbage(DAMAGE, 0.0, is_data=True)
    assert session.state == "greeting"


def test_a_rank_greets_anew_after_damage_and_says_again_what_it_wants() -> None:
    session = RankSession(process=b"p" * 16, rank=1, timing=SLOW)
    session.connected(0.0)
    session.on_message(welcome(1), 0.0)
    session.ask(2, 4)
    session.take_messages()
    for number in range(1, MISUNDERSTANDINGS_BEFORE_REFUSAL):
        if number % 2:
            session.on_garbage(DAMAGE, 0.0)  # SHARE, VERDICT or DATA of the share
        else:
            session.on_message(Error(number, ErrorCode.BAD_HEAD_HASH, ""), 0.0)  # ASK or READY
        assert greetings(session.take_messages()) == [number + 1]
        session.on_message(welcome(number + 1), 0.0)
        assert session.take_messages() == [Ask(number + 1, 1, 2, 4)]
    session.on_message(Verdict(session.session, 0, "none", ""), 0.0)  # an answer: the network is not to blame
    session.done(7, committed=True, reason="")
    session.take_messages()
    session.on_message(Error(session.session, ErrorCode.BAD_HEAD_HASH, ""), 0.0)
    session.on_message(welcome(session.session), 0.0)
    assert session.take_messages()[-1] == Done(session.session, 7, True, "")
    for _ in range(MISUNDERSTANDINGS_BEFORE_REFUSAL):
        session.on_garbage(DAMAGE, 0.0)
        session.on_message(welcome(session.session), 0.0)
    assert session.state == "refused"


def test_observers_and_ranks_come_in_through_a_network_that_flips_bits(
    receiver_config: Callable[..., ReceiverConfig], timing: Timing
) -> None:
    unreadable = {"observer": 0, "rank": 0}
    with SampleReceiver(config=receiver_config(malformed_limit=10_000)) as receiver:
        for seed in range(6):
            with (
                FaultProxy(receiver.address, Faults(flip=0.4), seed=seed) as proxy,
                SampleObserver(proxy.address, timing=timing) as observer,
            ):
                unreadable["observer"] += observer.unreadable
                proxy.faults = Faults()
            with (
                FaultProxy(receiver.address, Faults(flip=0.4), seed=seed) as proxy,
                RankReceiver(proxy.address, rank=1, world=2, timing=timing) as rank,
            ):
                unreadable["rank"] += rank.unreadable
                proxy.faults = Faults()
        assert sum(receiver.stats().rejected.values()) > 0
    assert all(unreadable.values()), unreadable


def test_steps_go_to_a_rank_whose_network_flips_bits(
    receiver_config: Callable[..., ReceiverConfig], timing: Timing
) -> None:
    steps = 12
    with (
        SampleReceiver(config=receiver_config(malformed_limit=10_000)) as receiver,
        SampleSender(receiver.address, config=SenderConfig(settle="received")) as sender,
        FaultProxy(receiver.address, Faults(flip=0.1), seed=3) as proxy,
        RankReceiver(proxy.address, rank=1, world=2, timing=timing) as rank,
        ThreadPoolExecutor(1) as thread,
    ):
        receiver.world = 2
        for n in range(2 * steps):
            sender.send_group(make_rollout(n, parts=1, tokens=16, group=n))
        seen: list[str] = []
        for _ in range(steps):
            theirs = thread.submit(rank.next_batch, groups=2, deadline_s=30.0)
            leases = [receiver.next_batch(groups=2, deadline_s=30.0), theirs.result(30.0)]
            for lease in reversed(leases):
                assert lease is not None
                seen += [rollout.rollout_id for rollout in lease.rollouts]
                lease.commit()
        assert sorted(seen) == [f"{n:032x}" for n in range(2 * steps)]
        stats = receiver.stats()
        assert (stats.committed, stats.leased, stats.unaccounted) == (2 * steps, 0, 0)
        assert rank.unreadable > 0
        assert sum(stats.rejected.values()) > 0
        proxy.faults = Faults()


def test_a_stranger_that_answers_an_observer_is_named() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, 10_000)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with ThreadPoolExecutor(1) as thread:
        opened = thread.submit(SampleObserver, f"tcp://127.0.0.1:{port}")
        for _ in range(GREETINGS_BEFORE_REFUSAL):
            router.send_multipart([router.recv_multipart()[0], b"-ERR unknown command"])
        with pytest.raises(RefusedError, match="answer to HELLO cannot be read"):
            opened.result(40.0)
    router.close(0)
    context.term()
