"""Send into a spool until the disk is full, make room, go on. Prints what was accepted and what arrived.

full_disk.py FOLDER limit    a file-size limit stands for the disk
full_disk.py FOLDER filler   FOLDER is a small disk, and FOLDER/filler fills half of it
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from trainer_bridge import SampleReceiver, SampleSender, SenderConfig, SpoolError, Timing
from trainer_bridge.testing import make_sample

LIMIT = 300_000


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = SenderConfig(
        timing=Timing(heartbeat_s=0.02), segment_bytes=100_000 if mode == "filler" else 1 << 20
    )
    accepted: list[int] = []
    error = ""
    with (
        SampleReceiver() as receiver,
        SampleSender(receiver.address, spool=folder / "spool", durability="sync", config=config) as sender,
    ):
        if mode == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            for n in range(10_000):
                sender.send(make_sample(n, tokens=1000), timeout_s=5.0)
                accepted.append(n)
        except SpoolError as caught:
            error = str(caught)
        before = len(accepted)
        if mode == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        else:
            (folder / "filler").unlink()
        for n in range(10_000, 10_020):
            sender.send(make_sample(n, tokens=1000), timeout_s=5.0)
            accepted.append(n)
        arrived: list[int] = []
        while len(arrived) < len(accepted):
            lease = receiver.next(40.0)
            if lease is None:
                break
            arrived.append(int(lease.rollout_id, 16))
            lease.commit()
        sender.wait_settled(40.0)
        stats = sender.stats()
    print(
        json.dumps(
            {
                "error": error,
                "before": before,
                "whole": arrived == accepted,
                "arrived": len(arrived),
                "pending": stats.pending,
                "failed": stats.last_error,
            }
        )
    )


main()
