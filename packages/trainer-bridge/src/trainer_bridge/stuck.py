"""Why a receiver cannot go on, in words that name who holds what.

A buffer that is polled for hours while its producer is dead (NVIDIA-NeMo/RL#3488), or that stays at 125 of
128 for hours (NovaSky-AI/SkyRL#1173), looks like one that is slow. What tells them apart is whether anything
can still come.
"""

from __future__ import annotations

from trainer_bridge.groups import Group
from trainer_bridge.pool import UNSIZED, Pool
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.peers import Producer

NAMED = 4
"""Producers, refusals and groups named in one text; the rest is counted."""


def cause_of_standstill(session: ReceiverSession, pool: Pool, now_s: float, full: str = "") -> str | None:
    """Why nothing can come. None: something can, or no worker has ever been here.

    Args:
        session: who is connected, and what they may send.
        pool: what is here.
        now_s: the instant.
        full: what the store says that takes no more. Empty: it does.
    """
    met = [p for p in session.ledger.producers.values() if p.presence != "away"]
    connected = [p for p in met if p.presence == "connected"]
    if not met and not session.refusals.standing:
        return None
    crowded = [p for p in connected if session.is_crowded(p, now_s)]
    if any(session.has_credit(p) and p not in crowded for p in connected):
        return None
    causes: list[str] = []
    if not connected:
        causes.append(_gone(met) if met else "every worker that came was refused")
    else:
        without = [f"producer {p.name} has 0 credit" for p in connected if p not in crowded]
        holding = [f"producer {p.name} has no room: nothing that it holds is committed" for p in crowded]
        causes.append(_listed(without + holding))
    if full:
        causes.append(full)
    ceiling = session.allotment.ceiling(connected)
    if ceiling:
        causes.append(ceiling)
    refused = session.refusals.standing
    if refused:
        causes.append(_listed([f"{name} was refused: {why}" for name, why in refused.items()]))
    if pool.leases:
        since_s = min(lease.since_s for lease in pool.leases.values())
        causes.append(
            f"{len(pool.leases)} leases with {pool.leased} rollouts are neither committed nor given back, "
            f"the oldest for {now_s - since_s:.0f} s"
        )
    missing = [f"rank {rank} has not asked for a step" for rank in session.steps.missing()]
    if missing:
        causes.append(_listed(missing))
    causes += [text for _, _, text in what_is_awaited(pool, now_s)]
    causes.append(f"{pool.queued} rollouts are queued, {pool.groups.ready_count} groups are complete")
    return "; ".join(causes)


def what_is_awaited(pool: Pool, now_s: float) -> list[tuple[str, str, str]]:
    """What must come before more is handed out, whether or not it will: (subject, about what, text).

    Senders may be slow, or have given a rollout up: from here that looks alike, and only the people who run
    them know which it is.
    """
    awaited: list[tuple[str, str, str]] = []
    groups = pool.groups.incomplete()
    sized = [group for group in groups if group.size]
    if sized:
        text = _listed([_waits(group, now_s) for group in sized])
        awaited.append(("incomplete", sized[0].id.hex(), text))
    unsized = [group.id.hex() for group in groups if not group.size]
    if unsized:
        awaited.append(("unsized groups", unsized[0], UNSIZED.format(_listed(unsized))))
    if pool.ends.trained:
        awaited.append(
            (
                "unsaved",
                "",
                f"{pool.ends.trained} rollouts are trained on and in no saved checkpoint: senders wait for "
                "checkpoint_saved() once they hold as many as they may (give them a spool, save more often, "
                "or raise SenderConfig.max_unsettled)",
            )
        )
    return awaited


def _gone(met: list[Producer]) -> str:
    ended = [f"producer {p.name} {'said BYE' if p.presence == 'finished' else 'was lost'}" for p in met]
    return f"no producer is connected ({_listed(ended)})"


def _waits(group: Group, now_s: float) -> str:
    missing = group.size - len(group.members)
    return f"group {group.id.hex()} waits for {missing} of {group.size} for {now_s - group.opened_s:.0f} s"


def _listed(texts: list[str]) -> str:
    more = f", and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more
