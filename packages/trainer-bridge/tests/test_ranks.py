"""Several data-parallel ranks: all of them get the same step, or none does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from trainer_bridge import (
    BatchError,
    BatchLease,
    BridgeError,
    ClosedError,
    Collator,
    ConfigError,
    ConnectError,
    RankReceiver,
    ReceiverConfig,
    SampleDataset,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    StepAbortedError,
    StuckError,
    Timing,
)
from trainer_bridge.control import ControlBoard
from trainer_bridge.member import Member
from trainer_bridge.pool import Pool
from trainer_bridge.rank_messages import Ask, Done, Ready, Share, Verdict
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.steps import StepTable
from trainer_bridge.stuck import cause_of_standstill
from trainer_bridge.testing import differences, make_rollout

RECEIVED = SenderConfig(settle="received")


class Ranks:
    """Rank 0 and its peers, each waiting in a thread of its own."""

    def __init__(self, world: int, config: ReceiverConfig, timing: Timing) -> None:
        self.receiver = SampleReceiver(config=config)
        self.others = [
            RankReceiver(self.receiver.address, rank=rank, world=world, timing=timing)
            for rank in range(1, world)
        ]
        self._threads = ThreadPoolExecutor(world)

    def step(self, groups: int, *, world: int, deadline_s: float = 20.0) -> list[BatchLease | None]:
        waiting: list[Future[BatchLease | None]] = [
            self._threads.submit(rank.next_batch, groups=groups, deadline_s=30.0)
            for rank in self.others[: world - 1]
        ]
        self.receiver.world = world
        mine = self.receiver.next_batch(groups=groups, deadline_s=deadline_s)
        return [mine, *(each.result(30.0) for each in waiting)]

    def close(self) -> None:
        for rank in self.others:
            rank.close()
        self.receiver.close()
        self._threads.shutdown()


@pytest.fixture
def ranks(receiver_config: Callable[..., ReceiverConfig], timing: Timing) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(world: int, **config: object) -> Ranks:
        made.append(Ranks(world, receiver_config(**config), timing))
        return made[-1]

    yield make
    for each in made:
        each.close()


def send(address: str, groups: Sequence[int], tokens: Callable[[int], int] = lambda n: 16) -> None:
    """Groups of two rollouts: 10n and 10n + 1."""
    with SampleSender(address, config=RECEIVED) as sender:
        for n in groups:
            rollouts = [make_rollout(10 * n + m, parts=1 + m, tokens=tokens(n), group=n) for m in range(2)]
            sender.send_group([sample for rollout in rollouts for sample in rollout])


def numbers(lease: BatchLease | None) -> list[int]:
    assert lease is not None
    return [int(rollout.rollout_id, 16) for rollout in lease.rollouts]


def test_every_rank_gets_its_share_and_the_step_is_committed_when_all_have(
    ranks: Callable[..., Ranks],
) -> None:
    three = ranks(3)
    # Two long groups and four short ones: by tokens, no rank gets both long ones.
    send(three.receiver.address, range(6), tokens=lambda n: 400 if n < 2 else 100)
    leases = three.step(6, world=3)
    shares = [numbers(lease) for lease in leases]
    assert sorted(n for share in shares for n in share) == [10 * g + m for g in range(6) for m in range(2)]
    assert [len(share) for share in shares] == [4, 4, 4]
    assert all({n // 10 for n in share} != {0, 1} for share in shares)
    assert leases[1] is not None
    for group in leases[1].groups:
        assert (group.size, group.complete, len(group.rollouts)) == (2, True, 2)
        for m, rollout in enumerate(group.rollouts):
            sent = make_rollout(
                10 * int(group.group_id, 16) + m,
                parts=1 + m,
                tokens=len(rollout.samples[0]),
                group=int(group.group_id, 16),
            )
            assert [differences(a, b) for a, b in zip(sent, rollout.samples, strict=True)] == [[]] * (1 + m)
    for lease in leases[:0:-1]:
        assert lease is not None
        assert three.receiver.stats().committed == 0
        lease.commit()
    assert leases[0] is not None
    leases[0].commit()  # waits for the others'
    stats = three.receiver.stats()
    assert (stats.committed, stats.leased, stats.unaccounted) == (12, 0, 0)


def test_the_number_of_ranks_may_change_and_groups_may_be_spread(ranks: Callable[..., Ranks]) -> None:
    three = ranks(3, rank_split="rollouts")
    send(three.receiver.address, range(6))
    first = three.step(3, world=3)
    assert [len(numbers(lease)) for lease in first] == [2, 2, 2]
    for lease in reversed(first):
        assert lease is not None
        lease.commit()
    three.others[1].close()
    three.others[0].world = 2
    second = three.step(3, world=2)
    assert [len(numbers(lease)) for lease in second] == [3, 3]
    assert sorted(numbers(second[0]) + numbers(second[1])) == [30, 31, 40, 41, 50, 51]
    assert second[0] is not None
    assert second[1] is not None
    with pytest.raises(BridgeError, match="neither committed nor given back"):
        three.others[0].next_batch(groups=3)
    with pytest.raises(BridgeError, match="given back whole"):
        second[1].nack("one is bad", rollouts=[second[1].rollouts[0].rollout_id])
    second[1].nack("the loss was NaN")
    with pytest.raises(
        StepAbortedError,
        match=r"rank 1 gave step 2 back: the loss was NaN; its rollouts come again: call next",
    ):
        second[0].commit()
    assert sorted(numbers(three.receiver.next_batch(groups=3, deadline_s=40.0, world=1))) == [
        30,
        31,
        40,
        41,
        50,
        51,
    ]


def test_without_a_whole_step_nobody_gets_one(ranks: Callable[..., Ranks]) -> None:
    two = ranks(2)
    send(two.receiver.address, [1])
    assert two.step(2, world=2, deadline_s=0.2) == [None, None]
    assert two.receiver.stats().queued == 2
    with pytest.raises(ConfigError, match="3 groups cannot be shared out evenly over 2 ranks"):
        two.receiver.next_batch(groups=3, world=2)
    # Rank 1 does not ask: rank 0 does not get the step alone.
    assert two.receiver.next_batch(groups=2, deadline_s=0.1, world=2) is None
    with pytest.raises(ConfigError, match="ranks 1 to world - 1"):
        RankReceiver(two.receiver.address, rank=0, world=2)


def test_a_rank_killed_9_ends_the_step_and_its_groups_return(
    programs: Path, receiver_config: Callable[..., ReceiverConfig]
) -> None:
    with SampleReceiver(config=receiver_config()) as receiver:
        send(receiver.address, range(2))

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, str(programs / "rank.py"), receiver.address, "1", "2", "2"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert line(process) == "connected"
            return process

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        rank = start()
        lease = receiver.next_batch(groups=2, deadline_s=40.0, world=2)
        assert sorted(numbers(lease) + json.loads(line(rank))) == [0, 1, 10, 11]
        rank.kill()
        assert lease is not None
        with pytest.raises(StepAbortedError, match=r"rank 1 was lost in step 1; its rollouts come again"):
            lease.commit()
        with rank:
            pass
        assert receiver.stats().nacks == 0
        rank = start()
        lease = receiver.next_batch(groups=2, deadline_s=40.0, world=2)
        assert sorted(numbers(lease) + json.loads(line(rank))) == [0, 1, 10, 11]
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert lease is not None
        lease.commit()
        assert receiver.stats().committed == 4
        rank.kill()
        with rank:
            pass


def test_a_rank_that_does_not_commit_is_named_and_may_be_waited_for_again(
    ranks: Callable[..., Ranks],
) -> None:
    two = ranks(2, patience_s=0.3)
    send(two.receiver.address, range(2))
    mine, theirs = two.step(2, world=2)
    assert mine is not None
    assert theirs is not None
    with pytest.raises(StuckError, match=r"rank 1 has not committed step 1 for 0\.[3-9] s: .*commit again"):
        mine.commit()
    assert two.receiver.stats().committed == 0
    theirs.commit()
    mine.commit()
    assert two.receiver.stats().committed == 4


def test_an_aborted_step_is_void_on_every_rank(
    ranks: Callable[..., Ranks], wait: Callable[..., None]
) -> None:
    """It was a bare BridgeError, like any other: a trainer could not tell that it is to go on."""
    three = ranks(3)
    send(three.receiver.address, range(3))
    mine, first, second = three.step(3, world=3)
    assert mine is not None
    assert first is not None
    assert second is not None
    first.commit()
    three.others[1].close()  # rank 2 leaves with the step in its hands
    with pytest.raises(StepAbortedError, match="rank 2 was lost in step 1"):
        mine.commit()
    with pytest.raises(StepAbortedError, match="call next_batch again"):
        three.others[0].next_batch(groups=2)  # also where it had committed
    three.others[0].world = 2
    again, other = three.step(2, world=2)
    assert again is not None
    assert other is not None
    assert sorted(numbers(again) + numbers(other)) == [0, 1, 10, 11]
    again.nack("the loss was NaN")

    def is_told() -> bool:
        try:
            three.others[0].next_batch(groups=2)
        except StepAbortedError as error:
            return "rank 0 gave step 2 back" in str(error)
        except BridgeError:
            return False  # it still holds the step
        return pytest.fail("a step that nobody leased")

    wait(is_told)
    with pytest.raises(StepAbortedError, match="step 2 was aborted before"):
        other.commit()


def test_a_rank_that_stopped_waiting_gets_its_step_at_the_next_call(ranks: Callable[..., Ranks]) -> None:
    """Its deadline passed, rank 0 got the step, and neither could go on: the rank held it without a lease."""
    two = ranks(2)
    send(two.receiver.address, range(4))
    rank = two.others[0]
    for _ in range(2):
        with pytest.raises(ConnectError, match=r"did not decide within 0\.05 s"):
            rank.next_batch(groups=2, deadline_s=0.05)
    assert two.receiver.next_batch(groups=2, deadline_s=0.1, world=2) is None, "not without the other"
    for first in (0, 20):
        leases = two.step(2, world=2)
        assert sorted(n for lease in leases for n in numbers(lease)) == [first + n for n in (0, 1, 10, 11)]
        for lease in reversed(leases):
            assert lease is not None
            lease.commit()
    assert two.receiver.stats().committed == 8


def test_a_rank_that_is_no_longer_counted_is_told_so(ranks: Callable[..., Ranks]) -> None:
    """The world shrank to 1, and rank 1 waited until the receiver was closed."""
    two = ranks(2)
    send(two.receiver.address, range(2))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(two.others[0].next_batch, groups=2, deadline_s=25.0)
        lease = two.receiver.next_batch(groups=2, deadline_s=40.0, world=1)
        assert sorted(numbers(lease)) == [0, 1, 10, 11]
        for _ in range(400):  # it may ask only now
            if waiting.done():
                break
            assert two.receiver.next_batch(groups=2, deadline_s=0.05, world=1) is None
        assert waiting.result(0.0) is None


def test_a_dataset_goes_on_after_an_aborted_step(
    ranks: Callable[..., Ranks], wait: Callable[..., None]
) -> None:
    """Each later `commit` of the others was one of the old lease, and raised."""
    three = ranks(3)
    send(three.receiver.address, range(3))
    three.receiver.world = 3
    sources = [three.receiver, *three.others]
    data = [SampleDataset(source, numbers, groups=3, deadline_s=40.0) for source in sources]

    def step(*datasets: SampleDataset[list[int]]) -> list[int]:
        with ThreadPoolExecutor(3) as threads:
            shares = threads.map(next, map(iter, datasets))
            return sorted(n for share in shares for n in share)

    assert step(*data) == [0, 1, 10, 11, 20, 21]
    data[1].commit()
    three.others[1].close()  # rank 2 is lost with the step in its hands
    with pytest.raises(StepAbortedError, match="rank 2 was lost"):
        data[0].commit()
    with pytest.raises(StepAbortedError, match="rank 2 was lost"):
        next(iter(data[1]))
    assert [each.outstanding for each in data[:2]] == [0, 0]
    assert [each.state_dict()["steps"] for each in data[:2]] == [0, 0]
    three.receiver.world = three.others[0].world = 2
    data[:2] = [SampleDataset(source, numbers, groups=2, deadline_s=40.0) for source in sources[:2]]
    again = step(*data[:2])
    assert len(again) == 4
    three.others[0].close()
    wait(lambda: not three.receiver._loop.session.steps.ranks)  # rank 0 has heard of it
    with pytest.raises(StepAbortedError, match="rank 1 was lost"):
        data[0].nack("the loss was NaN")
    three.receiver.world = 1
    assert step(data[0]) == again
    data[0].commit()
    assert (data[0].outstanding, data[0].state_dict()["steps"]) == (0, 1)
    assert three.receiver.stats().committed == 4


def test_a_split_group_is_compared_as_a_whole(ranks: Callable[..., Ranks]) -> None:
    """Two ranks hold one rollout each of two, over real sockets: only the other's gives a baseline."""
    two = ranks(2, rank_split="rollouts")
    send(two.receiver.address, [1])
    leases = two.step(1, world=2)
    found: list[float] = []
    for lease in leases[::-1]:
        assert lease is not None
        (batch,) = Collator(advantages="dr_grpo").pad(lease)
        assert batch.weights.sum() == pytest.approx(0.5)
        found += set(batch.advantages[batch.loss_mask].tolist())
        with pytest.raises(BatchError, match="split over ranks"):
            _ = lease.samples
        lease.commit()
    assert sorted(found) == [-0.5, 0.5]


