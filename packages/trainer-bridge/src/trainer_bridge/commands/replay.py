"""`trainer-bridge replay`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer_bridge.address import absence_hint
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.codec import decode_frames
from trainer_bridge.commands.output import interruptible, plain, write_json, write_line
from trainer_bridge.config import SenderConfig
from trainer_bridge.errors import AuthError, BackpressureError, ConnectError, ProtocolError
from trainer_bridge.keys import CurveKeys
from trainer_bridge.sender import SampleSender
from trainer_bridge.stats import SenderStats
from trainer_bridge.stored import find_segments, scan_segments

WAIT_S = 0.5


def replay(
    path: Path, address: str, *, as_json: bool, timeout_s: float, insecure: bool, keys: CurveKeys | None
) -> int:
    """Send stored samples to a receiver, under a new identity. It drops rollouts that it already has."""
    find_segments(path)
    faults: list[str] = []
    with interruptible(), _connect(address, timeout_s, insecure, keys) as sender:
        stopped = _send_all(sender, path, timeout_s, faults)
        if not stopped:
            _await_settled(sender, timeout_s, SystemClock())
        stats = sender.close(drain_s=0.0)
    _report(stats, faults, as_json)
    if stopped:
        sys.stderr.write(f"trainer-bridge replay: {stopped}\n")
    elif stats.pending:
        sys.stderr.write(
            f"trainer-bridge replay: {stats.pending} rollouts are not acknowledged, and none was for "
            f"{timeout_s:g} s; is the receiver's consumer running? Replaying again is harmless\n"
        )
    return 1 if faults or stopped or stats.pending else 0


def _connect(address: str, timeout_s: float, insecure: bool, keys: CurveKeys | None) -> SampleSender:
    try:
        return SampleSender(
            address,
            connect_timeout_s=timeout_s,
            producer="replay",
            config=SenderConfig(insecure=insecure),
            keys=keys,
        )
    except AuthError:
        raise
    except ConnectError as error:
        raise ConnectError(
            f"no trainer-bridge receiver has answered at {address} for {timeout_s:g} s: "
            f"{absence_hint(address)}; start one (`trainer-bridge receive --bind ...`) and replay again"
        ) from error


def _send_all(sender: SampleSender, path: Path, timeout_s: float, faults: list[str]) -> str:
    """Hand over every record that can be read. Returns why it stopped before the end; empty: it did not."""
    for segment, found, torn in scan_segments(path):
        faults += [*found, torn] if torn else found
        for record in segment.records():
            where = f"{segment.path}: record {record.seq}"
            try:
                data = decode_frames(record.frames)
                sender.send(data.samples, group_size=data.head.group_size or None, timeout_s=timeout_s)
            except ProtocolError as error:
                faults.append(f"{where}: {error}")
            except BackpressureError:
                return (
                    f"stopped before {where}: the receiver made no room for {timeout_s:g} s; is its consumer "
                    "running? Replaying again is harmless, what has arrived is dropped as a duplicate"
                )
            except ConnectError as error:
                return f"stopped before {where}: the receiver is gone ({type(error).__name__}); replay again"
    return ""


def _await_settled(sender: SampleSender, timeout_s: float, clock: Clock) -> None:
    """Wait as long as acknowledgements come."""
    pending = sender.stats().pending
    end_s = clock.monotonic_s() + timeout_s
    while not sender.wait_settled(min(WAIT_S, timeout_s)) and clock.monotonic_s() < end_s:
        left = sender.stats().pending
        if left < pending:
            pending, end_s = left, clock.monotonic_s() + timeout_s


def _report(stats: SenderStats, faults: list[str], as_json: bool) -> None:
    if as_json:
        write_json(
            {
                "event": "end",
                "sent": stats.sent,
                "acknowledged": stats.acknowledged,
                "receiver": stats.farewell,
                "faults": faults,
            }
        )
        return
    said = f"; the receiver says: {plain(stats.farewell)}" if stats.farewell else ""
    write_line(f"sent {stats.sent} rollouts, {stats.acknowledged} acknowledged{said}")
    for fault in faults:
        write_line(f"FAULT {fault}")
