"""Ranks on a bad network, and killed at every step of the protocol: the same step or none, each rollout once.

The sessions, the table and the pool as they are, joined by the package's own faults; no thread, no socket.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trainer_bridge import ReceiverConfig, StepAbortedError, Timing
from trainer_bridge.codec import Frames, decode_data, decode_frames, draft
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.leased import said_of
from trainer_bridge.member import Member
from trainer_bridge.messages import DataHead, Hello, Message, Welcome
from trainer_bridge.pool import Pool
from trainer_bridge.rank_messages import Ask, Ready, Share, ShareGroup, ShareRollout, Verdict
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.session.rank import RankSession
from trainer_bridge.shares import shares_of
from trainer_bridge.testing import Faults, VirtualNetwork, make_rollout

TIMING = Timing(heartbeat_s=0.1, peer_timeout_s=2.0, greet_again_s=0.1, resend_s=0.4)
CONFIG = ReceiverConfig(timing=TIMING, max_nacks=1000, queue_messages=1 << 20)
PRODUCER = b"p" * 16
GROUPS, SIZE, WORLD = 8, 3, 3
STEP_GROUPS = 2
FRAMES = [
    draft(make_rollout(n, tokens=8, group=n // SIZE), group_size=SIZE).numbered(PRODUCER, 1, n + 1, 0)
    for n in range(GROUPS * SIZE)
]


class Rank0:
    """A life of the receiver and of its trainer, which goes on from a checkpoint."""

    def __init__(self, run: Run, trained: list[int]) -> None:
        self.run = run
        self.server = run.network.server()
        self.trained = list(trained)
        self.life = bytes([len(run.lives)]) * 16
        self.session = ReceiverSession(receiver=self.life, config=CONFIG, board=ControlBoard())
        self.pool = Pool(
            session=self.session,
            config=CONFIG,
            board=ControlBoard(),
            read=lambda position: pytest.fail(f"{position} was read"),
            bury=lambda *letter: pytest.fail(f"{letter} was buried"),
            now_s=0.0,
        )
        greeting = Hello(1, "producer", PRODUCER, "worker", 0, 0, SCHEMAS, (), 1, ((1, 1),))
        self.session.on_message(b"worker", greeting, run.now_s)
        for n, frames in enumerate(FRAMES):
            accepted = self.session.accept(decode_frames(frames), frames.nbytes)
            assert accepted is not None
            if n not in self.trained:
                self.pool.offer(Member.arrived(accepted, frames, 0), 0.0)
        self.waiting = False
        self.mine: tuple[int, ...] = ()
        self.holding: int | None = None
        self.patience = 0

    def step(self, now_s: float) -> None:
        for incoming in self.server.receive(1000):
            try:
                message = decode_head(incoming.frames[0])
                if isinstance(message, DataHead):
                    raise ProtocolError(ErrorCode.WRONG_ROLE, "a rank sends no DATA")
                self.session.on_message(incoming.peer, message, now_s)
            except ProtocolError as error:
                self.session.reject(incoming.peer, None, error)
        self.session.peers[b"worker"].heard_s = now_s
        self.session.tick(now_s)
        self.train(now_s)
        self.settle(now_s)
        for peer, message in self.session.take_messages(now_s):
            self.send(peer, (encode_head(message),))
        for peer in self.session.steps.waiting_peers:
            while (item := self.session.steps.next_out(peer)) is not None:
                frames = item.frames if isinstance(item, Member) else (encode_head(item),)
                assert frames is not None
                if not self.send(peer, frames):
                    break
                self.session.steps.mark_sent(peer)
        self.settle(now_s)

    def send(self, peer: bytes, frames: Any) -> bool:
        if peer == b"worker":
            return True
        sent = self.server.send(peer, frames) == "sent"
        if not sent:
            self.session.unreachable(peer)
        return sent

    def settle(self, now_s: float) -> None:
        for lease in self.session.steps.take_abandoned():
            if lease.nacked:
                self.pool.nack(lease.lease, None, lease.reason, now_s)
            else:
                self.pool.release(lease.lease, now_s)

    def train(self, now_s: float) -> None:
        """`next_batch`, a while of work, `commit`; now and then the deadline passes, or the loss is NaN."""
        steps, rng = self.session.steps, self.run.rng
        if self.holding is not None:
            try:
                if rng.random() < self.run.trouble / 4:
                    steps.nack(self.holding, "the loss was NaN")
                    self.holding = None
                elif rng.random() < 0.3:
                    self.commit(self.holding, now_s)
            except StepAbortedError:
                self.holding = None
        elif not self.waiting and len(self.trained) < len(FRAMES):
            steps.open(STEP_GROUPS, WORLD)
            self.waiting = True
        elif self.waiting and rng.random() < self.run.trouble / 4:
            steps.give_up()
            self.waiting = False
        elif self.waiting:
            self.advance(now_s)

    def advance(self, now_s: float) -> None:
        steps = self.session.steps
        if steps.step is None and not steps.missing():
            lease = self.pool.lease_groups(STEP_GROUPS, now_s)
            if lease is None:
                return  # a step that was abandoned just now is not back yet
            say = lambda member: said_of(member, name="worker", weights_version=0)  # noqa: E731
            (_, mine), *others = shares_of(lease, WORLD, "rollouts", say)
            self.mine = numbers(mine)
            steps.start(lease.number, dict(enumerate(others, 1)))
        step = steps.take()
        if step is not None:
            self.holding, self.waiting = step.number, False

    def commit(self, number: int, now_s: float) -> None:
        step = self.session.steps.step
        if not self.session.steps.commit(number):
            return
        assert step is not None
        leased = numbers(self.pool.leases[step.lease].members())
        theirs = [self.run.granted[self.life, number, rank] for rank in range(1, WORLD)]
        together = [*self.mine, *(n for share in theirs for n in share)]
        assert sorted(together) == sorted(leased), "each rollout of the step once in all ranks together"
        assert not set(leased) & set(self.trained), "a rollout was trained on twice"
        self.trained += leased
        self.pool.commit(step.lease, now_s)
        self.holding = None
        self.run.committed.add((self.life, number))
        if self.run.rng.random() < 0.7:
            self.run.checkpoint = list(self.trained)


class Process:
    """A rank's process, with the loop of its trainer."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run = run
        self.rank = rank
        self.session = RankSession(process=run.rng.bytes(16), rank=rank, timing=TIMING)
        self.client = run.network.client()
        self.passed: list[str] = []
        """Kinds of the messages that it sent and took in."""
        self.life = b""
        self.log: list[tuple[bytes, int]] = []
        """Steps that it committed and was not told to be void."""
        self.asking = False
        self.dead = False

    def step(self, now_s: float) -> None:
        self.client.pump()
        for event in self.client.events(1000):
            if event.kind == "up":
                self.session.connected(now_s)
            elif event.kind == "down":
                self.session.disconnected()
            else:
                self.take(event.frames, now_s)
        if not self.session.tick(now_s):
            self.session.disconnected()
            self.client.reopen()
        self.train()
        for message in self.session.take_messages():
            self.passed.append(type(message).__name__)
            if not self.client.send((encode_head(message),)):
                break

    def take(self, frames: Any, now_s: float) -> None:
        try:
            message: Message = decode_head(frames[0])
            self.passed.append(type(message).__name__)
            if isinstance(message, DataHead):
                self.session.on_data(decode_data(message, frames[1]), now_s)
                return
            if isinstance(message, Welcome) and message.session == self.session.session:
                self.life = message.receiver
            self.session.on_message(message, now_s)
        except ProtocolError as error:
            self.session.on_garbage(error, now_s)

    def train(self) -> None:
        session = self.session
        assert session.refusal is None
        if session.broken:
            session.broken = ""
            self.log = self.log[:-1] if self.log and self.log[-1] not in self.run.committed else self.log
            self.asking = False
        elif session.granted is not None:
            granted, session.granted = session.granted, None
            rollouts = tuple(int.from_bytes(data.head.rollout_id, "big") for data in granted.rollouts)
            said = [each.rollout_id for group in granted.share.groups for each in group.rollouts]
            assert [data.head.rollout_id for data in granted.rollouts] == said
            key = (self.life, granted.share.step, self.rank)
            assert (self.life, granted.share.step) not in self.log, "the same step again after its commit"
            self.run.granted[key] = rollouts
            self.asking = False
        elif self.asking and session.answer is not None:
            session.answer = None
            self.asking = False
        elif self.asking and self.run.rng.random() < self.run.trouble:
            session.withdraw(self.run.now_s)  # its deadline passed
            self.asking = False
        elif session.holding is not None and not self.asking and self.run.rng.random() < 0.3:
            number = session.holding
            given_back = self.run.rng.random() < self.run.trouble / 4
            session.done(number, committed=not given_back, reason="")
            if not given_back:
                self.log.append((self.life, number))
        elif session.holding is None and not self.asking and self.run.rng.random() < 0.5:
            session.ask(WORLD, STEP_GROUPS)
            self.asking = True


