"""What a sender does when it is full, when its messages are damaged, and when its callback misbehaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from token_tracking.sample import Sample
from trainer_bridge import (
    AsyncSampleSender,
    BackpressureError,
    CallbackError,
    ConfigError,
    ReceiverConfig,
    ReceiverEvent,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    SenderEvent,
    UnsendableError,
)
from trainer_bridge.head import decode_head
from trainer_bridge.memory_transport import MemoryClient, MemoryServer
from trainer_bridge.messages import DataHead
from trainer_bridge.payload import Buffer
from trainer_bridge.session.flight import REFUSALS_BEFORE_DROP
from trainer_bridge.testing import Faults, VirtualNetwork, make_rollout, make_sample

Wait = Callable[..., None]
Config = Callable[..., SenderConfig]


@pytest.fixture
def receiver(receiver_config: Callable[..., ReceiverConfig]) -> Iterator[SampleReceiver]:
    with SampleReceiver(config=receiver_config()) as receiver:
        yield receiver


def commit_one(receiver: SampleReceiver) -> None:
    lease = receiver.next(40.0)
    assert lease is not None
    lease.commit()


# -- full


def test_a_full_spool_blocks_send_until_something_is_committed(
    receiver: SampleReceiver, sender_config: Config, tmp_path: Path, wait: Wait
) -> None:
    config = sender_config(spool_quota_bytes=1)  # one message fills it
    with SampleSender(receiver.address, spool=tmp_path, config=config) as sender:
        sender.send(make_sample(0))
        with pytest.raises(BackpressureError, match=r"1 messages to .* a larger spool_quota_bytes"):
            sender.send(make_sample(1), timeout_s=0.0)
        assert sender.stats().sent == 1
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(sender.send, make_sample(1))
            wait(lambda: receiver.stats().queued == 1)
            assert not blocked.done()
            commit_one(receiver)
            assert blocked.result(40.0).seqs == (2,)
        commit_one(receiver)
        assert sender.wait_settled(40.0)


@pytest.mark.parametrize("kept", [{}, {"segment_bytes": 20_000, "keep_segments": True}])
def test_what_is_settled_fills_no_quota(
    receiver: SampleReceiver, sender_config: Config, tmp_path: Path, kept: dict[str, object]
) -> None:
    """The bytes stay on the disk until their segment goes, or for ever: a group stuck at its first one."""
    config = sender_config(spool_quota_bytes=100_000, **kept)
    with SampleSender(receiver.address, spool=tmp_path, config=config) as sender:
        for first in range(0, 100, 10):
            sender.send([make_sample(n) for n in range(first, first + 10)], timeout_s=40.0)
            for _ in range(10):
                commit_one(receiver)
        assert sender.wait_settled(40.0)
        assert sum(path.stat().st_size for path in (tmp_path / "samples").glob("*.tbs")) > 100_000
        group = [make_rollout(1000 + n, group=5)[0] for n in range(4)]
        sender.send_group(group, timeout_s=0.0)
        batch = receiver.next_batch(groups=1, deadline_s=40.0)
        assert batch is not None
        batch.commit()
        assert sender.wait_settled(40.0)
        with pytest.raises(BackpressureError):  # what is not settled does
            sender.send([make_sample(n) for n in range(2000, 2100)], timeout_s=0.0)
        sender.close(drain_s=0.0)


def test_a_spool_that_is_opened_again_counts_what_waits_in_it(sender_config: Config, tmp_path: Path) -> None:
    nobody = "tcp://127.0.0.1:9"
    with SampleSender(nobody, spool=tmp_path, config=sender_config()) as sender:
        sender.send([make_sample(n) for n in range(5)])
        sender.close(drain_s=0.0)
    nbytes = sum(path.stat().st_size for path in (tmp_path / "samples").glob("*.tbs"))
    for quota, taken in ((nbytes // 2, 0), (nbytes + nbytes // 10, 1)):
        with SampleSender(nobody, spool=tmp_path, config=sender_config(spool_quota_bytes=quota)) as sender:
            with pytest.raises(BackpressureError, match="not acknowledged"):
                sender.send([make_sample(n) for n in range(5, 9)], timeout_s=0.0)
            stats = sender.close(drain_s=0.0)
        assert (stats.inherited, stats.sent) == (5, taken)


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coroutines go on when they are told to, and not because they look again now and then."""
    monkeypatch.setattr("trainer_bridge.aio.RECHECK_S", 60.0)


