"""Public bug reports of other projects, each as the behaviour we want instead."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from trainer_bridge import (
    ConnectError,
    ReceiverConfig,
    SampleObserver,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    Timing,
)
from trainer_bridge.head import encode_head
from trainer_bridge.messages import Hello
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.testing import differences, make_rollout, make_sample


def take(receiver: SampleReceiver, count: int) -> list[int]:
    got: list[int] = []
    for _ in range(count):
        lease = receiver.next(40.0)
        assert lease is not None
        got.append(int(lease.rollout_id, 16))
        lease.commit()
    return got


def test_vllm_50053_and_53217_a_reused_buffer_corrupts_nothing() -> None:
    """A small frame after a large one was "done" at once, and the large one was overwritten in flight."""
    with SampleReceiver() as receiver, SampleSender(receiver.address) as sender:
        scratch = make_sample(0, tokens=100_000)
        for n in range(40):
            sender.send(_renamed(scratch, n))
            scratch.token_ids.flags.writeable = True
            scratch.token_ids[:] = n + 1
        for n in range(40):
            lease = receiver.next(40.0)
            assert lease is not None
            if n:
                assert (lease.samples[0].token_ids == n).all()
            lease.commit()


def _renamed(sample: object, n: int):
    import msgspec

    return msgspec.structs.replace(sample, rollout_id=f"{n:032x}")  # type: ignore[type-var]


def test_vllm_16432_a_message_is_two_frames_however_many_arrays_it_has() -> None:
    from trainer_bridge.codec import draft

    frames = draft(make_rollout(1, parts=50)).numbered(b"p" * 16, 1, 1, 0)
    assert len(frames) == 2


def test_pyzmq_1364_only_the_consumer_acknowledges(wait: Callable[..., None]) -> None:
    """A zmq tracker said done although nobody had received."""
    with SampleReceiver() as receiver:
        sender = SampleSender(receiver.address)
        sender.send(make_sample(1))
        wait(lambda: sender.stats().in_flight == 0)
        assert sender.stats().acknowledged == 0
        assert take(receiver, 1) == [1]
        assert sender.close(drain_s=40.0).acknowledged == 1


@pytest.mark.parametrize("ending", ["", "sender.close(drain_s=0.2)"])
def test_pyzmq_102_and_837_exit_neither_hangs_nor_hides_what_is_left(tmp_path: Path, ending: str) -> None:
    """linger -1 hangs at exit, linger 0 loses data without a word."""
    code = f"""
from pathlib import Path
from trainer_bridge import SampleSender
from trainer_bridge.testing import make_sample
sender = SampleSender("tcp://127.0.0.1:9", spool=Path({str(tmp_path)!r}))
for n in range(100): sender.send(make_sample(n))
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert ("100 messages" in done.stderr) == bool(ending)
    with SampleReceiver() as receiver, SampleSender(receiver.address, spool=tmp_path) as heir:
        assert heir.stats().inherited == 100
        assert take(receiver, 100) == list(range(100))


def test_libzmq_2161_and_verl_message_queue_a_slow_trainer_loses_nothing(tmp_path: Path) -> None:
    """PUB drops below its high-water mark; a deque(maxlen) drops the oldest."""
    with (
        SampleReceiver(config=ReceiverConfig(queue_messages=4)) as receiver,
        SampleSender(receiver.address, spool=tmp_path) as sender,
    ):
        for n in range(300):
            sender.send(make_sample(n))
        assert take(receiver, 300) == list(range(300))


