"""A trainer whose weights are the list of rollouts that it was trained on; checkpoints hold them.

mortal_trainer.py BIND FOLDER STEPS    kill -9 at step STEPS (0: never); SIGTERM ends it in order
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

from mortal import Fuse, MortalServer
from trainer_bridge import ReceiverConfig, SampleReceiver, Timing
from trainer_bridge.zmq_transport import ZmqServer

STEP = 64

bind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
checkpoint = folder / "checkpoint.json"
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
timing = Timing(heartbeat_s=0.05, greet_again_s=0.2)
config = ReceiverConfig(timing=timing, commit_on="checkpoint", segment_bytes=1 << 18, patience_s=None)
fuse = Fuse(steps, folder)
network = ZmqServer(bind, max_payload_bytes=config.max_payload_bytes, insecure=False, timing=timing)
with SampleReceiver(out=folder / "store", config=config, transport=MortalServer(network, fuse)) as receiver:
    weights: list[int] = []
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        weights = saved["weights"]
        receiver.load_state_dict(saved["receiver"])
    print(receiver.address, flush=True)
    fresh = 0
    while True:
        lease = receiver.next(0.05)
        if lease is not None:
            weights.append(int(lease.rollout_id, 16))
            lease.commit()
            fresh += 1
        if fresh and (lease is None or fresh >= STEP):
            fresh = 0
            state = receiver.state_dict()
            half = checkpoint.with_suffix(".half")
            half.write_text(json.dumps({"weights": weights, "receiver": state}))
            half.replace(checkpoint)
            receiver.checkpoint_saved(state)
        if stop.is_set() and lease is None:
            break