@pytest.mark.usefixtures("no_recheck")
def test_an_asyncio_group_larger_than_the_room_goes_on_where_it_stopped(
    receiver: SampleReceiver, sender_config: Config, wait: Wait
) -> None:
    """A retry from the first rollout would fill the sender with its own repetitions."""

    async def work() -> None:
        sender = AsyncSampleSender(SampleSender(receiver.address, config=sender_config(max_unsettled=4)))
        for n in range(2):
            await sender.send(make_rollout(n, group=100 + n)[0], group_size=1)
        group = [make_rollout(10 + n, group=9)[0] for n in range(4)]
        task = asyncio.create_task(sender.send_group(group))
        for _ in range(2):
            await asyncio.to_thread(wait, lambda: sender.stats().pending == 4)
            batch = await asyncio.to_thread(receiver.next_batch, groups=1, deadline_s=40.0)
            assert batch is not None
            batch.commit()
        assert (await asyncio.wait_for(task, 10.0)).seqs == (3, 4, 5, 6)
        batch = await asyncio.to_thread(receiver.next_batch, groups=1, deadline_s=40.0)
        assert batch is not None
        assert len(batch.rollouts) == 4
        batch.commit()
        assert receiver.stats().duplicates == 0
        assert (await sender.close(drain_s=40.0)).sent == 6

    asyncio.run(work())


@pytest.mark.usefixtures("no_recheck")
def test_coroutines_that_wait_for_room_hold_no_threads(
    receiver: SampleReceiver, sender_config: Config
) -> None:
    """With as many waiting as the loop has threads, everything else that needs one would stand still."""

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(2))
        full = SampleSender(receiver.address, config=sender_config(max_unsettled=1))
        async with AsyncSampleSender(full) as sender:
            await sender.send(make_sample(0))
            tasks = [asyncio.create_task(sender.send(make_sample(n))) for n in range(1, 9)]
            for n in range(9):
                await asyncio.wait_for(asyncio.to_thread(commit_one, receiver), 10.0)
                assert sum(task.done() for task in tasks) <= n + 1
            await asyncio.gather(*tasks)

    asyncio.run(work())


def large_sample(rollout: int) -> Sample:
    """32k tokens with the experts of 24 layers, 8 each."""
    (sample,) = make_rollout(rollout, tokens=1 << 15)
    experts = np.zeros((len(sample) - 1, 24, 8), np.uint8)
    return msgspec.structs.replace(sample, routed_experts=experts)


def longest_stall_s(work: Callable[[], object]) -> float:
    """The longest time for which a loop that runs `work` (a coroutine function) did nothing else."""

    async def measured() -> float:
        longest, over = 0.0, False

        async def tick() -> None:
            nonlocal longest
            before = time.perf_counter()
            while not over:
                await asyncio.sleep(0)
                now = time.perf_counter()
                longest, before = max(longest, now - before), now

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        await work()  # type: ignore[misc]
        over = True
        await ticking
        return longest

    return asyncio.run(measured())


def test_prime_rl_1713_2609_and_2612_large_samples_stall_no_event_loop(in_memory: Path) -> None:
    """Encoding them in the loop stops everything else in it. Compared with just that, in the same run."""
    samples = [large_sample(n) for n in range(12)]
    with SampleSender("tcp://127.0.0.1:9", spool=in_memory, durability="none") as sync:
        sender = AsyncSampleSender(sync)

        async def in_the_loop() -> None:
            sync.send(samples)

        async def beside_it() -> None:
            await sender.send(samples)

        beside_it_s, in_the_loop_s = [], []
        for _ in range(3):  # the best of each: whatever else this machine does only adds to either
            in_the_loop_s.append(longest_stall_s(in_the_loop))
            beside_it_s.append(longest_stall_s(beside_it))
        sync.close(drain_s=0.0)
    assert min(beside_it_s) < min(in_the_loop_s) / 2, (beside_it_s, in_the_loop_s)


