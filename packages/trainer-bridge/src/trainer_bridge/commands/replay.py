"""`trainer-bridge replay`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer_bridge.clock import SystemClock
from trainer_bridge.codec import decode_frames
from trainer_bridge.commands.output import interruptible, write_json, write_line
from trainer_bridge.config import SenderConfig
from trainer_bridge.errors import ProtocolError
from trainer_bridge.keys import CurveKeys
from trainer_bridge.sender import SampleSender
from trainer_bridge.stored import find_segments, scan_segments

WAIT_S = 0.5


def replay(
    path: Path, address: str, *, as_json: bool, timeout_s: float, insecure: bool, keys: CurveKeys | None
) -> int:
    """Send stored samples to a receiver, under a new identity. It drops rollouts that it already has."""
    find_segments(path)
    faults: list[str] = []
    clock = SystemClock()
    with (
        interruptible(),
        SampleSender(
            address,
            connect_timeout_s=timeout_s,
            producer="replay",
            config=SenderConfig(insecure=insecure),
            keys=keys,
        ) as sender,
    ):
        for segment, fault, _ in scan_segments(path):
            if fault:
                faults.append(f"{segment.path}: {fault}")
            for record in segment.records():
                try:
                    sender.send(decode_frames(record.frames).samples)
                except ProtocolError as error:
                    faults.append(f"{segment.path}: record {record.seq}: {error}")
        end_s = clock.monotonic_s() + timeout_s
        settled = sender.wait_settled(WAIT_S)
        while not settled and clock.monotonic_s() < end_s:
            settled = sender.wait_settled(WAIT_S)
        stats = sender.close(drain_s=0.0)
    if as_json:
        write_json({"event": "end", "sent": stats.sent, "acknowledged": stats.acknowledged, "faults": faults})
    else:
        write_line(f"sent {stats.sent} rollouts, {stats.acknowledged} acknowledged")
        for fault in faults:
            write_line(f"FAULT {fault}")
    if stats.pending:
        sys.stderr.write(
            f"trainer-bridge replay: {stats.pending} rollouts are not acknowledged after {timeout_s} s; "
            "is the receiver's consumer running? Replaying again is harmless\n"
        )
    return 1 if faults or stats.pending else 0