class Run:
    def __init__(self, seed: int, faults: Faults, trouble: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.network = VirtualNetwork(faults, seed=seed)
        self.trouble = trouble
        self.checkpoint: list[int] = []
        self.granted: dict[tuple[bytes, int, int], tuple[int, ...]] = {}
        self.committed: set[tuple[bytes, int]] = set()
        self.lives: list[Rank0] = []
        self.lives.append(Rank0(self, []))
        self.ranks = [Process(self, rank) for rank in range(1, WORLD)]

    @property
    def now_s(self) -> float:
        return self.network.now_s

    @property
    def rank0(self) -> Rank0:
        return self.lives[-1]

    def tick(self) -> None:
        self.network.now_s += 0.02
        for rank in self.ranks:
            rank.step(self.now_s)
            rank.client.pump()
        self.rank0.step(self.now_s)

    def kill_rank_0(self) -> None:
        self.rank0.server.close()
        self.lives.append(Rank0(self, self.checkpoint))

    def kill(self, rank: int) -> None:
        self.ranks[rank - 1].client.close()
        self.ranks[rank - 1] = Process(self, rank)

    def end(self) -> None:
        """The network is mended and nobody dies any more: everything is trained on."""
        self.network.set_faults(Faults())
        self.trouble = 0.0
        for _ in range(3000):
            self.tick()
            if len(self.rank0.trained) == len(FRAMES):
                break
        assert sorted(self.rank0.trained) == list(range(len(FRAMES))), "all of it, each once"
        for _ in range(100):
            self.tick()
        for rank in self.ranks:
            mine = {key for key in rank.log if key[0] == self.rank0.life}
            assert mine <= self.committed, "a rank believes in a step that is void"


def numbers(members: list[Member]) -> tuple[int, ...]:
    return tuple(int.from_bytes(member.rollout_id, "big") for member in members)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    faults=st.builds(
        Faults,
        drop=st.sampled_from([0.0, 0.1]),
        double=st.sampled_from([0.0, 0.3]),
        reorder=st.sampled_from([0.0, 0.3]),
        delay=st.sampled_from([0.0, 0.1]),
        delay_s=st.just(0.15),
        flip=st.sampled_from([0.0, 0.02]),
        cut=st.sampled_from([0.0, 0.02]),
    ),
    trouble=st.sampled_from([0.0, 0.05]),
)
@example(  # a rank is lost between "go" and rank 0's next look: rank 0 still waits for that rank
    seed=17309,
    faults=Faults(drop=0.0, double=0.3, reorder=0.3, delay=0.0, delay_s=0.15, flip=0.02, cut=0.02),
    trouble=0.05,
)
def test_the_same_step_or_none_whatever_the_network_does(seed: int, faults: Faults, trouble: float) -> None:
    run = Run(seed, faults, trouble)
    for _ in range(400):
        if trouble and run.rng.random() < 0.005:
            run.kill(int(run.rng.integers(1, WORLD)))
        if trouble and run.rng.random() < 0.003:
            run.kill_rank_0()
        run.tick()
    run.end()