# -- damaged


def test_a_network_that_flips_bits_costs_no_sample(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three damaged copies in a row are nothing special where every other message is damaged."""
    network = VirtualNetwork(Faults(flip=0.45), seed=5)
    receiver = SampleReceiver("memory://", transport=network.server(), clock=network)
    sender = SampleSender(
        "memory://", spool=in_memory, durability="none", transport=network.client(), clock=network
    )
    for n in range(40):
        sender.send(make_sample(n, tokens=12_000))  # too large for bundles
    got: list[int] = []

    def take_all() -> bool:
        while (lease := receiver.next(0.0)) is not None:
            got.append(int(lease.rollout_id, 16))
            lease.commit()
        return sender.stats().pending == 0

    assert network.run(900.0, until=take_all)
    stats = sender.stats()
    assert sorted(got) == list(range(40))
    assert stats.dropped == {}
    assert stats.damaged > 10
    assert sum("arrived damaged" in record.message for record in caplog.records) == 1
    network.release()
    sender.close()
    receiver.close()


def test_a_message_that_is_damaged_for_ever_is_named_and_holds_up_no_other(
    receiver_config: Callable[..., ReceiverConfig], sender_config: Config, wait: Wait
) -> None:
    harm = True

    def fault(frames: Sequence[Buffer]) -> Sequence[Sequence[Buffer]]:
        message = decode_head(frames[0])
        if not (harm and isinstance(message, DataHead) and message.sequence == 1):
            return (frames,)
        raw = bytearray(frames[1])
        raw[-1] ^= 1
        return ((frames[0], bytes(raw)),)

    class Server(MemoryServer):
        def wait(self, timeout_s: float) -> None:
            threading.Event().wait(0.002)

    class Client(MemoryClient):
        def wait(self, timeout_s: float) -> None:
            threading.Event().wait(0.002)

    server = Server()
    network = Client(server, outward=fault)
    with (
        SampleReceiver("memory://", transport=server, config=receiver_config()) as receiver,
        SampleSender("memory://", transport=network, config=sender_config()) as sender,
    ):
        for n in range(1, 4):
            sender.send(make_sample(n, tokens=12_000))
        for _ in range(2):
            commit_one(receiver)
        wait(lambda: sender.stats().damaged >= REFUSALS_BEFORE_DROP)
        stats = sender.stats()
        assert (stats.pending, stats.dropped) == (1, {})
        assert "message 1 (" in stats.last_error
        assert "bad_payload_hash" in stats.last_error
        harm = False
        commit_one(receiver)
        assert sender.wait_settled(40.0)


# -- callbacks


def test_an_on_event_that_raises_ends_neither_end(
    receiver_config: Callable[..., ReceiverConfig],
    sender_config: Config,
    wait: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: SenderEvent | ReceiverEvent) -> None:
        raise ZeroDivisionError(event.kind)

    with (
        SampleReceiver(config=receiver_config(), on_event=broken) as receiver,
        SampleSender(receiver.address, config=sender_config(), on_event=broken) as sender,
    ):
        for version in range(3):
            receiver.publish(weights_version=version)
            wait(lambda version=version: sender.control.weights_version == version)
        sender.send(make_sample(1))
        commit_one(receiver)
        assert sender.wait_settled(40.0)
        assert receiver.stats().event_faults == receiver.metrics()["event_faults_total"] >= 1
        assert sender.stats().event_faults >= 2
    raised = [record.message for record in caplog.records if record.exc_info is not None]
    assert len(raised) == 2
    assert all("on_event of the" in text for text in raised)


def test_calls_that_wait_for_their_own_thread_say_so(
    receiver_config: Callable[..., ReceiverConfig], sender_config: Config, wait: Wait
) -> None:
    """A `close` in the reaction to an abort took six seconds and ended the sender's thread."""
    said: list[str] = []
    ends: list[SampleSender | SampleReceiver] = []
    ready = threading.Event()

    def collect(*calls: Callable[[], object]) -> None:
        for call in calls:
            try:
                call()
            except CallbackError as error:
                said.append(str(error))

    def in_sender(event: SenderEvent) -> None:
        if event.kind == "control":
            sender = ends[1]
            assert isinstance(sender, SampleSender)
            collect(sender.close, lambda: sender.wait_settled(5.0), lambda: sender.send(make_sample(2)))
            ready.set()

    def in_receiver(event: ReceiverEvent) -> None:
        if event.kind == "producer" and ends:
            receiver = ends[0]
            assert isinstance(receiver, SampleReceiver)
            assert receiver.next(0.0) is None  # looking is no waiting
            collect(receiver.close, receiver.next, lambda: receiver.next_batch(groups=1))

    with SampleReceiver(config=receiver_config(), on_event=in_receiver) as receiver:
        ends.append(receiver)
        config = sender_config(max_unsettled=1)
        with SampleSender(receiver.address, config=config, on_event=in_sender) as sender:
            wait(lambda: len(said) == 3)
            ends.append(sender)
            sender.send(make_sample(1))
            receiver.publish(run_state="abort")
            assert ready.wait(40.0)
            assert [text.split(" waits")[0] for text in said] == [
                "close",
                "next or next_batch",
                "next or next_batch",
                "close",
                "wait_settled",
                "a send without room",
            ]
            commit_one(receiver)
            assert sender.wait_settled(40.0)  # all of it goes on
        assert sender.stats().event_faults == 0


# -- what is said


def test_a_sender_with_nothing_left_does_not_say_where_it_lies(
    receiver: SampleReceiver, sender_config: Config, tmp_path: Path
) -> None:
    with SampleSender(receiver.address, spool=tmp_path, config=sender_config()) as sender:
        sender.send(make_sample(1))
        assert str(tmp_path) in sender.stats().where
        commit_one(receiver)
        stats = sender.close(drain_s=40.0)
    assert (stats.pending, stats.where) == (0, "")
    assert stats.farewell == "1 rollouts were new, 0 were here already"
    assert receiver.stats().producers[0].unsettled == receiver.metrics()["producers_unsettled"] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"durability": "fsync"}, "durability is 'fsync'"),
        ({"window": "64"}, "window is '64'"),
        ({"connect_timeout_s": None}, "connect_timeout_s is None"),
        ({"producer": 7}, "producer is 7"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SampleSender("tcp://127.0.0.1:9", spool=tmp_path, **options)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"a": 1}, "got dict"),
        (None, "got NoneType"),
        ("text", "got str"),
        ([make_sample(1), {"a": 1}], "item 1 is of type dict"),
    ],
)
def test_what_is_no_sample_is_named(receiver: SampleReceiver, given: object, text: str) -> None:
    with SampleSender(receiver.address) as sender:
        for send in (sender.send, sender.send_group):
            with pytest.raises(UnsendableError, match=text):
                send(given)  # type: ignore[arg-type]


