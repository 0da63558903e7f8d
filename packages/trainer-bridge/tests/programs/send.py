"""Sends made-up rollouts FIRST..FIRST+COUNT-1 and prints the number of each once `send` has returned."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer_bridge import SampleSender, SenderConfig, Timing
from trainer_bridge.testing import make_rollout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--spool", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--drain", type=float, default=30.0)
    args = parser.parse_args()
    config = SenderConfig(timing=Timing(heartbeat_s=0.1, resend_s=1.0))
    sender = SampleSender(args.address, spool=args.spool, producer="program", config=config)
    for n in range(args.first, args.first + args.count):
        sender.send(make_rollout(n, parts=args.parts, tokens=args.tokens))
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
    stats = sender.close(drain_s=args.drain)
    sys.stdout.write(f"pending {stats.pending}\n")


if __name__ == "__main__":
    main()
