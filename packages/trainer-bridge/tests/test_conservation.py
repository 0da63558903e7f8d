"""The ledger, after every step of a random run: sent = trained + dropped + leased + queued + with the sender.

Two workers, a trainer with groups, staleness, nacks and checkpoints, a network that loses, repeats and
reorders, and kills of either end: the state machines alone, without a socket, a thread or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainer_bridge import ReceiverConfig, Timing
from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.codec import Frames, decode_data, draft
from trainer_bridge.control import ControlBoard
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.member import Member
from trainer_bridge.memory_transport import Fault, MemoryClient, MemoryServer
from trainer_bridge.messages import DataHead
from trainer_bridge.pool import Pool
from trainer_bridge.pool_state import load_state, state_of
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import ReceiverSession, SenderSession, Stream
from trainer_bridge.testing import make_rollout

TIMING = Timing(heartbeat_s=1.0, peer_timeout_s=30.0, greet_again_s=1.0, resend_s=3.0)
SIZE = 2


class Worker:
    """A sender with its spool; the session and the connection may die, the spool does not."""

    def __init__(self, n: int, server: MemoryServer, fault: Callable[[], Fault]) -> None:
        self.id = bytes([n]) * 16
        self.fault = fault
        self.messages: list[tuple[int, Frames, int]] = []  # epoch, frames, rollout
        self.settled = SeqSet()
        self.streams: list[Stream] = []
        self.restart(server)

    def restart(self, server: MemoryServer) -> None:
        """A new process opens the spool."""
        epoch = len(self.streams) + 1
        self.streams.append(Stream(epoch, len(self.messages) + 1))
        self.session = SenderSession(
            producer=self.id,
            name=f"worker-{self.id[0]}",
            streams=self.streams,
            last=len(self.messages),
            settled=self.settled,
            window=4,
            settle="committed",
            timing=TIMING,
        )
        self.client = MemoryClient(server, outward=self.fault(), inward=self.fault())

    def send(self, rollout: int, group: int, version: int) -> None:
        (sample,) = make_rollout(rollout, tokens=8, group=group)
        versions = np.where(sample.versions != -1, version, -1).astype(np.int32)
        made = draft([msgspec.structs.replace(sample, versions=versions)], group_size=SIZE)
        seq = len(self.messages) + 1
        epoch = self.streams[-1].epoch
        self.messages.append((epoch, made.numbered(self.id, epoch, seq, 0), rollout))
        self.session.last = seq

    def step(self, now_s: float) -> None:
        for event in self.client.events(100):
            if event.kind == "up":
                self.session.connected(now_s)
            elif event.kind == "down":
                self.session.disconnected()
            else:
                self.session.on_message(decode_head(event.frames[0]), now_s)
        if not self.session.tick(now_s):
            self.session.disconnected()
            self.client.reopen()
        for message in self.session.take_messages():
            self.client.send((encode_head(message),))
        while (seq := self.session.next_to_send()) is not None:
            frames = self.messages[seq - 1][1]
            self.client.send(frames)
            self.session.mark_sent(seq, len(frames.payload), now_s)


class Trainer:
    """A receiver without a store, and the weights: a list of the rollouts that went into them."""

    def __init__(
        self, config: ReceiverConfig, weights: list[int], dropped: int, version: int, now_s: float
    ) -> None:
        self.server = MemoryServer()
        self.weights = list(weights)
        self.dropped_before = dropped
        self.board = ControlBoard()
        self.board.set(policy_run="run-1", weights_version=version)
        self.session = ReceiverSession(receiver=b"r" * 16, config=config, board=self.board)
        self.pool = Pool(
            session=self.session,
            config=config,
            board=self.board,
            read=lambda _: (_ for _ in ()).throw(AssertionError("there is no store")),
            bury=lambda *_: None,
            now_s=now_s,
        )

    @property
    def dropped(self) -> int:
        return self.dropped_before + sum(self.pool.meter.dropped.values())

    def step(self, now_s: float) -> None:
        for incoming in self.server.receive(100):
            message = decode_head(incoming.frames[0])
            if not isinstance(message, DataHead):
                self.session.on_message(incoming.peer, message, now_s)
            elif self.session.on_data(incoming.peer, message, now_s):
                accepted = self.session.accept(decode_data(message, incoming.frames[1]), 100)
                if accepted is not None:
                    self.pool.meter.arrive(1, 8)
                    frames = Frames(bytes(incoming.frames[0]), incoming.frames[1])
                    self.pool.offer(Member.arrived(accepted, frames, 0), now_s)
        self.pool.expire(now_s)
        self.settle(now_s)
        self.session.tick(now_s)
        for peer, message in self.session.take_messages(now_s):
            if self.server.send(peer, (encode_head(message),)) == "gone":
                self.session.unreachable(peer)

    def settle(self, now_s: float) -> None:
        for ended in self.pool.ends.take_finished():
            for resolved in ended:
                self.session.mark_committed(resolved.identity, now_s)
        self.session.limit(self.pool.allowance)


def faults(rng: np.random.Generator, loss: float) -> Fault:
    held: list[object] = []

    def fault(frames: object) -> list[object]:
        out = [frames] * int(rng.choice([0, 1, 1, 1, 2]) if rng.random() < loss else 1)
        if out and rng.random() < loss:
            held.append(out.pop())
        if held and rng.random() < 0.5:
            out.append(held.pop(int(rng.integers(len(held)))))
        return out

    return fault  # type: ignore[return-value]


class Run:
    def __init__(self, seed: int, loss: float, staleness: int | None) -> None:
        self.rng = np.random.default_rng(seed)
        self.loss = loss
        self.config = ReceiverConfig(
            commit_on="checkpoint",
            queue_messages=8,
            max_staleness=staleness,
            max_nacks=1,
            group_deadline_s=200.0,
            partial_groups="deliver",
            timing=TIMING,
        )
        self.now_s = 0.0
        self.trainer = Trainer(self.config, [], 0, 0, self.now_s)
        fault = lambda: faults(self.rng, self.loss)  # noqa: E731
        self.workers = [Worker(n, self.trainer.server, fault) for n in (1, 2)]
        self.sent = 0
        self.leases: list[int] = []
        self.checkpoint: tuple[list[int], int, int, ReceiverState | None] = ([], 0, 0, None)

    # -- what may happen

    def generate(self, n: int) -> None:
        for _ in range(n):
            # The two members of a group come from two workers.
            group, member = divmod(self.sent, SIZE)
            self.workers[member].send(self.sent, group, self.trainer.board.state.weights_version)
            self.sent += 1

    def time_passes(self, n: int) -> None:
        for _ in range(n):
            self.now_s += 0.5
            for worker in self.workers:
                worker.step(self.now_s)
            self.trainer.step(self.now_s)

    def lease(self, groups: int) -> None:
        lease = self.trainer.pool.lease_groups(groups, self.now_s)
        self.trainer.settle(self.now_s)
        if lease is not None:
            self.leases.append(lease.number)

    def train(self, _: int = 0) -> None:
        if not self.leases:
            return
        number = self.leases.pop(0)
        members = self.trainer.pool.leases[number].members()
        self.trainer.weights += [int.from_bytes(m.rollout_id, "big") for m in members]
        self.trainer.pool.commit(number, self.now_s)
        self.trainer.settle(self.now_s)
        version = self.trainer.board.state.weights_version + 1
        self.trainer.board.set(weights_version=version)

    def give_back(self, n: int) -> None:
        if not self.leases:
            return
        number = self.leases.pop(0)
        lease = self.trainer.pool.leases[number]
        named = frozenset({lease.members()[0].rollout_id}) if n % 2 else None
        self.trainer.pool.nack(number, named, "no", self.now_s)
        if number in self.trainer.pool.leases:
            self.leases.insert(0, number)
        self.trainer.settle(self.now_s)

    def save(self, n: int) -> None:
        state = state_of(self.trainer.pool)
        plain = msgspec.json.encode(state)
        state = msgspec.json.decode(plain, type=ReceiverState)
        version = self.trainer.board.state.weights_version
        self.checkpoint = (list(self.trainer.weights), self.trainer.dropped, version, state)
        if n % 2:  # or it died just before
            self.trainer.pool.ends.saved(state)
            self.trainer.settle(self.now_s)

    def tell_late(self, _: int) -> None:
        state = self.checkpoint[-1]
        if state is not None:  # more may have been trained since
            self.trainer.pool.ends.saved(state)
            self.trainer.settle(self.now_s)

    def kill_the_trainer(self, _: int) -> None:
        weights, dropped, version, state = self.checkpoint
        self.trainer = Trainer(self.config, weights, dropped, version, self.now_s)
        self.leases.clear()
        if state is not None:
            load_state(self.trainer.pool, state, [], self.now_s)
            self.trainer.settle(self.now_s)
        for worker in self.workers:
            worker.client.reopen(self.trainer.server)

    def kill_a_worker(self, n: int) -> None:
        self.workers[n % 2].client.cut()
        self.workers[n % 2].restart(self.trainer.server)

    # -- what must hold

    def every_rollout_is_in_one_place(self) -> None:
        pool, ledger = self.trainer.pool, self.trainer.session.ledger
        outside = 0  # in a spool, or on its way
        for worker in self.workers:
            producer = ledger.producers.get(worker.id)
            for seq, (epoch, _, _) in enumerate(worker.messages, 1):
                stream = producer.streams.get(epoch) if producer is not None else None
                done = ledger.done.of(worker.id, epoch)
                here = (stream is not None and seq in stream.received) or (done is not None and seq in done)
                assert here or seq not in worker.session.settled, "the sender forgot it and it is not here"
                outside += not here
        assert self.sent == sum(
            (len(self.trainer.weights), self.trainer.dropped, pool.leased, pool.queued, outside)
        )
        assert max(Counter(self.trainer.weights).values(), default=1) == 1
        assert all(producer.queued >= 0 for producer in ledger.producers.values())
        ended = pool.ends.trained + pool.ends.committed + sum(pool.meter.dropped.values())
        assert pool.meter.arrived == pool.queued + pool.leased + ended

    def end(self) -> None:
        # The network is mended and deadlines pass: every rollout comes to its one end.
        for worker in self.workers:
            worker.fault = lambda: lambda frames: (frames,)
            worker.client.cut()
            worker.restart(self.trainer.server)
        for number in self.leases:
            self.trainer.pool.nack(number, None, "the end", self.now_s)
        self.leases.clear()
        for _ in range(300):
            self.now_s += 5.0
            self.time_passes(1)
            self.lease(1)
            if self.leases:
                self.train()
            self.save(1)
            if not any(worker.session.unsettled for worker in self.workers):
                break
        assert [worker.session.unsettled for worker in self.workers] == [0, 0]
        assert len(self.trainer.weights) + self.trainer.dropped == self.sent
        self.every_rollout_is_in_one_place()


STEPS = ("generate", "time_passes", "lease", "train") * 3 + ("save", "give_back")
RARE = ("tell_late", "kill_the_trainer", "kill_a_worker")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.3]),
    staleness=st.sampled_from([None, 1, 3]),
)
def test_every_rollout_is_in_one_place(seed: int, loss: float, staleness: int | None) -> None:
    # The steps come from the seed: hypothesis repeats itself in long lists, and a seed is enough to repeat.
    rng = np.random.default_rng(seed)
    run = Run(seed, loss, staleness)
    for _ in range(60):
        step: Callable[[int], None] = getattr(run, str(rng.choice(STEPS + RARE)))
        step(int(rng.integers(1, 5)))
        run.every_rollout_is_in_one_place()
    run.end()
