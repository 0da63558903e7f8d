"""A data-parallel rank as a process: `python rank.py ADDRESS RANK WORLD GROUPS`.

A line for each step says which rollouts this rank has; a line on its standard input lets it commit.
"""

from __future__ import annotations

import json
import sys

from trainer_bridge import RankReceiver, Timing

address, rank, world, groups = sys.argv[1], *map(int, sys.argv[2:])
timing = Timing(heartbeat_s=0.05, greet_again_s=0.2)
with RankReceiver(address, rank=rank, world=world, timing=timing) as receiver:
    print("connected", flush=True)
    while True:
        batch = receiver.next_batch(groups=groups)
        if batch is None:
            print("null", flush=True)
            continue
        print(json.dumps([int(rollout.rollout_id, 16) for rollout in batch.rollouts]), flush=True)
        if not sys.stdin.readline():
            break
        batch.commit()
