"""A trainer whose weights are the list of rollouts that it was trained on; checkpoints hold them.

mortal_trainer.py BIND FOLDER KEEP STEPS

KEEP: what the store keeps; "nothing": there is no store, and steps are whole groups. Kill -9 at step STEPS
(0: never); SIGTERM ends it in order.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import msgspec
from mortal import Fuse, MortalServer
from trainer_bridge import BatchLease, ReceiverConfig, SampleReceiver, Timing
from trainer_bridge.zmq_transport import ZmqServer

STEP = 64

bind, folder, keep, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
checkpoint = folder / "checkpoint.json"
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
timing = Timing(heartbeat_s=0.05, greet_again_s=0.2)
grouped = keep == "nothing"
config = msgspec.convert(
    {
        "commit_on": "checkpoint",
        "keep_committed": "all" if grouped else keep,
        "segment_bytes": 1 << 18,
        "patience_s": None,
    },
    ReceiverConfig,
)
config = msgspec.structs.replace(config, timing=timing)
fuse = Fuse(steps, folder)
network = ZmqServer(bind, max_payload_bytes=config.max_payload_bytes, insecure=False, timing=timing)
store = None if grouped else folder / "store"


def next_step(receiver: SampleReceiver) -> BatchLease | None:
    if grouped:
        return receiver.next_batch(groups=2, deadline_s=0.05) or receiver.next_batch(groups=1, deadline_s=0.0)
    return receiver.next(0.05)


with SampleReceiver(out=store, config=config, transport=MortalServer(network, fuse)) as receiver:
    weights: list[int] = []
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        weights = saved["weights"]
        receiver.load_state_dict(saved["receiver"])
    print(receiver.address, flush=True)
    fresh = 0
    while True:
        lease = next_step(receiver)
        if lease is not None:
            weights += [int(rollout.rollout_id, 16) for rollout in lease.rollouts]
            lease.commit()
            fresh += len(lease.rollouts)
        if fresh and (lease is None or fresh >= STEP):
            fresh = 0
            state = receiver.state_dict()
            half = checkpoint.with_suffix(".half")
            half.write_text(json.dumps({"weights": weights, "receiver": state}))
            half.replace(checkpoint)
            receiver.checkpoint_saved(state)
        if stop.is_set() and lease is None:
            break
