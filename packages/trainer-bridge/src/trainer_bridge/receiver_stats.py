"""`gather_stats`: a receiver at one instant, from the parts that count."""

from __future__ import annotations

from trainer_bridge.errors import reason_of
from trainer_bridge.guard import Guard
from trainer_bridge.messages import Status
from trainer_bridge.meter import flat_metrics
from trainer_bridge.pool import Pool
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.peers import Producer
from trainer_bridge.stats import ProducerStats, ReceiverStats
from trainer_bridge.store import Store
from trainer_bridge.transport import ServerTransport

STATUS_PRODUCERS = 256
"""Producers that one STATUS names; connected ones come first."""


def gather_stats(
    transport: ServerTransport, session: ReceiverSession, pool: Pool, store: Store | None, guard: Guard
) -> ReceiverStats:
    """The caller holds the lock that guards session and pool."""
    meter = pool.meter
    producers = session.ledger.producers.values()
    return ReceiverStats(
        address=transport.address,
        messages=meter.arrived,
        samples=meter.samples,
        tokens=meter.tokens,
        restored=meter.restored,
        queued=pool.queued,
        leased=pool.leased,
        trained=pool.ends.trained,
        committed=pool.ends.committed,
        dropped=dict(meter.dropped),
        nacks=meter.nacks,
        groups_ready=pool.groups.ready_count,
        groups_incomplete=pool.groups.incomplete_count,
        groups_unsized=pool.groups.unsized_count,
        oldest_incomplete_s=pool.groups.oldest_incomplete_s(pool.seen_s),
        credit_beyond_queue=session.beyond_queue,
        unavailable=session.ledger.unavailable,
        duplicates=sum(p.duplicates for p in producers),
        doubled=sum(p.doubled for p in producers),
        fenced=sum(p.fenced for p in producers),
        rejected={reason_of(code): n for code, n in session.rejected.items()},
        unread=guard.unread + session.beyond_credit,
        quarantines=guard.quarantines,
        connections_refused=transport.refused,
        stored=store.count if store is not None else 0,
        trimmed=store.trimmed.upto if store is not None else 0,
        store_bytes=store.nbytes if store is not None else 0,
        store_left_bytes=store.room.left_bytes if store is not None else None,
        store_faults=store.faults if store is not None else 0,
        store_damaged=store.damage.count(1) if store is not None else 0,
        letters_not_kept=meter.letters_not_kept,
        event_faults=meter.event_faults,
        torn_bytes=store.torn_bytes if store is not None else 0,
        observers=sum(peer.role == "observer" for peer in session.peers.values()),
        skipped_copies=session.skipped_copies,
        forgotten_rollouts=session.ledger.rollouts.forgotten,
        producers=tuple(_producer_stats(p) for p in producers),
    )


def status_of(
    observer: bytes,
    transport: ServerTransport,
    session: ReceiverSession,
    pool: Pool,
    store: Store | None,
    guard: Guard,
) -> Status | None:
    """What an observer is told. None: it has left."""
    peer = session.peers.get(observer)
    if peer is None:
        return None
    stats = gather_stats(transport, session, pool, store, guard)
    producers = session.ledger.producers.values()
    return Status(
        session=peer.session,
        metrics=flat_metrics(stats, pool.meter, pool.weights_version),
        producers=tuple(
            (p.name, p.id, p.presence, p.queued, session.credit_left(p), p.reported_unsettled)
            for p in sorted(producers, key=lambda p: (p.presence != "connected", p.name))[:STATUS_PRODUCERS]
        ),
    )


def _producer_stats(producer: Producer) -> ProducerStats:
    return ProducerStats(
        name=producer.name,
        producer=producer.id.hex(),
        presence=producer.presence,
        messages=producer.messages,
        samples=producer.samples,
        duplicates=producer.duplicates,
        fenced=producer.fenced,
        rejected=producer.rejected,
        queued=producer.queued,
        unsettled=producer.reported_unsettled,
    )
