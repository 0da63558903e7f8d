"""How a step is shared out over ranks, and what a rank is sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from trainer_bridge import RankReceiver, ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.codec import Frames, decode_frames, draft
from trainer_bridge.config import Timing
from trainer_bridge.groups import Group, HeldGroup, PoolLease
from trainer_bridge.member import Member
from trainer_bridge.session import Identity
from trainer_bridge.session.peers import Accepted
from trainer_bridge.shares import share_out
from trainer_bridge.testing import differences, make_rollout


def held(number: int, tokens: int) -> HeldGroup:
    frames = draft(make_rollout(number, parts=1, tokens=tokens, group=number)).numbered(
        b"p" * 16, 1, number + 1, 0
    )
    data = decode_frames(Frames(*frames))
    member = Member.arrived(Accepted(Identity(b"p" * 16, 1, number + 1), data, frames.nbytes), frames, 0)
    group = Group(member.group_id, 0.0, 1, {member.rollout_id: member})
    return HeldGroup(group, complete=True, single=False)


@given(tokens=st.lists(st.integers(8, 400), min_size=1, max_size=12), world=st.integers(1, 5))
def test_every_rank_gets_as_many_as_the_others_or_one_less(tokens: list[int], world: int) -> None:
    """One long rollout and six short ones over three ranks were 1, 3 and 3."""
    lease = PoolLease(1, 0.0, [held(number, length) for number, length in enumerate(tokens)])
    shares = share_out(lease, world, "rollouts")
    sizes = [sum(len(each.group.members) for each in share) for share in shares]
    assert sum(sizes) == len(tokens)
    assert max(sizes) - min(sizes) <= 1


def test_a_rank_is_sent_what_was_read_when_it_was_leased(
    tmp_path: Path,
    receiver_config: Callable[..., ReceiverConfig],
    sender_config: Callable[..., SenderConfig],
    timing: Timing,
) -> None:
    """The record was read again from a store that had been damaged since, and ended the receiver."""
    config = receiver_config(group_size=1)
    with (
        SampleReceiver(out=tmp_path, config=config) as receiver,
        SampleSender(receiver.address, config=sender_config(settle="stored")) as sender,
    ):
        for number in range(2):
            sender.send(make_rollout(number, parts=1, group=number))
        assert sender.wait_settled(40.0)
    with (
        SampleReceiver(out=tmp_path, config=config) as receiver,
        RankReceiver(receiver.address, rank=1, world=2, timing=timing) as rank,
        ThreadPoolExecutor(1) as threads,
    ):
        read = receiver.next_batch(groups=2, deadline_s=40.0)
        assert read is not None
        read.nack("again")
        segment = next((tmp_path / "samples").glob("*.tbs"))
        segment.write_bytes(bytes(byte ^ 1 for byte in segment.read_bytes()))
        theirs = threads.submit(rank.next_batch, groups=2, deadline_s=40.0)
        mine = receiver.next_batch(groups=2, deadline_s=40.0, world=2)
        assert mine is not None
        share = theirs.result(40.0)
        assert share is not None
        for lease in (mine, share):
            (rollout,) = lease.rollouts
            sent = make_rollout(int(rollout.rollout_id, 16), parts=1, group=int(rollout.group_id, 16))
            assert [differences(a, b) for a, b in zip(sent, rollout.samples, strict=True)] == [[]]
        share.commit()
        mine.commit()
