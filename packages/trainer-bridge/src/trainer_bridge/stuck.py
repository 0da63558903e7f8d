"""Why a receiver cannot go on, in words that name who holds what.

A buffer that is polled for hours while its producer is dead (NVIDIA-NeMo/RL#3488), or that stays at 125 of
128 for hours (NovaSky-AI/SkyRL#1173), looks like one that is slow. What tells them apart is whether anything
can still come.
"""

from __future__ import annotations

from trainer_bridge.groups import Group
from trainer_bridge.pool import Pool
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.peers import Producer

NAMED = 4
"""Producers, refusals and groups named in one text; the rest is counted."""


def cause_of_standstill(session: ReceiverSession, pool: Pool, now_s: float) -> str | None:
    """Why nothing can come. None: something can, or no worker has ever been here."""
    met = [p for p in session.ledger.producers.values() if p.presence != "away"]
    connected = [p for p in met if p.presence == "connected"]
    if not met and not session.refusals:
        return None
    if any(session.has_credit(p) for p in connected):
        return None
    causes: list[str] = []
    if not connected:
        causes.append(_gone(met) if met else "every worker that came was refused")
    else:
        causes.append(_listed([f"producer {p.name} has 0 credit" for p in connected]))
    if session.refusals:
        causes.append(_listed([f"{name} was refused: {why}" for name, why in session.refusals.items()]))
    if pool.leases:
        since_s = min(lease.since_s for lease in pool.leases.values())
        causes.append(
            f"{len(pool.leases)} leases with {pool.leased} rollouts are neither committed nor given back, "
            f"the oldest for {now_s - since_s:.0f} s"
        )
    missing = [f"rank {rank} has not asked for a step" for rank in session.steps.missing()]
    if missing:
        causes.append(_listed(missing))
    waiting = [_waits(group, now_s) for group in pool.groups.incomplete() if group.size]
    if waiting:
        causes.append(_listed(waiting))
    causes.append(f"{pool.queued} rollouts are queued, {pool.groups.ready_count} groups are complete")
    return "; ".join(causes)


def _gone(met: list[Producer]) -> str:
    ended = [f"producer {p.name} {'said BYE' if p.presence == 'finished' else 'was lost'}" for p in met]
    return f"no producer is connected ({_listed(ended)})"


def _waits(group: Group, now_s: float) -> str:
    missing = group.size - len(group.members)
    return f"group {group.id.hex()} waits for {missing} of {group.size} for {now_s - group.opened_s:.0f} s"


def _listed(texts: list[str]) -> str:
    more = f", and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more