def test_what_is_larger_than_the_receiver_takes_is_refused_or_dropped_and_holds_up_nothing(
    tmp_path: Path, sender_config: Config, receiver_config: Callable[..., ReceiverConfig]
) -> None:
    """Sent, it ended the connection, and again after each new one, for ever."""
    with SampleSender("tcp://127.0.0.1:9", spool=tmp_path, config=sender_config()) as sender:
        for n in range(6):
            sender.send(make_sample(n, tokens=2000 if n == 2 else 8))
        sender.close(drain_s=0.0)
    events: list[SenderEvent] = []
    with (
        SampleReceiver(config=receiver_config(max_payload_bytes=4096)) as receiver,
        SampleSender(
            receiver.address, spool=tmp_path, config=sender_config(), on_event=events.append
        ) as sender,
    ):
        for _ in range(5):
            commit_one(receiver)
        assert sender.wait_settled(40.0)
        assert sender.stats().dropped == {"too_large": 1}
        (told,) = [event.text for event in events if event.kind == "dropped"]
        assert "message 3 has " in told
        assert "it takes at most 4096 (ReceiverConfig.max_payload_bytes)" in told
        with pytest.raises(UnsendableError, match=r"takes at most 4096 \(ReceiverConfig"):
            sender.send([make_sample(7, tokens=8), make_sample(8, tokens=2000)])
        assert (sender.stats().sent, sender.stats().reconnects) == (0, 0)
