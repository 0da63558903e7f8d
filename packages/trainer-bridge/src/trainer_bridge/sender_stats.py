"""`gather_sender_stats`: a sender at one instant, from the parts that count."""

from __future__ import annotations

from trainer_bridge.errors import reason_of
from trainer_bridge.sender_loop import SenderLoop
from trainer_bridge.stats import SenderStats


def gather_sender_stats(
    loop: SenderLoop, address: str, *, first_own: int, inherited: int, spooled: bool
) -> SenderStats:
    """The caller holds `loop.changed`.

    Args:
        loop: the sender's.
        address: the receiver's.
        first_own: the first sequence number of this process.
        inherited: messages of earlier processes that were not settled at the start.
        spooled: there is a spool.
    """
    session = loop.session
    pending = session.unsettled
    sent = session.last - first_own + 1
    return SenderStats(
        address=address,
        producer=loop.outbox.producer.hex(),
        epoch=loop.outbox.streams[-1].epoch,
        sent=sent,
        inherited=inherited,
        acknowledged=sent + inherited - pending - sum(session.dropped.values()) - loop.outbox.lost,
        lost=loop.outbox.lost,
        pending=pending,
        in_flight=session.in_flight,
        spooled=pending if spooled else 0,
        dropped={reason_of(code): n for code, n in session.dropped.items()},
        damaged=session.damaged,
        resent=session.resent,
        reconnects=max(loop.connects - 1, 0),
        connected=session.state == "open",
        disk_faults=loop.outbox.disk_faults,
        unreadable=loop.unreadable,
        event_faults=loop.listener.faults,
        last_error=loop.last_error,
        farewell=session.farewell,
        where=loop.outbox.place() if pending else "",
    )
