"""Send many small samples to a receiver in the same process; prints memory after a fifth, and at the end.

soak.py SAMPLES [SPOOL]
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from pathlib import Path

import msgspec
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.testing import make_sample


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    count = int(sys.argv[1])
    spool = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    samples = [make_sample(n, tokens=64) for n in range(16)]
    # Remembered ids are meant to be kept; few of them, so that they do not hide a leak.
    config = ReceiverConfig(remember_rollouts=4096)
    early = 0
    with (
        SampleReceiver(config=config) as receiver,
        SampleSender(receiver.address, spool=spool, config=SenderConfig(segment_bytes=1 << 20)) as sender,
    ):

        def send() -> None:
            for n in range(count):
                sender.send(msgspec.structs.replace(samples[n % 16], rollout_id=f"{n:032x}"))

        worker = threading.Thread(target=send)
        worker.start()
        arrived = 0
        while arrived < count:
            lease = receiver.next(30.0)
            if lease is None:
                break
            lease.commit()
            arrived += 1
            if arrived == count // 5:
                early = resident_bytes()
        worker.join()
        sender.wait_settled(30.0)
        pending = sender.stats().pending
        end = resident_bytes()
    print(json.dumps({"arrived": arrived, "pending": pending, "rss_early": early, "rss_end": end}))


main()