@pytest.mark.parametrize("who", ["a rank", "rank 0"])
@pytest.mark.parametrize("stage", ["Ask", "Share", "DataHead", "Ready", "Verdict", "Done"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_killed_at_a_step_of_the_protocol(who: str, stage: str, times: int) -> None:
    run = Run(7, Faults())
    for _ in range(2000):
        run.tick()
        if run.ranks[0].passed.count(stage) >= times:
            break
    else:
        pytest.fail(f"{stage} never passed {times} times")
    if who == "rank 0":
        run.kill_rank_0()
    else:
        run.kill(1)
    run.end()


def test_data_that_comes_twice_or_in_another_order_makes_no_wrong_share() -> None:
    """READY was said by count: a second copy of one rollout stood for another that was missing."""
    session = RankSession(process=b"q" * 16, rank=1, timing=TIMING)
    session.connected(0.0)
    session.on_message(Welcome(1, b"r" * 16, 0, "sample/1", (), 64, 1 << 20), 0.0)
    session.ask(2, 1)
    first, second, stranger, other = (decode_frames(frames) for frames in (*FRAMES[:3], another_attempt()))
    rollouts = tuple(
        ShareRollout(data.head.rollout_id, data.head.attempt, "worker", False, 0, None)
        for data in (first, second)
    )
    session.on_message(Share(1, 1, (ShareGroup(first.head.group_id, 2, True, rollouts),)), 0.0)
    session.take_messages()
    for data in (second, second, stranger, other):
        session.on_data(data, 0.0)
    assert session.take_messages() == []
    session.on_data(first, 0.0)
    assert session.take_messages() == [Ready(1, 1)]
    session.on_message(Verdict(1, 1, "go"), 0.0)
    assert session.granted is not None
    assert session.granted.rollouts == (first, second)


def test_a_go_that_comes_too_late_is_not_taken_and_one_just_in_time_is_kept() -> None:
    """The rank held a step that nobody had asked for any more, and could neither ask nor end it."""
    session = RankSession(process=b"q" * 16, rank=1, timing=TIMING)
    session.connected(0.0)
    session.on_message(Welcome(1, b"r" * 16, 0, "sample/1", (), 64, 1 << 20), 0.0)
    session.ask(2, 1)
    session.on_message(Share(1, 1, ()), 0.0)
    session.withdraw(1.0)
    assert (session.session, session.state) == (2, "greeting")
    session.on_message(Verdict(1, 1, "go"), 1.0)  # rank 0 had heard READY
    session.on_message(Welcome(2, b"r" * 16, 0, "sample/1", (), 64, 1 << 20), 1.0)
    session.on_message(Share(2, 1, ()), 1.0)
    session.on_message(Verdict(2, 0, "none"), 1.0)
    assert (session.granted, session.holding, session.answer) == (None, None, None)
    assert not any(isinstance(message, Ask | Ready) for message in session.take_messages()[2:])
    session.ask(2, 1)
    session.on_message(Share(2, 1, ()), 1.0)
    session.on_message(Verdict(2, 1, "go"), 1.0)
    session.withdraw(2.0)
    assert session.granted is not None
    assert (session.session, session.holding, session.granted.world) == (2, 1, 2)


def another_attempt() -> Frames:
    """Of the share's first rollout."""
    (sample,) = make_rollout(0, tokens=8)
    return draft([msgspec.structs.replace(sample, attempt=9)]).numbered(PRODUCER, 1, 99, 0)
