"""What one peer says must end nobody else: not the receiver, nor a sender, an observer or a rank."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest
import xxhash
from trainer_bridge import ConfigError, ReceiverConfig, SampleSender
from trainer_bridge.block_pool import BlockPool
from trainer_bridge.bundle import join
from trainer_bridge.codec import Frames, decode_frames, draft
from trainer_bridge.errors import ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.member import Member
from trainer_bridge.memory_transport import MemoryClient
from trainer_bridge.messages import KINDS, Bye, DataHead, Error, Hello, Message, Status, Welcome
from trainer_bridge.rank_messages import Ask, Done, Ready, Share, ShareGroup, ShareRollout, Verdict
from trainer_bridge.session.handshake import FEATURES, SCHEMAS
from trainer_bridge.session.ledger import STRANGERS
from trainer_bridge.session.rank import RankSession
from trainer_bridge.session.steps import StepTable
from trainer_bridge.testing import make_sample
from trainer_bridge.wire_types import MAX_NAME, MAX_TEXT

Scenes = Callable[..., AbstractContextManager[Any]]
LOUD = ReceiverConfig(malformed_limit=1 << 30, messages_per_s=1 << 30)
"""Nothing is left unread: everything must be withstood."""
PEERS = (b"a" * 16, b"b" * 16)
BIG = "\x01" * 400_000


def hello(**changes: Any) -> Hello:
    said = Hello(1, "producer", PEERS[0], "w", 0, 0, SCHEMAS, FEATURES, 1, ((1, 1),))
    return msgspec.structs.replace(said, **changes)


def unchecked(kind: type[Any], body: Sequence[Any]) -> list[bytes]:
    """A head with a body that our own types do not allow."""
    start = struct.pack("<2sBBBBH", b"TB", 1, 0, KINDS[kind], 0, 0) + msgspec.msgpack.encode(body)
    return [start + xxhash.xxh3_64_intdigest(start).to_bytes(8, "little")]


def body_of(message: Message, **changes: Any) -> list[Any]:
    return list({**msgspec.structs.asdict(message), **changes}.values())


def data_with(**entry: Any) -> list[bytes]:
    frames = draft([make_sample(1, tokens=8)]).numbered(PEERS[0], 1, 1, 0)
    head = decode_head(frames.head)
    assert isinstance(head, DataHead)
    arrays = (msgspec.structs.replace(head.arrays[0], **entry), *head.arrays[1:])
    return [encode_head(msgspec.structs.replace(head, arrays=arrays)), bytes(frames.payload)]


ENDED_IT = {
    "a stream beyond 64 bits": [unchecked(Hello, body_of(hello(), streams=[[1, 2**64 - 1]]))],
    "a name of a megabyte, refused": [unchecked(Hello, body_of(hello(), name="x" * 1_000_000, minor_min=9))],
    "a schema of a megabyte": [unchecked(Hello, body_of(hello(), schemas=[["x" * 1_000_000, 1]]))],
    "a dtype of 400 kB": [[encode_head(hello())], data_with(dtype=BIG)],
    "an array name of 400 kB": [[encode_head(hello())], data_with(name=BIG)],
}


@pytest.mark.parametrize("what", ENDED_IT)
def test_one_message_whose_answer_could_not_be_encoded_ended_the_receiver(scene: Scenes, what: str) -> None:
    with scene() as it:
        client = MemoryClient(it.server)
        it.say(client, *ENDED_IT[what])
        (error,) = [message for message in it.heard(client) if isinstance(message, Error)]
        assert error.code == ErrorCode.BAD_BODY
        assert len(error.text) <= 500
        it.serves(9)


def test_long_names_ended_the_receiver_as_soon_as_somebody_looked_on(scene: Scenes) -> None:
    with scene() as it:
        clients = [MemoryClient(it.server) for _ in range(300)]
        for number, client in enumerate(clients):
            it.say(client, hello(peer=number.to_bytes(16, "little"), name="\U0001f525" * MAX_NAME))
        watcher = MemoryClient(it.server)
        it.say(watcher, hello(role="observer", peer=PEERS[1]))
        it.network.run(1.5)
        (status,) = [message for message in it.heard(watcher) if isinstance(message, Status)]
        assert len(status.producers) == 256
        it.serves(9)


def test_who_makes_its_own_answer_too_large_is_given_up_and_nobody_else(scene: Scenes) -> None:
    """An epoch costs 5 kB of every ACK when its numbers are full of holes."""
    with scene(msgspec.structs.replace(LOUD, window=1 << 20, queue_messages=1 << 20)) as it:
        client = MemoryClient(it.server)
        streams = tuple((epoch, 1) for epoch in range(1, 301))
        it.say(client, hello(epoch=300, streams=streams))
        ledger = it.receiver._loop.session.ledger  # pyright: ignore[reportPrivateUsage]
        for state in ledger.producers[PEERS[0]].streams.values():
            for number in range(2**40, 2**40 + 1024, 2):
                state.received.add(number)
        it.network.run(1.5)
        assert it.receiver.stats().rejected == {"too_large": 1}
        (producer,) = it.receiver.stats().producers
        assert producer.presence == "lost"
        it.serves(9)


def test_a_connection_that_speaks_for_another_lets_go_of_the_first(scene: Scenes) -> None:
    """The credit of a producer whose connection had become an observer's ended the receiver."""
    with scene() as it:
        client = MemoryClient(it.server)
        frames = draft([make_sample(1, tokens=8)]).numbered(PEERS[0], 1, 1, 0)
        it.say(client, hello(), frames)
        it.say(client, hello(role="observer", peer=PEERS[1], session=2, epoch=0, streams=()))
        (producer,) = it.receiver.stats().producers
        assert producer.presence == "lost"
        it.serves(9)


