"""One socket pair carries samples and control: control does not wait behind the samples of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import zmq
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import Control, DataHead, Hello, Message, Welcome
from trainer_bridge.rank_messages import Ask, Done, Ready, Share, Verdict
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.testing import make_rollout, make_sample

BIG = 1 << 16
"""Tokens: 832 KiB in all, more than a few of which no kernel buffers."""
COUNT = 24


@contextmanager
def narrow(kind: int) -> Iterator[zmq.Socket[bytes]]:
    """A socket that soon holds the other side up when it is not read."""
    context = zmq.Context()
    socket = context.socket(kind)
    for option in (zmq.RCVHWM, zmq.SNDHWM):
        socket.setsockopt(option, 1)
    for option in (zmq.RCVBUF, zmq.SNDBUF):
        socket.setsockopt(option, 1 << 16)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    try:
        yield socket
    finally:
        socket.close(0)
        context.term()


def test_control_reaches_a_worker_whose_samples_nobody_reads(
    wait: Callable[..., None], sender_config: Callable[..., SenderConfig]
) -> None:
    with narrow(zmq.ROUTER) as router, ThreadPoolExecutor(1) as thread:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        opened = thread.submit(SampleSender, f"tcp://127.0.0.1:{port}", config=sender_config())
        peer, raw = router.recv_multipart()
        hello = decode_head(raw)
        assert isinstance(hello, Hello)
        welcome = Welcome(hello.session, b"r" * 16, 0, "sample/1", (), 1000, 1 << 30)
        router.send_multipart(
            [peer, encode_head(msgspec.structs.replace(welcome, sequence_limit=1000, byte_limit=1 << 30))]
        )
        sender = opened.result(40.0)
        for number in range(COUNT):
            sender.send(make_sample(number, tokens=BIG))
        wait(lambda: sender.stats().in_flight == COUNT)
        control = Control(hello.session, 1, "abort", 3, -1, "", "s3://w/3")
        router.send_multipart([peer, encode_head(control)])
        wait(lambda: sender.control.run_state == "abort")
        assert sender.control.weights_location == "s3://w/3"
        assert sender.stats().in_flight == COUNT  # not one of them had been read when it came
        sender.close(drain_s=0.0)


def test_control_reaches_workers_while_a_rank_does_not_read_its_share(
    wait: Callable[..., None], receiver_config: Callable[..., ReceiverConfig]
) -> None:
    with (
        narrow(zmq.DEALER) as rank,
        SampleReceiver(config=receiver_config(rank_split="rollouts")) as receiver,
        SampleSender(receiver.address) as sender,
        ThreadPoolExecutor(1) as thread,
    ):
        receiver.world = 2
        rank.connect(receiver.address)
        for message in (Hello(1, "rank", b"k" * 16, "rank 1", 0, 0, SCHEMAS), Ask(1, 1, 2, 1)):
            rank.send(encode_head(message))
        group = [make_rollout(n, parts=1, tokens=BIG, group=0)[0] for n in range(COUNT)]
        sender.send_group(group)
        mine = thread.submit(receiver.next_batch, groups=1, deadline_s=30.0)
        wait(lambda: receiver.stats().leased == COUNT)
        receiver.publish(run_state="drain", weights_version=7)
        wait(lambda: sender.control.run_state == "drain")
        assert not mine.done()  # the rank has not even taken its WELCOME
        heard = list_until(rank, lambda heard: rollouts(heard) == COUNT // 2)
        rank.send(encode_head(Ready(1, step_of(heard))))
        heard += list_until(rank, lambda heard: isinstance(heard[-1], Verdict))
        assert isinstance(heard[-1], Verdict)
        assert heard[-1].verdict == "go"
        heard += list_until(rank, lambda heard: isinstance(heard[-1], Control))
        assert "drain" in [message.run_state for message in heard if isinstance(message, Control)]
        rank.send(encode_head(Done(1, step_of(heard), True)))
        lease = mine.result(30.0)
        assert lease is not None
        lease.commit()


def list_until(rank: zmq.Socket[bytes], done: Callable[[list[Message]], bool]) -> list[Message]:
    """What the rank reads, up to the message that it waits for."""
    heard = [decode_head(rank.recv_multipart()[0])]
    while not done(heard):
        heard.append(decode_head(rank.recv_multipart()[0]))
    return heard


def rollouts(heard: list[Message]) -> int:
    return len({message.rollout_id for message in heard if isinstance(message, DataHead)})


def step_of(heard: list[Message]) -> int:
    return next(message.step for message in reversed(heard) if isinstance(message, Share))
