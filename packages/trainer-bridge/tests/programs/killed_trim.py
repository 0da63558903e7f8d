"""Kill -9 at each file operation of a trim; then look at what is left, and trim on. Prints a line per death.

killed_trim.py FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from trainer_bridge import ReceiverConfig
from trainer_bridge.codec import draft
from trainer_bridge.segment_log import SegmentLog
from trainer_bridge.seqset import SeqSet
from trainer_bridge.state_file import CursorFile, save
from trainer_bridge.store import Store
from trainer_bridge.testing import make_rollout

OPERATIONS = ("open", "os.rename", "os.remove", "os.truncate")
"""As `sys.addaudithook` names them; it hears of each before it is done."""
RECORDS = 12
SEGMENT_BYTES = 2000
CONFIG = ReceiverConfig(segment_bytes=SEGMENT_BYTES, keep_committed="none", remember_rollouts=4)
"""Few remembered rollouts, so that the file of rollouts is begun anew on the way."""


def opened(folder: Path) -> Store:
    return Store(folder, config=CONFIG, now_ns=1, progressed=lambda: None)


def trim(folder: Path) -> None:
    """Until one segment is left: flushes are asked for, and come one after the other."""
    store = opened(folder)
    store.commit_many([(RECORDS, "")])
    store.close()


def die_at(step: int, folder: Path) -> None:
    """Kill this process at the step-th file operation in the folder."""
    steps = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal steps
        if event in OPERATIONS and str(args[0]).startswith(str(folder)):
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def look(folder: Path) -> dict[str, object]:
    """What a restart knows: each record must be either here or gone and known."""
    store = opened(folder)
    here = [held.position for held in store.held()]
    known = SeqSet()
    for _, _, seqs in store.trimmed.done.items():
        known.update(seqs)
    found: dict[str, object] = {
        "here": here,
        "upto": store.trimmed.upto,
        "known": known.upto,
        "dropped": store.trimmed.dropped,
        "rollouts": [int.from_bytes(rollout) for rollout, _, _ in store.trimmed.rollouts()],
        "strays": len(list((folder / "samples").glob("trimmed-*.ids"))),
    }
    store.close()
    return found


root = Path(sys.argv[1])
fresh = root / "fresh"
log = SegmentLog(fresh, segment_bytes=SEGMENT_BYTES, now_ns=1)
for n in range(1, RECORDS + 1):
    log.append(draft(make_rollout(n)).numbered(b"p" * 16, 1, n, 0))
log.close()
# Of the committed records, the third and the last were dropped.
save(
    fresh / "samples" / "cursor.json",
    CursorFile(upto=RECORDS - 1, dropped={"stale": ((3, 3), (RECORDS - 1, RECORDS - 1))}),
)
alive = False
step = 0
while not alive:
    step += 1
    folder = root / f"step-{step}"
    shutil.copytree(fresh, folder)
    assert threading.active_count() == 1
    child = os.fork()
    if child == 0:
        die_at(step, folder)
        trim(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    alive = status == 0
    after = look(folder)
    trim(folder)
    print(json.dumps({"step": step, "after": after, "end": look(folder)}), flush=True)
    shutil.rmtree(folder)
