"""`trainer-bridge receive`."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from trainer_bridge.address import to_connect
from trainer_bridge.clock import SystemClock
from trainer_bridge.commands.output import (
    COLUMNS,
    plain,
    reader_is_gone,
    row,
    sample_cells,
    sample_event,
    stop_flag,
    write_json,
    write_line,
)
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.keys import CurveKeys
from trainer_bridge.lease import Lease
from trainer_bridge.prometheus import PrometheusExporter
from trainer_bridge.receiver import SampleReceiver
from trainer_bridge.receiver_events import ReceiverEvent
from trainer_bridge.stats import ReceiverStats

POLL_S = 0.2
DRAIN_S = 0.5
"""When asked to end, what has arrived is still printed, for so long."""


def receive(
    bind: str,
    *,
    out: Path | None,
    as_json: bool,
    insecure: bool,
    keys: CurveKeys | None,
    metrics: str | None = None,
) -> int:
    """Take samples, print a line for each, and commit them.

    Ctrl-C or SIGTERM ends it, with the counts. It ends too when whoever reads its output is gone.
    """
    # Events are queued, and shown by this thread: the receiver's own must not stumble over a closed pipe.
    events: deque[ReceiverEvent] = deque()
    # The handlers stand before anyone is told the address: a signal that comes right after ends in order.
    with (
        stop_flag() as stop,
        SampleReceiver(
            bind,
            out=out,
            on_event=events.append,
            config=ReceiverConfig(insecure=insecure, patience_s=None),
            keys=keys,
        ) as receiver,
        ExitStack() as stack,
    ):
        url = ""
        if metrics is not None:
            url = stack.enter_context(PrometheusExporter(receiver, metrics, insecure=insecure)).url
        _begin(receiver.address, url, as_json=as_json)
        while not stop.set:
            lease = receiver.next(POLL_S)
            if lease is not None:
                _show(lease, as_json=as_json)
            elif reader_is_gone():
                raise BrokenPipeError("nobody reads the output any more")
            while events:
                sys.stderr.write(f"trainer-bridge: {plain(events.popleft().text)}\n")
                sys.stderr.flush()
        _drain(receiver, as_json=as_json)
        receiver.close()
        _end(receiver.stats(), as_json=as_json)
    return 0


def _begin(address: str, metrics: str, *, as_json: bool) -> None:
    if as_json:
        more = {"metrics": metrics} if metrics else {}
        write_json({"event": "listening", "address": address, "pid": os.getpid(), **more})
    else:
        if metrics:
            write_line(f"metrics at {metrics}")
        there = to_connect(address)
        write_line(f"listening on {address}  (Ctrl-C ends; `trainer-bridge tail {there}` looks on)")
        write_line(row(COLUMNS))


def _drain(receiver: SampleReceiver, *, as_json: bool) -> None:
    clock = SystemClock()
    end_s = clock.monotonic_s() + DRAIN_S
    while clock.monotonic_s() < end_s:
        lease = receiver.next(0.0)
        if lease is None:
            return
        _show(lease, as_json=as_json)


def _show(lease: Lease, *, as_json: bool) -> None:
    for sample in lease.samples:
        if as_json:
            event = sample_event(
                sample,
                producer=lease.producer_name,
                producer_id=lease.producer,
                sequence=lease.sequence,
                created_ns=lease.created_ns,
            )
            write_json({**event, "restored": lease.restored})
        else:
            write_line(row(sample_cells(sample, producer=lease.producer[:8], created_ns=lease.created_ns)))
    # After the line is out: a crash in between repeats the line, it does not lose it.
    lease.commit()


def _end(stats: ReceiverStats, *, as_json: bool) -> None:
    if as_json:
        write_json(
            {
                "event": "end",
                "rollouts": stats.messages,
                "samples": stats.samples,
                "tokens": stats.tokens,
                "committed": stats.committed,
                "dropped": dict(stats.dropped),
                "restored": stats.restored,
                "queued": stats.queued,
                "duplicates": stats.duplicates,
                "fenced": stats.fenced,
                "rejected": dict(stats.rejected),
                "stored": stats.stored,
                "torn_bytes": stats.torn_bytes,
                "producers": len(stats.producers),
                "lost_producers": list(stats.lost_producers),
            }
        )
        return
    write_line(
        f"{stats.messages} rollouts, {stats.samples} samples, {stats.tokens} tokens; "
        f"{stats.committed} committed, {stats.duplicates} repeated, {stats.fenced} of replaced attempts, "
        f"{sum(stats.rejected.values())} refused"
    )
    if stats.lost_producers:
        write_line(f"ended without BYE: {', '.join(stats.lost_producers)}")
