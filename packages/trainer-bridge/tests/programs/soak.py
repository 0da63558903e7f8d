"""Many small samples from one process to another; each prints the most memory it had in each quarter.

soak.py receive SAMPLES [FOLDER]           starts the sender; with FOLDER, a spool and a store lie there
soak.py send ADDRESS SAMPLES [SPOOL]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.testing import make_sample

TOKENS = 64
SEGMENT_BYTES = 1 << 20
SPOOL_BYTES = 4 << 20
LOOKS = 400
"""Times that memory is looked at."""


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Quarters:
    """The most memory in each quarter of `count` samples."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._every = max(count // LOOKS, 1)
        self.most = [0, 0, 0, 0]

    def passed(self, n: int) -> None:
        """Sample n of 0 to count - 1 is through."""
        if n % self._every == 0:
            quarter = n * 4 // self._count
            self.most[quarter] = max(self.most[quarter], resident_bytes())


def send(address: str, count: int, spool: Path | None) -> None:
    samples = [make_sample(n, tokens=TOKENS) for n in range(16)]
    quarters = Quarters(count)
    # A sender outruns its receiver; a backlog that grows would look like a leak.
    config = SenderConfig(segment_bytes=SEGMENT_BYTES, spool_quota_bytes=SPOOL_BYTES)
    with SampleSender(address, spool=spool, config=config) as sender:
        for n in range(count):
            sender.send(msgspec.structs.replace(samples[n % 16], rollout_id=f"{n:032x}"))
            quarters.passed(n)
        sender.wait_settled(30.0)
        stats = sender.stats()
    sent = {"rss": quarters.most, "pending": stats.pending, "acknowledged": stats.acknowledged}
    print(json.dumps(sent))


def receive(count: int, folder: Path | None) -> None:
    # Remembered ids are meant to be kept; few of them, so that they do not hide a leak.
    config = ReceiverConfig(remember_rollouts=4096, keep_committed="none", segment_bytes=SEGMENT_BYTES)
    spool = [] if folder is None else [folder / "spool"]
    quarters = Quarters(count)
    began_s = time.perf_counter()
    with SampleReceiver(out=None if folder is None else folder / "store", config=config) as receiver:
        command = [sys.executable, __file__, "send", receiver.address, count, *spool]
        with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as worker:
            for arrived in range(count):
                lease = receiver.next(30.0)
                if lease is None:
                    sys.exit(f"nothing came for 30 s after {arrived} rollouts")
                lease.commit()
                quarters.passed(arrived)
            took_s = time.perf_counter() - began_s
            assert worker.stdout is not None
            sent = json.loads(worker.stdout.readline())
        stats = receiver.stats()
    received = {
        "rss": quarters.most,
        "committed": stats.committed,
        "unaccounted": stats.unaccounted,
        "trimmed": stats.trimmed,
    }
    print(json.dumps({"sender": sent, "receiver": received, "per_s": round(count / took_s)}))


if sys.argv[1] == "send":
    send(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)
else:
    receive(int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
