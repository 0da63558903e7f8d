"""Groups, staleness, leases and ends, without a network: what is handed out, dropped and left."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from token_tracking.sample import Sample
from trainer_bridge import BridgeError, ConfigError, ReceiverConfig
from trainer_bridge.codec import Data, decode_frames, draft
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import DamagedError
from trainer_bridge.head import decode_head
from trainer_bridge.member import Member
from trainer_bridge.messages import DataHead, Hello
from trainer_bridge.pool import Pool, PoolLease
from trainer_bridge.pool_state import load_state, state_of
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.stuck import cause_of_standstill
from trainer_bridge.testing import make_rollout

PRODUCER = b"p" * 16


class Desk:
    """A pool with a producer at its door; time is a number."""

    def __init__(self, *, group_size: int | None = 2, **config: object) -> None:
        self.config = ReceiverConfig(group_size=group_size, **config)  # type: ignore[arg-type]
        self.board = ControlBoard()
        self.session = ReceiverSession(receiver=b"r" * 16, config=self.config, board=self.board)
        self.buried: list[tuple[int, str, str]] = []
        self.pool = Pool(
            session=self.session,
            config=self.config,
            board=self.board,
            read=self._read,
            bury=lambda m, reason, detail: self.buried.append((number(m), reason, detail)),
            now_s=0.0,
        )
        self.sequence = 0
        greeting = Hello(1, "producer", PRODUCER, "w7", 0, 0, SCHEMAS, (), 1, ((1, 1),))
        self.session.on_message(b"peer", greeting, 0.0)
        self.credit()

    def send(self, *rollouts: int, group: int = 0, now_s: float = 0.0, **changes: object) -> None:
        for n in rollouts:
            samples = make_rollout(n, parts=1 + n % 2, tokens=16, group=group)
            self.send_samples([edited(sample, **changes) for sample in samples], now_s=now_s)

    def send_samples(self, samples: list[Sample], *, group_size: int = 0, now_s: float = 0.0) -> None:
        self.sequence += 1
        frames = draft(samples, group_size=group_size).numbered(PRODUCER, 1, self.sequence, 0)
        data = decode_frames(frames)
        assert self.session.on_data(b"peer", data.head, now_s)
        accepted = self.session.accept(data, frames.nbytes)
        if accepted is not None:
            self.pool.meter.arrive(len(data.samples), 0)
            self.pool.offer(Member.arrived(accepted, frames, 0), now_s)
        self.check()

    def lease(self, groups: int, now_s: float = 0.0) -> PoolLease | None:
        lease = self.pool.lease_groups(groups, now_s)
        self.check()
        return lease

    def groups(self, groups: int, now_s: float = 0.0) -> list[list[int]] | None:
        lease = self.lease(groups, now_s)
        return None if lease is None else shown(lease)

    def credit(self) -> int:
        """Messages that the producer may still send, as last told."""
        self.session.limit(self.pool.allowance)
        self.session.take_messages(1.0)  # with the acknowledgement, which waits a little for more to say
        return self.session.peers[b"peer"].sequence_limit - self.sequence

    def check(self) -> None:
        pool, meter = self.pool, self.pool.meter
        ends = pool.ends.trained + pool.ends.committed + sum(meter.dropped.values())
        assert meter.arrived + meter.restored == pool.queued + pool.leased + ends

    def _read(self, position: int) -> Data:
        raise DamagedError(f"record {position}: its bytes do not match their hash")


def number(member: Member) -> int:
    return int.from_bytes(member.rollout_id, "big")


def shown(lease: PoolLease) -> list[list[int]]:
    return [[number(m) for m in leased.group.members.values()] for leased in lease.groups]


def edited(sample: Sample, **changes: object) -> Sample:
    version = changes.pop("version", None)
    if version is not None:
        trained = sample.versions != -1
        changes["versions"] = np.where(trained, version, -1).astype(np.int32)
    return msgspec.structs.replace(sample, **changes)


# -- groups


def test_groups_are_handed_out_whole_in_the_order_in_which_they_were_complete() -> None:
    desk = Desk()
    desk.send(1, group=10)
    desk.send(2, group=20)
    desk.send(3, group=20)
    assert desk.groups(2) is None
    desk.send(4, group=10)
    assert desk.groups(1) == [[2, 3]]
    assert desk.groups(1) == [[1, 4]]


def test_slime_2238_a_surplus_is_never_taken_out() -> None:
    """Ten groups were drained and eight returned; the rest was gone."""
    desk = Desk()
    for group in range(10):
        desk.send(2 * group, 2 * group + 1, group=group)
    assert desk.groups(8) == [[2 * g, 2 * g + 1] for g in range(8)]
    assert desk.pool.groups.ready_count == 2
    assert desk.groups(3) is None
    assert desk.groups(2) == [[16, 17], [18, 19]]


def test_two_attempts_of_one_rollout_are_one_member_the_later() -> None:
    desk = Desk()
    for attempt in (0, 1):
        desk.send_samples([edited(s, attempt=attempt) for s in make_rollout(2, tokens=16, group=5)])
    assert desk.groups(1) is None
    desk.send(3, group=5)
    lease = desk.lease(1)
    assert lease is not None
    assert [(number(m), m.attempt) for m in lease.members()] == [(2, 1), (3, 0)]
    assert desk.pool.meter.dropped == {"replaced": 1}
    assert desk.session.ledger.producers[PRODUCER].queued == 0


def test_the_sender_may_say_how_large_a_group_is() -> None:
    desk = Desk(group_size=None)
    desk.send_samples(list(make_rollout(2, tokens=16, group=1)))
    assert desk.lease(1) is None
    assert desk.pool.groups.only_unsized
    desk.send_samples(list(make_rollout(3, tokens=16, group=1)), group_size=2)
    assert desk.groups(1) == [[2, 3]]


def test_what_comes_after_its_group_was_handed_out_is_late() -> None:
    desk = Desk()
    desk.send(0, 1)
    assert desk.groups(1) == [[0, 1]]
    desk.send(2)
    assert desk.pool.meter.dropped == {"late": 1}


@pytest.mark.parametrize(
    ("policy", "minimum", "handed_out", "dropped"),
    [
        ("wait", 1, None, {}),
        ("drop", 1, None, {"group_deadline": 1}),
        ("deliver", 1, [[0]], {}),
        ("deliver", 2, None, {"group_deadline": 1}),
    ],
)
def test_nemo_rl_3238_a_straggler_does_not_keep_a_group_for_ever(
    policy: str, minimum: int, handed_out: object, dropped: dict[str, int]
) -> None:
    desk = Desk(group_size=3, group_deadline_s=60.0, partial_groups=policy, group_minimum=minimum)
    desk.send(0, group=1, now_s=5.0)
    desk.send(2, 4, 6, group=2, now_s=64.0)
    assert desk.groups(2, now_s=64.9) is None
    assert desk.pool.groups.next_due_s() == 65.0
    got = desk.groups(2, now_s=65.0)
    assert got == (None if handed_out is None else [[2, 4, 6], *handed_out])  # type: ignore[misc]
    assert desk.pool.meter.dropped == dropped
    assert desk.pool.meter.overdue_groups == 1
    desk.send(8, group=1, now_s=66.0)  # the straggler
    assert desk.pool.meter.dropped.get("late", 0) == (policy != "wait")


def test_a_deadline_without_a_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs group_deadline_s"):
        ReceiverConfig(partial_groups="drop")


# -- staleness


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 7}, None),
        ({"version": 6}, "stale"),
        ({"version": -2}, "unknown_version"),
        ({"version": 9, "policy_run": "run-0"}, "other_policy_run"),
        ({"version": 6, "in_loss": False}, None),
    ],
)
def test_the_oldest_trained_token_decides(changes: dict[str, object], reason: str | None) -> None:
    desk = Desk(group_size=1, max_staleness=2)
    desk.board.set(policy_run="run-1", weights_version=9)
    desk.send(1, **changes)
    handed_out = desk.lease(1)
    assert (handed_out is None) == (reason is not None)
    assert desk.pool.meter.dropped == ({reason: 1} if reason else {})


def test_slime_2092_one_old_token_among_new_ones_is_found() -> None:
    desk = Desk(group_size=1, max_staleness=1)
    desk.board.set(weights_version=9)
    (sample,) = make_rollout(2, tokens=16)
    versions = np.where(sample.versions != -1, 9, -1).astype(np.int32)
    first = int(np.flatnonzero(sample.loss_mask)[0])
    versions[first] = 7
    desk.send_samples([edited(sample, versions=versions)])
    assert desk.lease(1) is None
    assert desk.pool.meter.dropped == {"stale": 1}
    mask = sample.loss_mask.copy()
    mask[first] = 0  # an old token that is not trained on does not count
    ids = {"rollout_id": f"{9:032x}", "group_id": "9" * 32}
    desk.send_samples([edited(sample, versions=versions, loss_mask=mask, **ids)])
    assert desk.groups(1) == [[9]]


def test_skyrl_1173_and_trl_7294_a_drop_gives_its_place_back_and_moves_the_watermark() -> None:
    desk = Desk(group_size=2, max_staleness=0, queue_messages=4)
    desk.send(0, 1, group=1, version=1)
    desk.send(2, 3, group=2, version=1)
    assert desk.credit() == 0
    desk.board.set(weights_version=5)
    assert desk.lease(2) is None
    assert desk.pool.meter.dropped == {"stale": 4}
    assert desk.credit() == 4
    assert desk.session.ledger.done.to_plain() == {PRODUCER.hex(): ((1, 4, ()),)}


@pytest.mark.parametrize(("policy", "left"), [("wait", None), ("drop", None), ("deliver", [[2, 4]])])
def test_a_group_that_lost_a_member_ends_as_a_partial_one(policy: str, left: object) -> None:
    desk = Desk(group_size=3, max_staleness=0, group_deadline_s=60.0, partial_groups=policy, group_minimum=2)
    desk.board.set(weights_version=3)
    desk.send(0, group=1, version=1)
    desk.send(2, 4, group=1, version=3)
    assert desk.groups(1) == left
    assert desk.pool.meter.dropped == {"stale": 1, **({} if left else {"group_broken": 2})}


def test_areal_1388_the_allowance_is_what_is_here_against_what_may_wait() -> None:
    desk = Desk(group_size=2, max_staleness=1)
    desk.board.set(weights_version=3)
    desk.send(0, 1, group=1)
    assert desk.credit() == desk.config.queue_messages - 2  # no step was asked for yet
    lease = desk.lease(1)
    assert lease is not None
    assert desk.credit() == 2  # (1 + 1) * 2 - 2
    desk.send(2, group=2)
    assert desk.credit() == 2  # half a group does not use it up: its other half must be able to come
    desk.send(3, group=2)
    assert desk.credit() == 0
    desk.pool.commit(lease.number, 0.0)
    assert desk.credit() == 2
    desk.board.set(weights_version=9)
    assert desk.lease(1) is None  # too old by now
    assert desk.credit() == 4


# -- ends


def test_given_back_rollouts_come_first_and_end_as_dead_letters() -> None:
    desk = Desk(max_nacks=1)
    desk.send(0, 1, group=1)
    desk.send(2, 3, group=2)
    first = desk.lease(1)
    assert first is not None
    desk.pool.nack(first.number, None, "the loss was NaN", 0.0)
    desk.check()
    again = desk.lease(1)
    assert again is not None
    assert shown(again) == [[0, 1]]
    assert [m.nacks for m in again.members()] == [1, 1]
    desk.pool.nack(again.number, None, "NaN again", 0.0)
    desk.check()
    assert desk.buried == [(0, "nacked", "NaN again"), (1, "nacked", "NaN again")]
    assert desk.pool.meter.dropped == {"nacked": 2}
    assert desk.groups(1) == [[2, 3]]


def test_a_part_given_back_takes_its_group_along_and_leaves_the_rest() -> None:
    desk = Desk(max_nacks=0)
    for group in range(3):
        desk.send(2 * group, 2 * group + 1, group=group)
    lease = desk.lease(3)
    assert lease is not None
    desk.pool.nack(lease.number, frozenset({(3).to_bytes(16, "big")}), "bad image", 0.0)
    desk.check()
    assert shown(lease) == [[0, 1], [4, 5]]
    assert desk.buried == [(3, "nacked", "bad image")]
    assert desk.pool.meter.dropped == {"nacked": 1, "group_broken": 1}
    desk.pool.commit(lease.number, 0.0)
    desk.check()
    assert desk.pool.ends.committed == 4


def test_a_repetition_under_another_identity_ends_with_the_first() -> None:
    desk = Desk(group_size=1, commit_on="checkpoint")
    desk.send(4, group=1)
    desk.send(4, group=1)
    lease = desk.lease(1)
    assert lease is not None
    desk.pool.commit(lease.number, 0.0)
    desk.send(4, group=1)
    state = state_of(desk.pool)
    assert state.done == {PRODUCER.hex(): ((1, 3, ()),)}
    committed = desk.session.ledger.producers[PRODUCER].streams[1].committed
    assert committed.upto == 0
    desk.pool.ends.saved(state)
    for resolved in desk.pool.ends.take_finished()[0]:
        desk.session.mark_committed(resolved.identity, 0.0)
    assert committed.upto == 3


def test_a_damaged_record_of_the_store_is_reported_and_the_rest_goes_on() -> None:
    desk = Desk(group_size=1)
    head = draft(make_rollout(0, tokens=16)).numbered(PRODUCER, 1, 1, 0).head
    message = decode_head(head)
    assert isinstance(message, DataHead)
    identity = desk.session.ledger.restore(message, committed=False, nbytes=100)
    desk.pool.meter.restored += 1
    desk.pool.offer(Member.stored(identity, message, nbytes=100, position=8), 0.0)
    desk.sequence = 1
    desk.send(2, group=2)
    assert desk.groups(1) == [[2]]
    assert desk.buried == [(0, "unreadable", "record 8: its bytes do not match their hash")]
    assert desk.pool.meter.dropped == {"unreadable": 1}


def test_verl_4199_and_openrlhf_1322_a_checkpoint_knows_what_was_trained_not_what_was_read() -> None:
    desk = Desk(commit_on="checkpoint")
    for group in range(3):
        desk.send(2 * group, 2 * group + 1, group=group)
    trained, read = desk.lease(1), desk.lease(1)
    assert trained is not None
    assert read is not None
    desk.pool.commit(trained.number, 0.0)
    state = state_of(desk.pool)
    assert state.done == {PRODUCER.hex(): ((1, 2, ()),)}
    desk.pool.commit(read.number, 0.0)
    assert desk.pool.ends.take_finished() == []
    desk.pool.ends.saved(state)
    assert [[r.identity.sequence for r in each] for each in desk.pool.ends.take_finished()] == [[1, 2]]
    assert (desk.pool.ends.trained, desk.pool.ends.committed) == (2, 2)
    desk.check()


def test_a_checkpoint_is_json_and_loads_elsewhere() -> None:
    old = Desk()
    old.send(0, 1, group=1)
    lease = old.lease(1)
    assert lease is not None
    old.pool.commit(lease.number, 0.0)
    plain = msgspec.json.decode(msgspec.json.encode(state_of(old.pool)))
    assert plain["kind"] == "trainer-bridge/receiver"
    new = Desk()
    new.send(0, 1, group=1)  # sent again, before the trainer had loaded its checkpoint
    new.send(2, 3, group=2)
    load_state(new.pool, msgspec.convert(plain, type(state_of(old.pool))), [], 0.0)
    new.check()
    assert new.groups(1) == [[2, 3]]
    assert new.pool.ends.committed == 2
    with pytest.raises(BridgeError, match="load it first"):
        load_state(new.pool, state_of(old.pool), [], 0.0)


@pytest.mark.parametrize("trained", [False, True])
def test_a_partial_group_is_over_in_the_checkpoint_once_it_was_trained_on(trained: bool) -> None:
    policy = {"group_size": 3, "group_deadline_s": 60.0, "partial_groups": "deliver"}
    old = Desk(**policy)  # type: ignore[arg-type]
    old.send(0, 2, group=1)
    lease = old.lease(1, now_s=60.0)
    assert lease is not None
    if trained:
        old.pool.commit(lease.number, 60.0)
    new = Desk(**policy)  # type: ignore[arg-type]
    load_state(new.pool, state_of(old.pool), [], 0.0)
    new.sequence = 0
    for n in (0, 2, 4):  # 4 is the straggler
        if not (trained and n != 4):
            new.send(n, group=1)
        else:
            new.sequence += 1
    assert new.groups(1) == (None if trained else [[0, 2, 4]])
    assert new.pool.meter.dropped == ({"late": 1} if trained else {})


def test_a_rollout_that_a_checkpoint_holds_is_known_under_any_identity() -> None:
    old = Desk(group_size=1)
    old.send(4, group=1)
    lease = old.lease(1)
    assert lease is not None
    old.pool.commit(lease.number, 0.0)
    new = Desk(group_size=1)
    new.sequence = 10
    new.send(4, group=1)  # its worker was run again, and this came before the checkpoint was loaded
    load_state(new.pool, state_of(old.pool), [], 0.0)
    new.check()
    new.send(4, group=1)  # and this after it
    assert new.pool.meter.dropped == {"duplicate": 1}
    assert new.session.ledger.producers[PRODUCER].doubled == 1
    assert new.groups(1) is None
    assert new.session.ledger.done.to_plain()[PRODUCER.hex()] == ((1, 1, ((11, 12),)),)


# -- standing still


def cause(desk: Desk, now_s: float = 214.0) -> str | None:
    return cause_of_standstill(desk.session, desk.pool, now_s)


def test_nemo_rl_3488_a_dead_producer_is_named() -> None:
    desk = Desk()
    desk.send(0)
    assert cause(desk) is None, "it may send the rest"
    desk.session.unreachable(b"peer")
    assert cause(desk) == (
        "no producer is connected (producer w7 was lost); group 00000000000000000000000000000000 waits for 1 "
        "of 2 for 214 s; 1 rollouts are queued, 0 groups are complete"
    )


def test_credit_held_by_leases_is_named() -> None:
    desk = Desk(max_staleness=0)
    desk.send(0, 1)
    assert desk.lease(1) is not None
    assert desk.credit() == 0
    assert cause(desk) == (
        "producer w7 has 0 credit; 1 leases with 2 rollouts are neither committed nor given back, the oldest "
        "for 214 s; 0 rollouts are queued, 0 groups are complete"
    )


def test_a_queue_full_of_halves_is_named() -> None:
    desk = Desk(queue_messages=2)
    desk.send(0, group=1)
    desk.send(2, group=2)
    text = cause(desk)
    assert text is not None
    assert "producer w7 has 0 credit" in text
    assert text.count("waits for 1 of 2 for 214 s") == 2


def test_refused_workers_are_named_and_a_first_one_is_waited_for() -> None:
    config = ReceiverConfig()
    session = ReceiverSession(receiver=b"r" * 16, config=config, board=ControlBoard())
    pool = Pool(
        session=session,
        config=config,
        board=ControlBoard(),
        read=lambda position: pytest.fail(f"{position} was read"),
        bury=lambda *letter: pytest.fail(f"{letter} was buried"),
        now_s=0.0,
    )
    assert cause_of_standstill(session, pool, 9.0) is None
    old = Hello(1, "producer", PRODUCER, "old-worker", 0, 0, (("sample/1", 5),), (), 1, ((1, 1),))
    session.on_message(b"x", old, 0.0)
    text = cause_of_standstill(session, pool, 9.0)
    assert text is not None
    assert "every worker that came was refused; old-worker was refused: old-worker sends schemas" in text