def test_the_example_of_two_ranks(programs: Path) -> None:
    command = [sys.executable, "-W", "error", str(programs / "two_ranks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1.0\n"


def test_rank_0_killed_9_goes_on_from_its_checkpoint_with_the_ranks_that_live(
    programs: Path, tmp_path: Path, timing: Timing
) -> None:
    """A rank that had never heard of the restart took its commits for commits of the new receiver's steps."""
    trainer = Rank0(programs, tmp_path, "tcp://127.0.0.1:0")
    log: list[list[int]] = []

    def follow(rank: RankReceiver) -> None:
        while True:
            try:
                lease = rank.next_batch(groups=2)
                if lease is not None:
                    lease.commit()
                    log.append(numbers(lease))
            except StepAbortedError:
                del log[len(trainer.weights) // 2 :]  # its weights go back to the checkpoint too
            except ClosedError:
                return

    with (
        SampleSender(trainer.address, spool=tmp_path / "spool", config=SenderConfig(timing=timing)) as sender,
        RankReceiver(trainer.address, rank=1, world=2, timing=timing) as rank,
        ThreadPoolExecutor(1) as thread,
    ):
        for group in range(Rank0.GROUPS):
            sender.send_group([make_rollout(2 * group + n, tokens=16, group=group)[0] for n in range(2)])
        following = thread.submit(follow, rank)
        for steps in (1, 3):
            trainer.go(steps + 3)
            for _ in range(steps):
                assert trainer.line().isdigit()
            trainer.kill()
            trainer = Rank0(programs, tmp_path, trainer.address)
        trainer.go(Rank0.GROUPS)
        while trainer.line().isdigit():
            pass
        assert sender.wait_settled(40.0)
        assert trainer.process.stdin is not None
        trainer.process.stdin.close()
        following.result(40.0)
        assert trainer.process.wait(40.0) == 0
    assert sorted([*trainer.weights, *(n for step in log for n in step)]) == list(range(2 * Rank0.GROUPS))
    trainer.kill()


class Rank0:
    """`tests/programs/train.py` as rank 0 of two; goes on from the latest checkpoint in its folder."""

    GROUPS = 16

    def __init__(self, programs: Path, folder: Path, bind: str) -> None:
        self.folder = folder
        command = [sys.executable, str(programs / "train.py"), bind, str(folder), "--world", "2"]
        command += ["--rollouts", str(self.GROUPS), "--out", str(folder / "store")]
        if self.latest is not None:
            command += ["--load", str(self.latest)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.line()

    @property
    def latest(self) -> Path | None:
        return max(self.folder.glob("checkpoint-*.json"), default=None)

    @property
    def weights(self) -> list[int]:
        return [] if self.latest is None else json.loads(self.latest.read_text())["weights"]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n" * steps)
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            pass


# -- the table alone


class Table(StepTable):
    """Two ranks beside rank 0, and what they are told."""

    def told(self, peer: bytes) -> list[str]:
        out = []
        while (item := self.next_out(peer)) is not None:
            assert not isinstance(item, Member)
            out.append(item.verdict if isinstance(item, Verdict) else type(item).__name__)
            self.mark_sent(peer)
        return out


def asked(world: int = 3) -> Table:
    table = Table()
    for rank in range(1, world):
        table.on_message(peer(rank), process(rank), Ask(1, rank, world, 3))
    table.open(3, world)
    return table


def peer(rank: int, life: int = 0) -> bytes:
    return b"peer%d.%d" % (rank, life)


def process(rank: int, life: int = 0) -> bytes:
    return b"process%d.%d" % (rank, life)


def shares(world: int = 3) -> dict[int, tuple[Share, list[Member]]]:
    return {rank: (Share(0, 0, ()), []) for rank in range(1, world)}


def test_a_rank_lost_before_go_costs_nothing() -> None:
    table = asked()
    assert table.missing() == []
    assert table.start(7, shares()) == 1
    assert table.told(peer(1)) == ["Share"]
    table.on_message(peer(1), process(1), Ready(1, 1))
    table.on_lost(peer(2))
    assert [(a.lease, a.nacked) for a in table.take_abandoned()] == [(7, False)]
    assert table.told(peer(1)) == ["again"]
    assert table.missing() == [2]
    table.on_message(peer(2, 1), process(2, 1), Ask(1, 2, 3, 3))
    assert table.missing() == []
    table.start(8, shares())
    for rank, life in ((1, 0), (2, 1)):
        table.on_message(peer(rank, life), process(rank, life), Ready(1, 2))
    assert table.told(peer(1)) == ["Share", "go"]
    assert table.told(peer(2, 1)) == ["Share", "go"]


def test_a_connection_lost_around_go_is_mended() -> None:
    table = asked()
    table.start(7, shares())
    for rank in (1, 2):
        table.on_message(peer(rank), process(rank), Ready(1, 1))
    # Rank 2 never heard of it: it connects anew, and asks.
    table.on_hello(peer(2, 1), process(2), 2)
    table.on_message(peer(2, 1), process(2), Ask(2, 2, 3, 3))
    assert table.told(peer(2, 1)) == ["Share"]
    table.on_message(peer(2, 1), process(2), Ready(2, 1))
    assert table.told(peer(2, 1)) == ["go"]
    table.on_lost(peer(2))  # the old connection times out
    assert not table.commit(1)
    table.on_message(peer(1), process(1), Done(1, 1, True))
    assert table.not_done() == [2]
    table.on_message(peer(2, 1), process(2), Done(2, 1, True))
    assert table.commit(1)
    assert table.take_abandoned() == []


def test_a_rank_lost_after_go_voids_the_step_for_all() -> None:
    table = asked()
    table.start(7, shares())
    for rank in (1, 2):
        table.on_message(peer(rank), process(rank), Ready(1, 1))
    table.on_message(peer(1), process(1), Done(1, 1, True))
    table.on_lost(peer(1))  # it had committed: nothing is missing
    assert table.take_abandoned() == []
    table.on_lost(peer(2))
    assert [a.reason for a in table.take_abandoned()] == ["rank 2 was lost in step 1"]
    with pytest.raises(StepAbortedError, match="rank 2 was lost in step 1"):
        table.commit(1)


def test_a_rank_that_stops_waiting_greets_anew_and_gets_no_step_meanwhile() -> None:
    table = asked()
    table.start(7, shares())
    for rank in (1, 2):
        table.told(peer(rank))
    table.on_message(peer(2), process(2), Ready(1, 1))
    table.on_hello(peer(1), process(1), 2)
    assert table.missing() == [1]
    table.on_hello(peer(1), process(1), 1)  # overtaken
    table.on_message(peer(1), process(1), Ask(2, 1, 3, 3))
    assert table.told(peer(1)) == ["Share"]
    table.on_message(peer(1), process(1), Ready(2, 1))
    assert table.told(peer(1)) == ["go"]
    # It never heard that, and asks for another step than it would get.
    table.on_hello(peer(1), process(1), 3)
    table.on_message(peer(1), process(1), Ask(3, 1, 3, 6))
    (abandoned,) = table.take_abandoned()
    assert abandoned.reason == (
        "rank 1 asks for 6 groups in all and counts 3 ranks, step 1 has 3 groups for 3 ranks"
    )
    assert table.told(peer(2)) == ["go", "aborted"]
    with pytest.raises(StepAbortedError, match="rank 1 asks for 6 groups"):
        table.commit(1)
    table.open(3, 3)
    assert table.told(peer(1)) == ["aborted", "aborted"], "the step, and the question"


def test_a_question_without_sense_changes_nothing_and_a_process_is_one_rank() -> None:
    table = Table()
    for rank, world in ((0, 3), (3, 3), (70_000, 2)):
        table.on_message(peer(1), process(1), Ask(1, rank, world, 3))
    assert table.ranks == {}
    for rank in (1, 2):
        table.on_message(peer(1), process(1), Ask(1, rank, 3, 3))
    assert list(table.ranks) == [2]


def test_a_rank_that_does_not_ask_is_named() -> None:
    table = Table()
    table.open(2, 4)
    table.on_message(peer(2), process(2), Ask(1, 2, 4, 2))
    assert table.missing() == [1, 3]
    session = ReceiverSession(receiver=b"r" * 16, config=ReceiverConfig(), board=ControlBoard())
    session.steps = table
    session.refusals.standing["w7"] = "another schema"
    pool = Pool(
        session=session,
        config=ReceiverConfig(),
        board=ControlBoard(),
        read=lambda position: pytest.fail(f"{position} was read"),
        bury=lambda *letter: pytest.fail(f"{letter} was buried"),
        now_s=0.0,
    )
    text = cause_of_standstill(session, pool, 9.0)
    assert text is not None
    assert "rank 1 has not asked for a step, rank 3 has not asked for a step" in text


def test_ranks_that_count_differently_are_told_so() -> None:
    table = Table()
    table.on_message(peer(1), process(1), Ask(1, 1, 4, 3))
    table.on_message(peer(2), process(2), Ask(1, 2, 3, 6))
    table.open(3, 3)
    assert table.told(peer(1)) == ["none"]
    assert table.told(peer(2)) == ["aborted"]
    assert table.missing() == [1, 2]