def test_transferqueue_171_a_peer_that_is_reached_late_gets_every_message_once(tmp_path: Path) -> None:
    """A DEALER queued to a peer it never reached; the request was lost with no error at either end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with SampleSender(address, spool=tmp_path) as sender:
        for n in range(10):
            sender.send(make_sample(n))
        assert sender.stats().in_flight == 0  # nothing is given to a connection that does not stand
        with SampleReceiver(address) as receiver:
            assert take(receiver, 10) == list(range(10))
            assert sender.wait_settled(40.0)


def test_transferqueue_172_many_workers_connect_at_once() -> None:
    with SampleReceiver() as receiver:
        senders = [SampleSender(receiver.address, producer=f"w{n}") for n in range(40)]
        for n, sender in enumerate(senders):
            sender.send(make_sample(n))
        assert sorted(take(receiver, 40)) == list(range(40))
        for sender in senders:
            assert sender.close(drain_s=40.0).pending == 0
        assert len(receiver.stats().producers) == 40


def test_transferqueue_145_and_167_one_connection_for_any_number_of_sends() -> None:
    """A context per call, then a socket per call: identities piled up."""
    with SampleReceiver() as receiver, SampleSender(receiver.address) as sender:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for n in range(100):
            sender.send(make_sample(n))
        assert take(receiver, 100) == list(range(100))
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
        assert len(receiver.stats().producers) == 1


def test_prime_rl_3149_a_wrong_host_is_named_with_a_deadline() -> None:
    """The default host was localhost, and a run on several nodes hung."""
    with pytest.raises(
        ConnectError, match=r"at tcp://127\.0\.0\.1:9 for 0\.2 s: check host and port.*start one"
    ):
        SampleSender("tcp://127.0.0.1:9", connect_timeout_s=0.2)


def test_prime_rl_3050_a_closed_trainer_says_goodbye(wait: Callable[..., None]) -> None:
    """The orchestrator had ended, and the trainer waited in a broadcast for ever."""
    receiver = SampleReceiver()
    with SampleObserver(receiver.address) as observer:
        receiver.close()
        assert observer.next(40.0) is None
        assert observer.ended == "the receiver closed"


def test_slime_2238_what_was_handed_out_and_not_committed_comes_again(tmp_path: Path) -> None:
    """Ten groups were drained, eight returned, and the surplus dropped."""
    with SampleReceiver(out=tmp_path) as receiver, SampleSender(receiver.address) as sender:
        for n in range(10):
            sender.send(make_sample(n))
        leases = [receiver.next(40.0) for _ in range(10)]
        for lease in leases[:8]:
            assert lease is not None
            lease.commit()
        receiver.close()
        with SampleReceiver(receiver.address, out=tmp_path) as again:
            assert take(again, 2) == [8, 9]
            assert sender.wait_settled(40.0)


def test_skyrl_1173_every_drop_returns_its_credit() -> None:
    """A buffer stuck at 125 of 128 for hours: dropped groups never gave their places back."""
    with SampleReceiver(config=ReceiverConfig(queue_messages=4)) as receiver:
        with SampleSender(receiver.address) as one, SampleSender(receiver.address) as two:
            for n in range(40):
                one.send(make_sample(n))
            assert take(receiver, 40) == list(range(40))
            for n in range(80):  # the first 40 are repetitions, and are dropped
                two.send(make_sample(n))
            assert take(receiver, 40) == list(range(40, 80))
            assert two.wait_settled(40.0)
        assert receiver.stats().duplicates == 40


def test_areal_widened_bfloat16_and_lists_of_floats_here_bits_stay_bits() -> None:
    """AReaL widens bfloat16 to float32, prime-rl sends list[float]; here dtypes and NaN bits stay."""
    with SampleReceiver() as receiver, SampleSender(receiver.address) as sender:
        sample = make_sample(1, tokens=1000)
        bits = sample.logprobs.view(np.uint32).copy()
        bits[np.isnan(sample.logprobs)] = 0x7FC0BEEF
        sent = _with_logprobs(sample, bits.view(np.float32))
        sender.send(sent)
        lease = receiver.next(40.0)
        assert lease is not None
        assert not differences(sent, lease.samples[0])
        assert (lease.samples[0].logprobs.view(np.uint32) == bits).all()
        lease.commit()


def _with_logprobs(sample: object, logprobs: object):
    import msgspec

    return msgspec.structs.replace(sample, logprobs=logprobs)  # type: ignore[type-var]


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (self.path,))

    def __init__(self, path: str) -> None:
        self.path = path


def test_sglang_21435_pickle_and_noise_on_the_port_do_nothing_but_count(
    tmp_path: Path, wait: Callable[..., None]
) -> None:
    """CVE-2026-3059, -3060, -3989: pickle.loads of what came from an open ZMQ port."""
    bomb = pickle.dumps(Bomb(str(tmp_path / "owned")))
    hello = Hello(1, "producer", b"x" * 16, "attacker", 0, 0, SCHEMAS, (), 1, ((1, 1),))
    with SampleReceiver() as receiver:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(receiver.address)
        dealer.send(encode_head(hello))
        for frames in ([bomb], [b""], [b"", b"", b""], [encode_head(hello), bomb], [b"TB" + bytes(14)]):
            dealer.send_multipart(frames)
        wait(lambda: sum(receiver.stats().rejected.values()) == 5)
        assert not (tmp_path / "owned").exists()
        with SampleSender(receiver.address) as sender:
            sender.send(make_sample(1))
            assert take(receiver, 1) == [1]
        dealer.close()
        context.term()


def test_pyzmq_1582_and_898_memory_does_not_grow_with_the_stream() -> None:
    """Frames or futures were kept alive, and the process grew.

    ray-project/ray#47273: ray.put's memory grew the same way; there is no object store here.
    """
    with SampleReceiver() as receiver, SampleSender(receiver.address) as sender:

        def stream(first: int, count: int) -> int:
            for n in range(first, first + count):
                sender.send(make_sample(n, tokens=4096))
                lease = receiver.next(40.0)
                assert lease is not None
                lease.commit()
            assert sender.wait_settled(40.0)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        stream(0, 300)
        before = stream(300, 100)
        after = stream(400, 600)  # 600 messages of 53 kB are 32 MB
        assert after - before < 8 * 1024


def test_libzmq_4167_a_silent_peer_is_given_up_and_met_again(
    sender_config: Callable[..., SenderConfig],
) -> None:
    """Heartbeat timeouts left the dead peer's queue behind; here the session ends, and another begins."""
    context = zmq.Context()
    mute = context.socket(zmq.ROUTER)  # accepts, and never answers
    mute.linger = 0
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    timing = Timing(heartbeat_s=0.05, peer_timeout_s=0.3, greet_again_s=0.1)
    with pytest.raises(ConnectError):
        SampleSender(f"tcp://127.0.0.1:{port}", connect_timeout_s=1.0, config=sender_config(timing=timing))
    peers = set()
    while mute.poll(0):
        peers.add(mute.recv_multipart()[0])
    assert len(peers) > 1  # it hung up and called again
    mute.close()
    context.term()
