"""`trainer-bridge audit`."""

from __future__ import annotations

from pathlib import Path

from trainer_bridge.codec import decode_frames
from trainer_bridge.commands.output import write_json, write_line
from trainer_bridge.errors import ProtocolError
from trainer_bridge.stored import scan_segments


def audit(path: Path, *, as_json: bool) -> int:
    """Check every record of a spool or store: hashes, order, samples, doubled rollouts. Changes nothing."""
    records = samples = tokens = 0
    faults: list[str] = []
    producers: dict[str, int] = {}
    rollouts: dict[tuple[bytes, int], int] = {}
    expected: int | None = None
    for segment, fault, rest in scan_segments(path):
        if expected is not None and segment.first != expected:
            faults.append(f"{segment.path}: begins with record {segment.first} where {expected} should be")
        if fault:
            faults.append(f"{segment.path}: {fault} ({rest} bytes from there on are not readable)")
        for record in segment.records():
            records += 1
            try:
                data = decode_frames(record.frames)
            except ProtocolError as error:
                faults.append(f"{segment.path}: record {record.seq}: {error}")
                continue
            samples += len(data.samples)
            tokens += sum(len(sample) for sample in data.samples)
            producer = data.head.producer.hex()
            producers[producer] = producers.get(producer, 0) + 1
            key = (data.head.rollout_id, data.head.attempt)
            rollouts[key] = rollouts.get(key, 0) + 1
        expected = segment.last + 1
    doubled = sorted((rollout.hex(), attempt, n) for (rollout, attempt), n in rollouts.items() if n > 1)
    faults += [f"rollout {rollout}, attempt {attempt}: stored {n} times" for rollout, attempt, n in doubled]
    if as_json:
        write_json(
            {
                "event": "audit",
                "records": records,
                "rollouts": len(rollouts),
                "samples": samples,
                "tokens": tokens,
                "producers": producers,
                "faults": faults,
            }
        )
    else:
        write_line(f"{records} records, {len(rollouts)} rollouts, {samples} samples, {tokens} tokens")
        for producer, count in producers.items():
            write_line(f"producer {producer}: {count} records")
        for fault in faults:
            write_line(f"FAULT {fault}")
    return 1 if faults else 0