def test_fresh_ids_cost_no_memory_and_none_that_sent_is_forgotten(scene: Scenes) -> None:
    with scene(msgspec.structs.replace(LOUD, max_producers=STRANGERS + 50)) as it:
        it.serves(7)
        client = MemoryClient(it.server)
        for number in range(2 * STRANGERS):
            it.say(client, hello(peer=number.to_bytes(16, "little"), session=number + 1))
        known = it.receiver.stats().producers
        assert len(known) == STRANGERS + 2
        assert (7).to_bytes(16, "big").hex() in {producer.producer for producer in known}
        others = [MemoryClient(it.server) for _ in range(STRANGERS + 50)]
        for number, other in enumerate(others):
            it.say(other, hello(peer=(10_000 + number).to_bytes(16, "little")))
        codes = [m.code for other in others for m in it.heard(other) if isinstance(m, Error)]
        assert set(codes) == {ErrorCode.TOO_MANY_PRODUCERS}
        assert len(it.receiver.stats().producers) == STRANGERS + 50
        for other in others:
            other.cut()
        it.network.run(40.0)
        it.serves(8)


def test_a_number_that_was_never_given_is_refused_with_bad_sequence(scene: Scenes) -> None:
    with scene() as it:
        client = MemoryClient(it.server)
        it.say(client, hello())
        rollout = draft([make_sample(1, tokens=8)])
        it.say(client, rollout.numbered(PEERS[0], 1, 0, 0), rollout.numbered(PEERS[0], 7, 1, 0))
        errors = [message for message in it.heard(client) if isinstance(message, Error)]
        assert [(e.code, e.epoch, e.sequence) for e in errors] == [
            (ErrorCode.BAD_SEQUENCE, 1, 0),
            (ErrorCode.BAD_SEQUENCE, 7, 1),
        ]
        it.serves(9)


def test_a_bundle_holds_data_alone_and_each_is_judged_alone(scene: Scenes) -> None:
    with scene() as it:
        client = MemoryClient(it.server)
        it.say(client, hello())
        good = [draft([make_sample(n, tokens=8)]).numbered(PEERS[0], 1, n, 0) for n in (1, 2)]
        bad = Frames(good[0].head, bytes(len(good[0].payload)))
        other = [Frames(encode_head(message), b"") for message in (Bye(1, ""), hello(peer=PEERS[1]))]
        inner = Frames(*map(bytes, join(good, BlockPool())))
        it.say(client, join([good[0], bad, *other, inner, good[1]], BlockPool()))
        errors = [message.code for message in it.heard(client) if isinstance(message, Error)]
        assert sorted(errors) == [ErrorCode.UNKNOWN_KIND] * 3  # the damaged one was a repetition by then
        assert it.receiver.stats().messages == 2
        assert [producer.presence for producer in it.receiver.stats().producers] == ["connected"]


