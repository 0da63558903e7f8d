"""The ledger, after every step of any run: sent = trained + dropped + leased + queued + outside + gone.

Two workers, a trainer with groups, staleness, nacks and checkpoints, a network that moves each message as it
is told, and kills of either end: the state machines alone, without a socket, a thread or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from trainer_bridge import ReceiverConfig
from trainer_bridge.ends import BEFORE_CHECKPOINT
from trainer_bridge.errors import ErrorCode
from trainer_bridge.memory_transport import MemoryServer
from trainer_bridge.messages import RunState
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Identity
from trainer_bridge.testing import make_rollout

from .sessions import TIMING
from .watched_ends import Checkpoint, Trainer, Way, Worker

Place = Literal["outside", "here", "over", "gone"]

WORKERS = st.integers(0, 1)
MEMBERS = st.lists(WORKERS, min_size=1, max_size=3)
GROUPS = st.integers(0, 2)
FEW = st.integers(1, 4)
WAYS: st.SearchStrategy[Way] = st.sampled_from(["there", "back"])


class Conservation(RuleBasedStateMachine):
    """What may happen, in any order, and what must hold after each of it."""

    @initialize(
        window=st.integers(1, 6),
        queue=st.integers(1, 8),
        staleness=st.sampled_from([None, 1, 3]),
        groups=st.lists(MEMBERS, min_size=1, max_size=8),
    )
    def begin(self, window: int, queue: int, staleness: int | None, groups: list[list[int]]) -> None:
        self.config = ReceiverConfig(
            commit_on="checkpoint",
            queue_messages=queue,
            max_staleness=staleness,
            max_nacks=1,
            group_deadline_s=200.0,
            partial_groups="deliver",
            timing=TIMING,
        )
        self.now_s = 0.0
        self.lives = 0
        self.sent = 0
        self.groups = 0
        self.checkpoints = [Checkpoint([], 0, 0, None)]
        self.told: set[tuple[int, int]] = set()
        """(worker, number) of every message that a sender may forget."""
        self.start(MemoryServer())
        self.load(self.checkpoints[0])
        self.workers = [Worker(n, self.trainer.server, window) for n in (1, 2)]
        for members in groups:
            self.send(members)

    def start(self, server: MemoryServer) -> None:
        self.lives += 1
        self.before = set(self.told)
        self.leases: list[int] = []
        self.trainer = Trainer(self.lives, server, self.config, self.now_s)

    def load(self, checkpoint: Checkpoint) -> None:
        self.loaded = checkpoint
        self.may_be_forgotten(checkpoint)
        self.trainer.load(checkpoint, self.now_s)

    @rule(members=MEMBERS, rounds=FEW, groups=GROUPS, told=st.booleans())
    def live(self, members: list[int], rounds: int, groups: int, told: bool) -> None:
        """An ordinary step. Of single rules little would come: hypothesis leaves most out of a run."""
        self.send(members)
        self.flow(rounds)
        self.lease(groups)
        if self.leases:
            self.train()
            self.save(told)

    # -- the workers

    def generate(self, worker: int, group: int, size: int) -> None:
        (sample,) = make_rollout(self.sent, tokens=8, group=group)
        version = self.trainer.board.state.weights_version
        versions = np.where(sample.versions != -1, version, -1).astype(np.int32)
        self.workers[worker].put([msgspec.structs.replace(sample, versions=versions)], size)
        self.sent += 1

    @rule(members=MEMBERS)
    def send(self, members: list[int]) -> None:
        """A group, each member from some worker."""
        self.groups += 1
        for worker in members:
            self.generate(worker, self.groups, len(members))

    @rule(worker=WORKERS, memory=st.sampled_from(["all", "none"]))
    def kill_a_worker(self, worker: int, memory: str) -> None:
        """Its spool holds the messages, and, a heartbeat behind, what is settled."""
        killed = self.workers[worker]
        settled = SeqSet()
        if memory == "all":
            settled.update(killed.session.settled)
        killed.restart(settled)

    # -- the network

    @rule(rounds=FEW)
    def flow(self, rounds: int) -> None:
        """For a while it does what it should."""
        for _ in range(rounds):
            self.now_s += 0.5
            for worker in self.workers:
                worker.step(self.now_s)
                worker.client.carry("there", 100)
            self.trainer.step(self.now_s)
            for worker in self.workers:
                worker.client.carry("back", 100)

    @rule(worker=WORKERS, way=WAYS, count=FEW)
    def carry(self, worker: int, way: Way, count: int) -> None:
        self.workers[worker].client.carry(way, count)
        self.hear()

    @rule(
        worker=WORKERS,
        way=WAYS,
        at=st.integers(0, 3),
        fault=st.sampled_from(["drop", "double", "last"]),
    )
    def hurt(self, worker: int, way: Way, at: int, fault: str) -> None:
        line = self.workers[worker].client.line
        queue = line.there if way == "there" else line.back
        if at < len(queue):
            frames = queue.pop(at) if fault != "double" else queue[at]
            if fault != "drop":
                queue.append(frames)

    @precondition(lambda self: any(worker.client.older for worker in self.workers))
    @rule(worker=WORKERS, way=WAYS, count=FEW)
    def arrive_late(self, worker: int, way: Way, count: int) -> None:
        """Messages of the connection before."""
        client = self.workers[worker].client
        for line in client.older[-1:]:
            client.carry(way, count, line)
        self.hear()

    @rule(worker=WORKERS, half_open=st.booleans())
    def connect_again(self, worker: int, half_open: bool) -> None:
        self.workers[worker].client.reopen(half_open=half_open)

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.hear()

    def hear(self) -> None:
        for worker in self.workers:
            worker.step(self.now_s)
        self.trainer.step(self.now_s)

    # -- the trainer

    @rule(places=st.sampled_from([None, 0, 1, 4]))
    def limit(self, places: int | None) -> None:
        self.trainer.places = places
        self.trainer.settle(self.now_s)

    @rule(state=st.sampled_from(["run", "pause", "drain", "abort"]))
    def control(self, state: RunState) -> None:
        self.trainer.board.set(run_state=state)
        self.trainer.session.publish()

    @rule(groups=GROUPS)
    def lease(self, groups: int) -> None:
        """0: one rollout, whatever its group."""
        pool = self.trainer.pool
        lease = pool.lease_groups(groups, self.now_s) if groups else pool.lease_one(self.now_s)
        self.trainer.settle(self.now_s)
        if lease is not None:
            self.leases.append(lease.number)

    @precondition(lambda self: self.leases)
    @rule()
    def train(self) -> None:
        number = self.leases.pop(0)
        members = self.trainer.pool.leases[number].members()
        self.trainer.weights += [int.from_bytes(member.rollout_id, "big") for member in members]
        self.trainer.pool.commit(number, self.now_s)
        self.trainer.board.set(weights_version=self.trainer.board.state.weights_version + 1)
        self.trainer.settle(self.now_s)

    @precondition(lambda self: self.leases)
    @rule(what=st.sampled_from(["all", "one", "released"]))
    def give_back(self, what: str) -> None:
        pool, number = self.trainer.pool, self.leases.pop(0)
        named = frozenset({pool.leases[number].members()[0].rollout_id}) if what == "one" else None
        if what == "released":
            pool.release(number, self.now_s)
        else:
            pool.nack(number, named, "no", self.now_s)
        if number in pool.leases:
            self.leases.insert(0, number)
        self.trainer.settle(self.now_s)

    @rule(told=st.booleans())
    def save(self, told: bool) -> None:
        """A checkpoint; or it dies before it can tell that one is saved."""
        self.checkpoints.append(self.trainer.save())
        if told:
            self.tell(self.checkpoints[-1])

    @precondition(lambda self: self.checkpoints[-1].state is not None)
    @rule()
    def tell_late(self) -> None:
        """More may have been trained since; and a trainer of before may have saved it."""
        self.tell(self.checkpoints[-1])

    def tell(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.state is not None
        self.may_be_forgotten(checkpoint)
        self.trainer.pool.ends.saved(checkpoint.state)
        self.trainer.settle(self.now_s)

    def may_be_forgotten(self, checkpoint: Checkpoint) -> None:
        if checkpoint.state is not None:
            for producer, _, seqs in checkpoint.state.watermark().items():
                numbers = range(1, seqs.highest + 1)
                self.told |= {(producer[0] - 1, n) for n in numbers if n in seqs}

    @rule(back=st.sampled_from([0, 0, 1, 3]), quietly=st.booleans(), early=st.sampled_from([0, 0, 1, 2]))
    def kill_the_trainer(self, back: int, quietly: bool, early: int) -> None:
        """It goes on from a checkpoint.

        Args:
            back: checkpoints that are passed over.
            quietly: its peers do not see that their connection is another's.
            early: how often its peers speak before the checkpoint is loaded.
        """
        del self.checkpoints[max(len(self.checkpoints) - back, 1) :]
        server = self.trainer.server if quietly else MemoryServer()
        self.start(server)
        if not quietly:
            for worker in self.workers:
                worker.client.reopen(server)
        self.flow(early)
        self.load(self.checkpoints[-1])

    # -- what must hold

    @invariant()
    def it_adds_up(self) -> None:
        self.every_rollout_is_in_one_place()
        self.nothing_is_trained_on_twice()
        self.a_sender_forgets_what_a_saved_checkpoint_holds_and_nothing_else()
        self.what_both_ends_count_agrees()

    def places(self) -> dict[tuple[int, int], Place]:
        """Where each message is."""
        pool, ledger = self.trainer.pool, self.trainer.session.ledger
        held = [m.identity for lease in pool.leases.values() for m in lease.members()]
        assert len(held) == pool.leased
        held += [member.identity for member in pool.waiting()]
        assert len(held) == len(set(held)) == pool.leased + pool.queued
        found: dict[tuple[int, int], Place] = {}
        for worker, each in enumerate(self.workers):
            producer = ledger.producers.get(each.id)
            for seq in range(1, len(each.messages) + 1):
                identity = Identity(each.id, each.epoch_of(seq), seq)
                stream = producer.streams.get(identity.epoch) if producer is not None else None
                if identity in ledger.done:
                    found[worker, seq] = "over"
                elif identity in held:
                    found[worker, seq] = "here"
                elif seq in each.session.settled or (stream is not None and seq in stream.received):
                    found[worker, seq] = "gone"
                else:
                    found[worker, seq] = "outside"
        return found

    def is_missed(self, worker: int, seq: int) -> bool:
        """The checkpoint that was loaded knows an earlier message of the same epoch."""
        state, each = self.loaded.state, self.workers[worker]
        known = state.watermark().of(each.id, each.epoch_of(seq)) if state is not None else None
        return known is not None and any(n in known for n in range(1, seq))

    def every_rollout_is_in_one_place(self) -> None:
        trainer, pool, places = self.trainer, self.trainer.pool, self.places()
        counts = Counter(places.values())
        assert counts["over"] == len(trainer.weights) + trainer.dropped
        assert counts["here"] == pool.queued + pool.leased
        assert counts.total() == self.sent
        ended = pool.ends.trained + pool.ends.committed + sum(pool.meter.dropped.values())
        assert pool.meter.arrived == pool.queued + pool.leased + ended
        gone = {message for message, place in places.items() if place == "gone"}
        assert gone <= self.before, "only the way back to an older checkpoint may lose anything"

    def nothing_is_trained_on_twice(self) -> None:
        assert max(Counter(self.trainer.weights).values(), default=1) == 1

    def a_sender_forgets_what_a_saved_checkpoint_holds_and_nothing_else(self) -> None:
        for worker, each in enumerate(self.workers):
            numbers = range(1, len(each.messages) + 1)
            assert {(worker, seq) for seq in numbers if seq in each.session.settled} <= self.told

    def what_both_ends_count_agrees(self) -> None:
        session = self.trainer.session
        late = {ErrorCode.FENCED, ErrorCode.SUPERSEDED}
        assert session.rejected.keys() <= late, "only HELLOs of what is over"
        for worker in self.workers:
            assert worker.session.state != "refused"
            assert worker.session.dropped == {}
            assert worker.session.unsettled == sum(
                seq not in worker.session.settled for seq in range(1, len(worker.messages) + 1)
            )
            producer = session.ledger.producers.get(worker.id)
            if producer is None:
                continue
            assert producer.queued >= 0
            assert (producer.doubled, producer.fenced) == (0, 0), "every rollout is sent in one message"
            assert producer.highest <= len(worker.messages), "a number that was never sent"
            for stream in producer.streams.values():
                for less, more in pairwise((stream.committed, stream.stored, stream.received)):
                    assert next(less.without(more, 1, less.highest), None) is None
            welcome = worker.session.welcome
            if welcome is not None and welcome.receiver == self.trainer.receiver:
                for seq in range(1, len(worker.messages) + 1):
                    stream = producer.streams.get(worker.epoch_of(seq))
                    known = seq not in worker.session.received or stream is None or seq in stream.received
                    assert known, "the sender believes in a message that is not there"

    def teardown(self) -> None:
        """The network is mended and deadlines pass: every rollout comes to its one end, which is counted."""
        if not hasattr(self, "trainer"):
            return
        trainer = self.trainer
        for worker in self.workers:
            worker.client.reopen(trainer.server)
        for number in self.leases:
            trainer.pool.nack(number, None, "the end", self.now_s)
        trainer.places = None
        for _ in range(300):
            self.now_s += 5.0
            self.flow(1)
            self.leases.clear()
            self.lease(1)
            if self.leases:
                self.train()
            self.save(told=True)
            if not any(worker.session.unsettled for worker in self.workers):
                break
        self.flow(2)
        assert [worker.session.unsettled for worker in self.workers] == [0, 0]
        gone = [message for message, place in self.places().items() if place == "gone"]
        assert len(trainer.weights) + trainer.dropped + len(gone) == self.sent
        assert trainer.session.ledger.unavailable == sum(self.is_missed(*message) for message in gone)
        for worker in self.workers:
            assert worker.session.control.state == trainer.board.state
            producer = trainer.session.ledger.producers.get(worker.id)
            for stream in producer.streams.values() if producer is not None else ():
                assert stream.received == stream.committed
                assert stream.received.gaps == 0
        self.every_rollout_is_in_one_place()


def run(machine: Callable[[], RuleBasedStateMachine], **more: Any) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(machine, settings=settings(deadline=None, suppress_health_check=quiet, **more))


def test_every_rollout_is_in_one_place() -> None:
    run(Conservation, max_examples=50, stateful_step_count=40)


def test_what_was_dropped_before_a_checkpoint_and_comes_ahead_of_it_is_counted_once() -> None:
    """Found by the long runs: two rollouts were stale, and came again before the checkpoint was loaded."""
    state = Conservation()
    state.begin(window=6, queue=6, staleness=3, groups=[[0, 0], [0]])
    state.control(state="drain")
    state.live(groups=0, members=[0, 0, 0], rounds=2, told=False)
    for _ in range(2):
        state.live(groups=0, members=[0], rounds=1, told=False)
    state.lease(groups=0)
    state.train()
    state.lease(groups=0)
    state.save(told=False)
    assert state.trainer.dropped == 2
    state.kill_the_trainer(back=0, early=2, quietly=False)
    state.it_adds_up()
    assert state.trainer.dropped == state.trainer.pool.meter.dropped[BEFORE_CHECKPOINT] == 2
    state.teardown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rollout_is_in_one_place_in_long_runs() -> None:
    run(Conservation, max_examples=80, stateful_step_count=60)
