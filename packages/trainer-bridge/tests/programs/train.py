"""A trainer as a process: `python train.py BIND FOLDER --load CHECKPOINT --out STORE --rollouts N --world N`.

With a world it is rank 0 of so many, and takes as many groups per step. Its weights are the list of the
rollouts it was trained on. Every second step it saves a checkpoint; a line per step says how many rollouts
are in the weights. It takes a step for each line that it reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trainer_bridge import ReceiverConfig, SampleReceiver, Timing

parser = argparse.ArgumentParser()
parser.add_argument("bind")
parser.add_argument("folder", type=Path)
parser.add_argument("--load", type=Path)
parser.add_argument("--out", type=Path)
parser.add_argument("--rollouts", type=int, required=True)
parser.add_argument("--world", type=int, default=1)
args = parser.parse_args()

config = ReceiverConfig(
    group_size=2,
    commit_on="checkpoint",
    timing=Timing(heartbeat_s=0.05, greet_again_s=0.2),
)
weights: list[int] = []
saved = len(list(args.folder.glob("checkpoint-*.json")))
with SampleReceiver(args.bind, out=args.out, config=config) as receiver:
    if args.load is not None:
        checkpoint = json.loads(args.load.read_text())
        weights = checkpoint["weights"]
        receiver.load_state_dict(checkpoint["receiver"])
    print(receiver.address, flush=True)
    step = 0
    while len(weights) < args.rollouts:
        sys.stdin.readline()
        batch = receiver.next_batch(groups=args.world, deadline_s=40.0, world=args.world)
        if batch is None:
            break
        weights += [int(rollout.rollout_id, 16) for rollout in batch.rollouts]
        batch.commit()
        step += 1
        if step % 2 == 0 or len(weights) >= args.rollouts:
            state = receiver.state_dict()
            path = args.folder / f"checkpoint-{saved:03d}.json"
            half_written = path.with_suffix(".tmp")
            half_written.write_text(json.dumps({"weights": weights, "receiver": state}))
            half_written.replace(path)
            saved += 1
            receiver.checkpoint_saved(state)
        print(len(weights), flush=True)
    print(json.dumps(receiver.metrics()), flush=True)
    sys.stdin.read()  # until the senders have heard of it
