"""A receiver whose store's disk runs full, and one that goes on when there is room. Prints the counts.

full_store.py FOLDER    a file-size limit stands for the disk
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig, SpoolError, Timing
from trainer_bridge.testing import make_sample

LIMIT = 200_000
COUNT = 100

folder = Path(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
timing = Timing(heartbeat_s=0.05, greet_again_s=0.2, resend_s=0.5)
config = ReceiverConfig(timing=timing)
spool = SenderConfig(timing=timing, segment_bytes=100_000)
error = ""
trained: list[int] = []


def train(receiver: SampleReceiver, until: int) -> None:
    while len(trained) < until:
        lease = receiver.next(40.0)
        if lease is None:
            break
        lease.commit()
        trained.append(int(lease.rollout_id, 16))


receiver = SampleReceiver(out=folder / "store", config=config)
address = receiver.address
with SampleSender(address, spool=folder / "spool", config=spool) as sender:
    # The spool's segments are smaller than this limit, the store's is not. It must hold before the first
    # sample is sent: the store takes them in at once, trained on or not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    for n in range(COUNT):
        sender.send(make_sample(n, tokens=1000))
    try:
        train(receiver, COUNT)
    except SpoolError as caught:
        error = str(caught)
    before = len(trained)
    try:
        receiver.close()
    except SpoolError as caught:
        error = error or str(caught)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    with SampleReceiver(address, out=folder / "store", config=config) as second:
        train(second, COUNT)
        sender.wait_settled(40.0)
        stats = second.stats()
    sent = sender.stats()
print(
    json.dumps(
        {
            "error": error,
            "before": before,
            "trained": sorted(trained),
            "repeated": len(trained) - len(set(trained)),
            "pending": sent.pending,
            "acknowledged": sent.acknowledged,
            "unaccounted": stats.unaccounted,
        }
    )
)
