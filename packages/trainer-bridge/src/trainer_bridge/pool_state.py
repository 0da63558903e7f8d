"""A `Pool` as a trainer's checkpoint holds it, and back."""

from __future__ import annotations

from collections.abc import Iterable

from trainer_bridge.checkpoint import (
    ReceiverState,
    decode_ids,
    decode_rollouts,
    encode_ids,
    encode_rollouts,
)
from trainer_bridge.ends import BEFORE_CHECKPOINT
from trainer_bridge.errors import BridgeError
from trainer_bridge.member import Member
from trainer_bridge.pool import Pool


def state_of(pool: Pool) -> ReceiverState:
    """What a checkpoint must hold: everything that came to its end until now."""
    ledger, control = pool.session.ledger, pool.board.state
    # A group in the consumer's hands is over here, and comes again after a restart.
    held = frozenset(each.group.id for lease in pool.leases.values() for each in lease.groups)
    return ReceiverState(
        policy_run=control.policy_run,
        weights_version=control.weights_version,
        done=ledger.done.to_plain(),
        rollouts=encode_rollouts(ledger.rollouts.done()),
        dropped_rollouts=encode_ids(ledger.rollouts.dropped()),
        closed_groups=encode_ids(pool.groups.closed.latest(without=held)),
    )


def load_state(
    pool: Pool, state: ReceiverState, again: Iterable[Member], now_s: float, over: Iterable[bytes] = ()
) -> None:
    """Go on from a checkpoint.

    Args:
        pool: nothing was handed out of it yet.
        state: the checkpoint's.
        again: stored rollouts that were committed and that the checkpoint does not hold, in their order.
        now_s: the instant.
        over: groups of stored rollouts that the checkpoint holds.

    Raises:
        BridgeError: rollouts were handed out already, or the state is damaged.
    """
    if pool.meter.leases:
        raise BridgeError("load_state_dict comes after rollouts were handed out: load it first")
    done, rollouts = state.watermark(), decode_rollouts(state.rollouts)
    for group_id in decode_ids(state.closed_groups):
        pool.groups.closed.add(group_id)
    pool.groups.closed.restored(over)
    dropped = frozenset(decode_ids(state.dropped_rollouts))
    pool.session.ledger.load(done, rollouts, dropped)
    known = dict(rollouts)
    for member in pool.waiting():
        if member.identity in done:
            pool.leave(member)
            reason = BEFORE_CHECKPOINT if member.rollout_id in dropped else ""
            if reason:
                pool.meter.drop(reason)
            pool.ends.known(member, dropped=reason)
        elif known.get(member.rollout_id, -1) >= member.attempt:
            pool.drop(member, "duplicate")
        elif pool.is_late(member):
            pool.drop(member, "late")
    first = list(again)
    for member in first:
        pool.meter.restored += 1
        pool.offer(member, now_s)
    if first:
        pool.put_in_order()
