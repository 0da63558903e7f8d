"""Seeded faults between real senders and a real receiver: nothing lost, nothing twice, all accounted for.

Most run in virtual time over the memory transport; the same over real sockets through the proxy is slow.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from token_tracking.sample import Sample
from trainer_bridge import ConfigError, ReceiverConfig, SampleReceiver, SampleSender, SenderConfig, Timing
from trainer_bridge.errors import AddressError, ErrorCode
from trainer_bridge.messages import Ack, Error, Levels, Welcome, WireSet
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import SenderSession, Stream
from trainer_bridge.session.flight import REFUSALS_BEFORE_DROP
from trainer_bridge.testing import FaultProxy, Faults, VirtualNetwork, differences, make_rollout, make_sample

TIMING = Timing(heartbeat_s=0.2, peer_timeout_s=3.0, greet_again_s=0.2, resend_s=0.5)
EVERYTHING = Faults(drop=0.05, double=0.1, reorder=0.2, delay=0.1, flip=0.02, cut=0.01)
SCHEDULES = int(os.environ.get("TRAINER_BRIDGE_SCHEDULES", "1000"))
SENDERS, ROLLOUTS = 2, 10


class Trainer:
    """Takes what is there, and keeps what it was trained on."""

    def __init__(self, receiver: SampleReceiver) -> None:
        self.receiver = receiver
        self.applied: list[tuple[Sample, ...]] = []

    def train(self) -> None:
        while (lease := self.receiver.next(0.0)) is not None:
            self.applied.append(lease.samples)
            lease.commit()

    def ids(self) -> list[int]:
        return [int(samples[0].rollout_id, 16) for samples in self.applied]


def adds_up(receiver: SampleReceiver, senders: list[SampleSender]) -> None:
    """sent = committed + dropped + leased + queued + in flight + spooled, all ends asked."""
    here, there = receiver.stats(), [sender.stats() for sender in senders]
    assert here.unaccounted == 0
    for stats in there:
        ends = stats.acknowledged + stats.pending + sum(stats.dropped.values())
        assert stats.sent + stats.inherited == ends
    if not any(stats.pending for stats in there):
        dropped = sum(sum(stats.dropped.values()) for stats in (here, *there))
        assert sum(stats.sent for stats in there) == here.committed + dropped


def in_virtual_time(seed: int, faults: Faults, folder: Path) -> tuple[VirtualNetwork, SampleReceiver]:
    """One schedule: every rollout is sent at an instant of its own, and the trainer looks now and then."""
    network = VirtualNetwork(faults, seed=seed)
    receiver = SampleReceiver(
        transport=network.server(),
        clock=network,
        config=ReceiverConfig(timing=TIMING, queue_messages=4, malformed_limit=1000),
    )
    senders = [
        SampleSender(
            "memory://virtual",
            transport=network.client(),
            clock=network,
            spool=folder / f"{seed}-{n}",
            durability="none",
            window=4,
            config=SenderConfig(timing=TIMING),
        )
        for n in range(SENDERS)
    ]
    trainer = Trainer(receiver)
    for n in range(ROLLOUTS):
        for number, sender in enumerate(senders):
            sender.send(make_rollout(number * ROLLOUTS + n, parts=1 + n % 2, tokens=8))
        network.run(0.02)
        trainer.train()
        adds_up(receiver, senders)

    def settled() -> bool:
        trainer.train()
        return not any(sender.stats().pending for sender in senders)

    assert network.run(120.0, until=settled), (seed, network.counts, [s.stats() for s in senders])
    network.set_faults(Faults())
    network.run(0.5)  # the last acknowledgements; a message that was given up may have arrived after all
    adds_up(receiver, senders)
    assert sorted(trainer.ids()) == list(range(SENDERS * ROLLOUTS)), seed
    for samples in trainer.applied:
        sent = make_rollout(int(samples[0].rollout_id, 16), parts=len(samples), tokens=8)
        assert [differences(a, b) for a, b in zip(sent, samples, strict=True)] == [[]] * len(sent)
    network.release()
    for sender in senders:
        sender.close(drain_s=0.0)
    receiver.close()
    return network, receiver


def run_schedules(seeds: range, folder: Path) -> None:
    logging.disable(logging.WARNING)  # hundreds of lost connections
    seen: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    try:
        for seed in seeds:
            network, receiver = in_virtual_time(seed, EVERYTHING, folder)
            for name in network.counts.__struct_fields__:
                seen[name] += getattr(network.counts, name)
            refused.update(receiver.stats().rejected)
    finally:
        logging.disable(logging.NOTSET)
    assert all(seen[name] > len(seeds) / 10 for name in network.counts.__struct_fields__), seen
    # Every damaged message that arrived was refused, and by a name that says what is wrong with it.
    assert 0 < sum(refused.values()) <= seen["flipped"] + seen["doubled"]
    assert set(refused) <= {"bad_magic", "wrong_major", "bad_head_hash", "bad_payload_hash"}
    assert {"bad_head_hash", "bad_payload_hash"} <= set(refused)


@pytest.mark.parametrize("first", [0, 75])
def test_schedules_of_every_fault(first: int, in_memory: Path) -> None:
    run_schedules(range(first, first + 30), in_memory)


@pytest.mark.slow
@pytest.mark.timeout(30 + SCHEDULES)
def test_a_thousand_schedules_of_every_fault(in_memory: Path) -> None:
    run_schedules(range(1000, 1000 + SCHEDULES), in_memory)


def test_a_seed_repeats_a_run(in_memory: Path) -> None:
    runs = [in_virtual_time(7, EVERYTHING, in_memory / str(n))[0] for n in range(2)]
    assert runs[0].counts == runs[1].counts
    assert runs[0].now_s == runs[1].now_s


def test_a_damaged_greeting_is_repeated(in_memory: Path) -> None:
    """One flipped bit in HELLO or in its answer once ended a sender for good, as if it had met a stranger."""
    flipped = 0
    for seed in range(6):
        network = VirtualNetwork(Faults(flip=0.2), seed=seed)
        receiver = SampleReceiver(
            transport=network.server(), clock=network, config=ReceiverConfig(timing=TIMING)
        )
        sender = SampleSender(
            "memory://virtual",
            transport=network.client(),
            clock=network,
            spool=in_memory / str(seed),
            durability="none",
            config=SenderConfig(timing=TIMING),
        )
        assert network.run(5.0, until=lambda sender=sender: sender.stats().connected), seed
        flipped += network.counts.flipped
        network.release()
        sender.close()
        receiver.close()
    assert flipped > 0


def test_a_message_that_was_given_up_and_arrived_after_all_is_not_counted_as_dropped() -> None:
    """Its last copy was whole; the refusals were of the earlier ones, and came late."""
    session = SenderSession(
        producer=b"p" * 16,
        name="worker",
        streams=[Stream(1, 1)],
        last=1,
        settled=SeqSet(),
        window=4,
        settle="committed",
        timing=TIMING,
    )
    session.connected(0.0)
    session.on_message(
        Welcome(1, b"r" * 16, 0, "sample/1", (), 4, 1 << 20, sequence_limit=9, byte_limit=99), 0.0
    )
    for _ in range(REFUSALS_BEFORE_DROP):
        assert session.next_to_send() == 1
        session.mark_sent(1, 10, 0.0)
        for _ in range(2):  # the refusal itself is doubled on its way
            session.on_message(Error(1, ErrorCode.BAD_SAMPLE, "", epoch=1, sequence=1), 0.0)
    assert sum(session.dropped.values()) == 1
    assert session.unsettled == 0
    here = WireSet(1)
    session.on_message(Ack(1, (Levels(1, here, here, WireSet()),)), 0.0)
    assert sum(session.dropped.values()) == 0


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="drop is a chance"):
        Faults(drop=1.5)
    with pytest.raises(ConfigError, match="delay_s must not be negative"):
        Faults(delay_s=-1.0)
    with pytest.raises(AddressError, match="write tcp://HOST:PORT"):
        FaultProxy("ipc:///tmp/x")


# -- over real sockets


def through_the_proxy(
    seed: int, faults: Faults, spool: Path, wait: Callable[..., None], *, rollouts: int, tokens: int
) -> tuple[FaultProxy, SampleReceiver, list[SampleSender]]:
    config = ReceiverConfig(timing=TIMING, malformed_limit=10_000)
    with SampleReceiver(config=config) as receiver, FaultProxy(receiver.address, faults, seed=seed) as proxy:
        senders = [
            SampleSender(proxy.address, spool=spool / f"{seed}-{n}", config=SenderConfig(timing=TIMING))
            for n in range(SENDERS)
        ]
        trainer = Trainer(receiver)
        for n in range(rollouts):
            for number, sender in enumerate(senders):
                sender.send(make_sample(number * rollouts + n, tokens=tokens))

        def settled() -> bool:
            trainer.train()
            return not any(sender.stats().pending for sender in senders)

        wait(settled, 50.0)
        adds_up(receiver, senders)
        assert sorted(trainer.ids()) == list(range(SENDERS * rollouts))
        for (sample,) in trainer.applied:
            assert differences(make_sample(int(sample.rollout_id, 16), tokens=tokens), sample) == []
        proxy.faults = Faults()
        for sender in senders:
            sender.close(drain_s=0.0)
    return proxy, receiver, senders


def test_real_sockets_through_a_proxy_without_faults(tmp_path: Path, wait: Callable[..., None]) -> None:
    proxy, receiver, senders = through_the_proxy(0, Faults(), tmp_path, wait, rollouts=20, tokens=20_000)
    assert receiver.stats().rejected == {}
    assert sum(sender.stats().resent for sender in senders) == 0
    assert proxy.counts.passed >= 40
    assert proxy.counts.dropped == proxy.counts.cut == proxy.counts.flipped == 0


@pytest.mark.slow  # how many frames are hit depends on how the machine is loaded
@pytest.mark.timeout(120)
def test_real_sockets_through_a_bad_network(tmp_path: Path, wait: Callable[..., None]) -> None:
    # Too large for bundles: so many frames that some are hit.
    proxy, receiver, _ = through_the_proxy(1, EVERYTHING, tmp_path, wait, rollouts=60, tokens=12_000)
    assert proxy.counts.flipped > 0
    assert sum(receiver.stats().rejected.values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_thirty_schedules_over_real_sockets(tmp_path: Path, wait: Callable[..., None]) -> None:
    cuts = reconnects = 0
    for seed in range(30):
        proxy, _, senders = through_the_proxy(seed, EVERYTHING, tmp_path, wait, rollouts=30, tokens=2000)
        cuts += proxy.counts.cut
        reconnects += sum(sender.stats().reconnects for sender in senders)
    assert cuts > 10
    assert reconnects > 10


def test_a_cut_on_demand_and_a_network_that_is_gone(tmp_path: Path, wait: Callable[..., None]) -> None:
    with (
        SampleReceiver(config=ReceiverConfig(timing=TIMING)) as receiver,
        FaultProxy(receiver.address) as proxy,
    ):
        sender = SampleSender(proxy.address, spool=tmp_path, config=SenderConfig(timing=TIMING))
        wait(lambda: sender.stats().connected)
        proxy.blocked = True
        proxy.cut()
        wait(lambda: not sender.stats().connected)
        sender.send(make_sample(1))
        assert receiver.next(0.3) is None
        proxy.blocked = False
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
        assert sender.wait_settled(40.0)
        assert sender.stats().reconnects == 1
        sender.close()
