"""Sender and receiver over real sockets, in one process."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from trainer_bridge import (
    AddressError,
    AsyncSampleSender,
    BackpressureError,
    ClosedError,
    ConfigError,
    ConnectError,
    ForkedError,
    ReceiverConfig,
    RefusedError,
    SampleObserver,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    SpoolError,
    UnsendableError,
)
from trainer_bridge.head import encode_head
from trainer_bridge.messages import Error, RunState
from trainer_bridge.testing import differences, make_rollout, make_sample

Make = Callable[..., object]


@pytest.fixture
def receiver(receiver_config: Callable[..., ReceiverConfig]):
    with SampleReceiver(config=receiver_config()) as receiver:
        yield receiver


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take(receiver: SampleReceiver, count: int, timeout_s: float = 10.0) -> list[int]:
    got = []
    for _ in range(count):
        lease = receiver.next(timeout_s)
        assert lease is not None
        got.append(int(lease.rollout_id, 16))
        lease.commit()
    return got


def test_a_rollout_arrives_whole_and_is_acknowledged_when_it_is_committed(
    receiver: SampleReceiver, sender_config: Callable[..., SenderConfig], wait: Callable[..., None]
) -> None:
    with SampleSender(receiver.address, producer="w7", config=sender_config()) as sender:
        sent = make_rollout(5, parts=3)
        assert sender.send(sent).seqs == (1,)
        lease = receiver.next(40.0)
        assert lease is not None
        assert [differences(a, b) for a, b in zip(sent, lease.samples, strict=True)] == [[], [], []]
        assert (lease.producer_name, lease.sequence, lease.restored) == ("w7", 1, False)
        wait(lambda: sender.stats().in_flight == 0)
        assert sender.stats().pending == 1  # received, not committed
        lease.commit()
        lease.commit()
        assert sender.wait_settled(40.0)
        stats = sender.stats()
        assert (stats.sent, stats.acknowledged, stats.pending, stats.connected) == (1, 1, 0, True)
    wait(lambda: receiver.stats().producers[0].presence == "finished")
    assert receiver.stats().committed == 1


def test_several_rollouts_in_one_call(receiver: SampleReceiver) -> None:
    with SampleSender(receiver.address) as sender:
        receipt = sender.send([*make_rollout(1, parts=2), *make_rollout(2), *make_rollout(3, parts=2)])
        assert receipt.seqs == (1, 2, 3)
        assert take(receiver, 3) == [1, 2, 3]
        with pytest.raises(UnsendableError, match="1 of 2 parts"):
            sender.send(make_rollout(4, parts=2)[0])
        with pytest.raises(UnsendableError, match="no samples"):
            sender.send([])


def test_iteration_ends_when_the_receiver_is_closed(receiver: SampleReceiver) -> None:
    got: list[str] = []

    def consume() -> None:
        for lease in receiver:
            got.append(lease.rollout_id)
            lease.commit()

    consumer = threading.Thread(target=consume)
    consumer.start()
    with SampleSender(receiver.address) as sender:
        sender.send(make_sample(1))
        assert sender.wait_settled(40.0)
    receiver.close()
    consumer.join(40.0)
    assert not consumer.is_alive()
    assert got == [f"{1:032x}"]
    with pytest.raises(ClosedError):
        receiver.next(0.0)


def test_the_callers_arrays_may_be_reused_at_once(receiver: SampleReceiver) -> None:
    with SampleSender(receiver.address) as sender:
        sample = make_sample(1, tokens=50_000)
        expected = sample.token_ids.copy()
        sender.send(sample)
        sample.token_ids.flags.writeable = True
        sample.token_ids[:] = 0
        lease = receiver.next(40.0)
        assert lease is not None
        assert np.array_equal(lease.samples[0].token_ids, expected)
        lease.commit()


def test_many_threads_send(receiver: SampleReceiver) -> None:
    with SampleSender(receiver.address) as sender:
        threads = [
            threading.Thread(target=lambda k=k: [sender.send(make_sample(k * 100 + n)) for n in range(50)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        got = take(receiver, 200)
        for thread in threads:
            thread.join()
        assert sorted(got) == sorted(k * 100 + n for k in range(4) for n in range(50))
        for k in range(4):
            assert [n for n in got if n // 100 == k] == [k * 100 + n for n in range(50)]


def test_the_asyncio_face(receiver: SampleReceiver) -> None:
    async def work() -> None:
        async with AsyncSampleSender(SampleSender(receiver.address)) as sender:
            receipts = await asyncio.gather(*(sender.send(make_sample(n)) for n in range(20)))
            assert sorted(r.seqs[0] for r in receipts) == list(range(1, 21))
            assert sorted(await asyncio.to_thread(take, receiver, 20)) == list(range(20))
            assert (await sender.close(drain_s=40.0)).pending == 0

    asyncio.run(work())


def test_asyncio_backpressure_ends_at_its_deadline_and_on_cancel(receiver: SampleReceiver) -> None:
    async def work() -> None:
        full = SampleSender(receiver.address, config=SenderConfig(max_unsettled=1))
        async with AsyncSampleSender(full) as sender:
            await sender.send(make_sample(1))
            with pytest.raises(BackpressureError):
                await sender.send(make_sample(2), timeout_s=0.3)
            task = asyncio.create_task(sender.send(make_sample(2)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await sender.close(drain_s=0.0)

    asyncio.run(work())


# -- the receiver is away


def test_no_receiver_and_no_spool_is_a_clear_error() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectError, match=rf"no trainer-bridge receiver has answered at {address}.*spool"):
        SampleSender(address, connect_timeout_s=0.3)


def test_no_receiver_but_a_spool_accepts_and_says_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender = SampleSender(f"tcp://127.0.0.1:{free_port()}", spool=tmp_path, durability="sync")
    for n in range(3):
        sender.send(make_sample(n))
    with caplog.at_level("WARNING"):
        stats = sender.close(drain_s=0.1)
    assert (stats.sent, stats.pending, stats.spooled, stats.acknowledged) == (3, 3, 3, 0)
    assert f"3 messages to {stats.address} are not acknowledged (committed)" in caplog.text
    assert str(tmp_path / "samples") in caplog.text
    assert str(tmp_path / "samples") in stats.where
    with pytest.raises(ClosedError):
        sender.send(make_sample(4))
    with SampleReceiver() as receiver, SampleSender(receiver.address, spool=tmp_path) as heir:
        assert take(receiver, 3) == [0, 1, 2]
        assert heir.wait_settled(40.0)
        stats = heir.stats()
        assert (stats.inherited, stats.sent, stats.acknowledged, stats.epoch) == (3, 0, 3, 2)


def test_a_receiver_that_comes_later_gets_everything(tmp_path: Path, wait: Callable[..., None]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with SampleSender(address, spool=tmp_path) as sender:
        for n in range(300):
            sender.send(make_sample(n))
        assert not sender.stats().connected
        with SampleReceiver(address) as receiver:
            assert take(receiver, 300) == list(range(300))
            assert sender.wait_settled(40.0)


def test_a_lost_connection_is_mended_without_loss_or_doubling(
    sender_config: Callable[..., SenderConfig], receiver_config: Callable[..., ReceiverConfig]
) -> None:
    receiver = SampleReceiver(config=receiver_config())
    events: list[str] = []
    with SampleSender(
        receiver.address, config=sender_config(), on_event=lambda e: events.append(e.kind)
    ) as sender:
        for n in range(20):
            sender.send(make_sample(n))
        first = take(receiver, 7)
        leased = receiver.next(40.0)  # handed out, never committed: it must come again
        assert leased is not None
        receiver.close()
        for n in range(20, 30):
            sender.send(make_sample(n))
        with SampleReceiver(receiver.address, config=receiver_config()) as second:
            rest = take(second, 23)
            assert sender.wait_settled(40.0)
            assert second.next(0.1) is None
        assert first == list(range(7))
        assert rest == list(range(7, 30))
        assert sender.stats().reconnects == 1
        assert sender.stats().dropped == {}
    assert events[:3] == ["connected", "disconnected", "connected"]


def test_without_a_spool_send_gives_up_when_the_receiver_stays_away(
    sender_config: Callable[..., SenderConfig], wait: Callable[..., None]
) -> None:
    receiver = SampleReceiver()
    sender = SampleSender(receiver.address, connect_timeout_s=0.3, config=sender_config())
    receiver.close()
    wait(lambda: not sender.stats().connected)

    def given_up() -> bool:
        try:
            sender.send(make_sample(1), timeout_s=1.0)
        except ConnectError as error:
            return "has answered" in str(error)
        return False

    wait(given_up)
    sender.close(drain_s=0.0)


def test_a_restarted_receiver_with_a_store_knows_what_it_has(
    tmp_path: Path, sender_config: Callable[..., SenderConfig]
) -> None:
    receiver = SampleReceiver(out=tmp_path)
    with SampleSender(receiver.address, config=sender_config()) as sender:
        for n in range(10):
            sender.send(make_sample(n))
        assert take(receiver, 4) == [0, 1, 2, 3]
        assert receiver.next(40.0) is not None  # leased, not committed
        receiver.close()
        with SampleReceiver(receiver.address, out=tmp_path) as second:
            restored = second.next(40.0)
            assert restored is not None
            assert restored.restored
            assert not differences(restored.samples[0], make_sample(4))
            restored.commit()
            assert take(second, 5) == [5, 6, 7, 8, 9]
            assert sender.wait_settled(40.0)
            assert second.next(0.1) is None
            assert second.stats().stored == 10


def test_the_same_rollout_from_a_second_producer_is_applied_once(receiver: SampleReceiver) -> None:
    with SampleSender(receiver.address) as one, SampleSender(receiver.address) as two:
        one.send(make_sample(1))
        lease = receiver.next(40.0)
        assert lease is not None
        two.send(make_sample(1))
        assert receiver.next(0.2) is None
        assert not two.wait_settled(0.1)  # acknowledged with the first, not before
        lease.commit()
        assert one.wait_settled(40.0)
        assert two.wait_settled(40.0)
    assert receiver.stats().duplicates == 1


# -- bounds


def test_send_waits_for_room_and_says_why(receiver: SampleReceiver) -> None:
    with SampleSender(receiver.address, config=SenderConfig(max_unsettled=2)) as sender:
        sender.send(make_sample(1))
        sender.send(make_sample(2))
        with pytest.raises(BackpressureError, match=r"2 messages .* not acknowledged \(committed\)"):
            sender.send(make_sample(3), timeout_s=0.1)
        assert take(receiver, 1) == [1]
        sender.send(make_sample(3), timeout_s=40.0)
        assert take(receiver, 2) == [2, 3]


def test_settle_received_frees_the_sender_before_the_commit(receiver: SampleReceiver) -> None:
    config = SenderConfig(settle="received", max_unsettled=1)
    with SampleSender(receiver.address, config=config) as sender:
        for n in range(5):
            sender.send(make_sample(n), timeout_s=40.0)
        assert sender.wait_settled(40.0)
        assert receiver.stats().committed == 0


def test_a_trainer_that_does_not_take_stops_the_workers_not_its_memory(
    tmp_path: Path, receiver_config: Callable[..., ReceiverConfig], wait: Callable[..., None]
) -> None:
    with (
        SampleReceiver(config=receiver_config(queue_messages=8)) as receiver,
        SampleSender(receiver.address, spool=tmp_path) as sender,
    ):
        for n in range(100):
            sender.send(make_sample(n))
        wait(lambda: receiver.stats().queued == 8)
        assert take(receiver, 1) == [0]
        assert receiver.stats().queued <= 8
        assert take(receiver, 99) == list(range(1, 100))


def test_fork_is_refused_with_a_reason(receiver: SampleReceiver) -> None:
    with SampleSender(receiver.address) as sender:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = []
            for use in (
                lambda: sender.send(make_sample(1)),
                sender.stats,
                lambda: sender.close(drain_s=0.0),
                lambda: receiver.next(0.0),
                receiver.close,
            ):
                try:
                    use()
                    said.append("nothing")
                except ForkedError as error:
                    said.append("forked" if "do not survive a fork" in str(error) else str(error))
            os.write(write, ",".join(said).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 1000) == b"forked,forked,forked,forked,forked"
        os.close(read)
        os.close(write)
        sender.send(make_sample(1))
        assert take(receiver, 1) == [1]


# -- refusals


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5555", "tcp://[::]:0"])
def test_beyond_this_machine_needs_keys(bind: str) -> None:
    with pytest.raises(AddressError, match="CURVE keys"):
        SampleReceiver(bind)


def test_beyond_this_machine_on_request() -> None:
    with SampleReceiver("tcp://0.0.0.0:0", config=ReceiverConfig(insecure=True)) as receiver:
        port = receiver.address.rsplit(":", 1)[1]
        with pytest.raises(AddressError, match="CURVE keys"):
            SampleSender(f"tcp://trainer.example:{port}")
        with SampleSender(f"tcp://127.0.0.1:{port}") as sender:
            sender.send(make_sample(1))
            assert take(receiver, 1) == [1]


BAD = ["127.0.0.1:5", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://x:99999", "ipc://rel"]


@pytest.mark.parametrize("address", BAD)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(AddressError, match=address.rsplit("/", 1)[-1]):
        SampleSender(address)


def test_a_port_in_use(receiver: SampleReceiver) -> None:
    with pytest.raises(AddressError, match=f"{receiver.address} is in use"):
        SampleReceiver(receiver.address)


def test_a_foreign_address() -> None:
    with pytest.raises(AddressError, match="not an address of this machine"):
        SampleReceiver("tcp://192.0.2.1:5555", config=ReceiverConfig(insecure=True))


def test_ipc(tmp_path: Path) -> None:
    with SampleReceiver(f"ipc://{tmp_path}/b.sock") as receiver, SampleSender(receiver.address) as sender:
        sender.send(make_sample(1))
        assert take(receiver, 1) == [1]


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="needs a spool"):
        SampleSender("tcp://127.0.0.1:1", durability="sync")
    with pytest.raises(ConfigError, match="max_unsettled must be at least 1"):
        SenderConfig(max_unsettled=0)


def test_a_spool_has_one_sender(receiver: SampleReceiver, tmp_path: Path) -> None:
    with SampleSender(receiver.address, spool=tmp_path), pytest.raises(SpoolError, match="of its own"):
        SampleSender(receiver.address, spool=tmp_path)


def test_a_peer_that_refuses_is_quoted(tmp_path: Path, wait: Callable[..., None]) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def refuse() -> None:
        for _ in range(2):
            peer, _ = router.recv_multipart()
            router.send_multipart([peer, encode_head(Error(1, 34, "no such schema here"))])

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(RefusedError, match="no such schema here") as caught:
        SampleSender(f"tcp://127.0.0.1:{port}")
    assert caught.value.code == 34
    sender = SampleSender(f"tcp://127.0.0.1:{port}", spool=tmp_path)
    thread.join()
    wait(lambda: sender.stats().last_error == "no such schema here")
    with pytest.raises(RefusedError, match="no such schema here"):
        sender.send(make_sample(1))
    sender.close(drain_s=5.0)
    router.close(0)
    context.term()


def test_something_else_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConnectError):
            SampleSender(f"tcp://127.0.0.1:{port}", connect_timeout_s=0.5)


# -- looking on


def test_an_observer_sees_and_takes_nothing(receiver: SampleReceiver, wait: Callable[..., None]) -> None:
    with SampleObserver(receiver.address) as observer, SampleSender(receiver.address) as sender:
        sender.send(make_rollout(1, parts=2))
        seen = observer.next(40.0)
        assert seen is not None
        assert [differences(a, b) for a, b in zip(seen.samples, make_rollout(1, parts=2), strict=True)] == [
            [],
            [],
        ]
        assert sender.stats().pending == 1
        assert receiver.stats().observers == 1
        assert take(receiver, 1) == [1]
        assert observer.next(0.05) is None
    wait(lambda: receiver.stats().observers == 0)


def test_an_observer_hears_that_the_receiver_closed() -> None:
    receiver = SampleReceiver()
    with SampleObserver(receiver.address) as observer:
        receiver.close()
        assert observer.next(5.0) is None
        assert observer.ended == "the receiver closed"


def test_an_observer_of_nothing() -> None:
    with pytest.raises(ConnectError, match="check host and port"):
        SampleObserver(f"tcp://127.0.0.1:{free_port()}", connect_timeout_s=0.3)


# -- control


@pytest.mark.parametrize("state", ["pause", "drain", "abort"])
def test_control_reaches_workers_now_and_latecomers_too(
    receiver: SampleReceiver, wait: Callable[..., None], state: RunState
) -> None:
    heard: list[str] = []
    with SampleSender(receiver.address, on_event=lambda e: heard.append(e.kind)) as sender:
        assert sender.control.generation == 0
        receiver.publish(run_state=state, policy_run="p", weights_version=4, weights_location="s3://w/4")
        wait(lambda: sender.control.run_state == state)
        told = sender.control
        assert (told.policy_run, told.weights_version, told.weights_location) == ("p", 4, "s3://w/4")
        wait(lambda: "control" in heard)
        with SampleSender(receiver.address) as late:
            wait(lambda: late.control == sender.control)
        assert receiver.publish(weights_version=4).weights_location == "s3://w/4"
        assert receiver.publish(weights_version=5).weights_location == ""  # those lie elsewhere
