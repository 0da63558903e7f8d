"""Commits 3 steps of 32 rollouts while the store's thread writes cursors; prints what each of them held.

killed_commit.py FOLDER    a kill -9 after any of them leaves just that
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType

from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender
from trainer_bridge.seqset import SeqSet
from trainer_bridge.testing import make_rollout

SIZE = 32
STEPS = 3

cursors: list[int] = []
pause = threading.Event()


def slowly(frame: FrameType, event: str, _: object) -> None:
    """Let the other threads run after each number that goes into a set."""
    if event == "return" and frame.f_code is SeqSet.add.__code__:
        pause.wait(0.001)


def hook(event: str, args: tuple[object, ...]) -> None:
    if event == "os.rename" and str(args[0]).endswith("cursor.new"):
        cursor = json.loads(Path(str(args[0])).read_text())
        cursors.append(cursor["upto"] + sum(last - first + 1 for first, last in cursor["ranges"]))


config = ReceiverConfig(group_size=SIZE, window=2 * SIZE * STEPS, queue_messages=2 * SIZE * STEPS)
with (
    SampleReceiver(out=Path(sys.argv[1]), config=config) as receiver,
    SampleSender(receiver.address, window=2 * SIZE * STEPS) as sender,
):
    for n in range(SIZE * STEPS):
        sender.send(make_rollout(n, group=n // SIZE, tokens=8))
    leases = [receiver.next_batch(groups=1, deadline_s=40.0) for _ in range(STEPS)]
    sys.addaudithook(hook)
    sys.setprofile(slowly)
    for lease in leases:
        assert lease is not None
        lease.commit()
    sys.setprofile(None)
    assert sender.wait_settled(40.0)
print(json.dumps(cursors))