def test_a_rank_that_asks_and_never_reads_costs_the_memory_of_one_answer() -> None:
    steps = StepTable()
    steps.open(1, 2)
    for number in range(100):
        steps.on_message(b"peer", PEERS[1], Ask(1, 1, 3 + number, 1))  # it counts more ranks than there are
        steps.on_message(b"peer", PEERS[1], Done(1, number, False, "x" * 1000))
    assert len(waiting(steps)) == 1
    for number in range(100):
        steps.on_message(b"peer", PEERS[1], Ask(1, 1, 2, 1))
        if not number:
            steps.start(1, {1: (Share(0, 0, ()), ())})
    assert [type(message) for message in waiting(steps)] == [Share]
    for _ in range(100):
        steps.on_message(b"peer", PEERS[1], Ready(1, 1))
    assert [type(message) for message in waiting(steps)] == [Share, Verdict]
    steps.on_message(b"peer", PEERS[1], Done(1, 1, False, "x" * MAX_TEXT))
    assert all(decode_head(encode_head(message)) == message for message in waiting(steps))


def waiting(steps: StepTable) -> list[Message]:
    """What the one rank has not taken yet."""
    queue = steps._out[b"peer"]  # pyright: ignore[reportPrivateUsage]
    return [message for message in queue if not isinstance(message, Member)]


def test_a_rank_takes_no_step_that_it_does_not_hold() -> None:
    rank = RankSession(process=PEERS[0], rank=1, timing=LOUD.timing)
    rank.connected(0.0)
    rank.on_message(Welcome(1, PEERS[1], 0, "sample/1", (), 64, 1 << 20), 0.0)
    rank.ask(2, 1)
    said = ShareRollout(
        rollout_id=(1).to_bytes(16, "big"), attempt=0, producer_name="w", restored=False, nacks=0, staleness=0
    )
    group = ShareGroup(group_id=PEERS[1], size=1, complete=True, rollouts=(said,))
    rank.on_message(Share(1, 5, (group,)), 0.0)
    rank.on_message(Verdict(1, 5, "go"), 0.0)
    assert rank.granted is None
    frames = draft([make_sample(1, tokens=8)]).numbered(PEERS[0], 1, 1, 0)
    for _ in range(3):
        rank.on_data(decode_frames(frames), 0.0)
    rank.on_message(Verdict(1, 5, "go"), 0.0)
    assert rank.granted is not None
    assert len(rank.granted.rollouts) == 1
    rank.done(5, committed=False, reason="x" * 5000)
    *_, done = rank.take_messages()
    assert decode_head(encode_head(done)) == Done(1, 5, False, "x" * MAX_TEXT)


def test_what_no_peer_could_be_told_is_refused_where_it_is_said(scene: Scenes) -> None:
    with scene() as it:
        for wrong in (
            {"policy_run": "x" * 257},
            {"weights_location": "x" * 2049},
            {"weights_version": 2**31},
            {"min_version": -2},
            {"run_state": "stop"},
        ):
            with pytest.raises(ConfigError):
                it.receiver.publish(**wrong)  # pyright: ignore[reportArgumentType]
        assert it.receiver.publish(weights_version=1).generation > 0
        it.serves(9)
    with pytest.raises(ConfigError, match="producer has 257 characters, at most 256 fit"):
        SampleSender("tcp://127.0.0.1:1", producer="x" * 257)
    with pytest.raises(UnsendableError, match="attempt 4294967296 has more than 32 bits"):
        draft([msgspec.structs.replace(make_sample(1), attempt=2**32)])
    assert len(ProtocolError(ErrorCode.BAD_BODY, "x" * 5000).detail) == 500
