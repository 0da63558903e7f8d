"""`go_on_from`: a receiver that starts from a trainer's checkpoint, and what its store has for that."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from trainer_bridge.checkpoint import ReceiverState, decode_ids, decode_rollouts
from trainer_bridge.clock import Clock
from trainer_bridge.closed_groups import EndedGroups
from trainer_bridge.dead_letters import DeadLetters, letter_of_loss
from trainer_bridge.member import Member
from trainer_bridge.messages import DataHead
from trainer_bridge.pool import Pool
from trainer_bridge.pool_state import load_state
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Identity
from trainer_bridge.session.ledger import Ledger
from trainer_bridge.store import Held, Store
from trainer_bridge.store_damage import UNREADABLE
from trainer_bridge.trimmed import describe_lost

log = logging.getLogger(__name__)


def take_in(store: Store, pool: Pool, ledger: Ledger, letters: DeadLetters, clock: Clock) -> None:
    """At the start: what the store holds is known, and what of it is not committed waits again.

    What is damaged or missing in it is dropped, with a dead letter for each place.
    """
    now_s = clock.monotonic_s()
    ended = EndedGroups()
    ledger.restore_trimmed(store.trimmed.done, store.trimmed.rollouts())
    ended.note_trimmed(store.trimmed.groups)
    for held in store.held():
        identity = ledger.restore(
            held.head, committed=held.committed, nbytes=held.nbytes, trained=not held.dropped
        )
        if held.committed:
            ended.note_ended(held.head.group_id, dropped=held.dropped)
        else:
            ended.note_live(held.head.group_id)
            pool.meter.restored += 1
            pool.offer(Member.stored(identity, held.head, nbytes=held.nbytes, position=held.position), now_s)
    pool.groups.closed.restored(ended.over())
    for loss in store.take_losses():
        count = loss.damage.last - loss.damage.first + 1
        pool.meter.restored += count
        pool.meter.drop(UNREADABLE, count)
        letters.add(letter_of_loss(loss, clock.now_ns()))
    store.begin_trimming()
    if store.last:
        log.info("%d rollouts in the store, %d of them not committed", store.last, pool.meter.restored)


def go_on_from(state: ReceiverState, pool: Pool, ledger: Ledger, store: Store | None, now_s: float) -> str:
    """Load a checkpoint: what it does not hold comes again, from the store where senders have forgotten it.

    The caller holds the lock that guards pool and ledger, and settles.

    Returns:
        What cannot come again because the store has deleted it, for people. Empty: nothing.

    Raises:
        BridgeError: rollouts were handed out already, or the state is damaged.
    """
    done = state.watermark()
    known = {rollout_id for rollout_id, _ in decode_rollouts(state.rollouts)}
    dropped = frozenset(decode_ids(state.dropped_rollouts))
    committed = SeqSet()
    again: list[tuple[DataHead, int, int]] = []
    ended = EndedGroups()
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store.steady)
            ended.note_trimmed(store.trimmed.groups)
        for held in store.held() if store is not None else ():
            identity = Identity(held.head.producer, held.head.epoch, held.head.sequence)
            # What was dropped since this start stays dropped: its sender may have been told.
            if identity in done or (held.committed and identity in ledger.dropped):
                if held.committed:  # else it is, with its reason, once the pool has said so
                    committed.add(held.position)
                ended.note_ended(held.head.group_id, dropped=_why_ended(held, known, dropped))
                continue
            ended.note_live(held.head.group_id)
            if held.committed:
                again.append((held.head, held.nbytes, held.position))
        members = (
            Member.stored(ledger.reopen(head, nbytes), head, nbytes=nbytes, position=position)
            for head, nbytes, position in again
        )
        load_state(pool, state, members, now_s, ended.over())
        lost = ledger.give_up(store.trimmed.done) if store is not None else []
        if store is not None:
            store.rewind(committed, state)
    log.info("a checkpoint was loaded: %d stored rollouts after it come again", len(again))
    if not lost:
        return ""
    return (
        f"{describe_lost(lost)} that the loaded checkpoint does not hold cannot come again: they were "
        "committed after it, and deleted from the store since (ReceiverConfig.keep_committed, "
        "keep_checkpoints)"
    )


def _why_ended(held: Held, known: AbstractSet[bytes], dropped: AbstractSet[bytes]) -> str | None:
    """Why a record that a checkpoint holds was dropped. Empty: it was trained on. None: that is not known.

    The checkpoint comes first: the store may know of a later end, or, after a kill between the saving of the
    checkpoint and `checkpoint_saved`, of none.

    Args:
        held: the record.
        known: the rollouts that the checkpoint names.
        dropped: those of them that were dropped.
    """
    if held.dropped:
        return held.dropped
    if held.head.rollout_id in dropped:
        return None  # groups that ended with it are among the checkpoint's closed groups
    return "" if held.committed or held.head.rollout_id in known else None
