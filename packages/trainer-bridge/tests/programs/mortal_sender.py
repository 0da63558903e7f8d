"""Sends rollouts FIRST..LAST from a spool; prints the number of each once `send` has returned, then `done`.

mortal_sender.py ADDRESS SPOOL FIRST LAST STRIDE SIZE STEPS

STRIDE 2: every other one, another sender has the rest. SIZE: rollouts of a group, each in two parts; 0:
samples alone. Kill -9 at step STEPS (0: never).
"""

from __future__ import annotations

import sys
from pathlib import Path

from mortal import Fuse, MortalClient
from trainer_bridge import SampleSender, SenderConfig, Timing
from trainer_bridge.testing import make_rollout, make_sample
from trainer_bridge.zmq_transport import ZmqClient

address, spool = sys.argv[1], Path(sys.argv[2])
first, last, stride, size, steps = map(int, sys.argv[3:])
timing = Timing(heartbeat_s=0.05, greet_again_s=0.2, resend_s=0.5)
# Several segments, kept, so that the audit can name every rollout.
config = SenderConfig(timing=timing, segment_bytes=1 << 18, keep_segments=True)
fuse = Fuse(steps, spool)
network = ZmqClient(address, max_payload_bytes=config.max_payload_bytes, insecure=False, timing=timing)
sender = SampleSender(address, spool=spool, config=config, transport=MortalClient(network, fuse))
for n in range(first, last + 1, stride):
    if size:
        sender.send(make_rollout(n, group=n // size, parts=2, tokens=8), group_size=size)
    else:
        sender.send(make_sample(n, tokens=16))
    print(n, flush=True)
if sender.close(drain_s=60.0).pending == 0:
    print("done", flush=True)
