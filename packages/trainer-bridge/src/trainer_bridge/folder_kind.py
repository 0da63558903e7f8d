"""What a folder is, by what lies in it: a spool of a sender, or a store of a receiver."""

from __future__ import annotations

from pathlib import Path

from trainer_bridge.errors import SpoolError
from trainer_bridge.segment import FILE_HEADER_SIZE
from trainer_bridge.segment_log import FOLDER, segment_paths

LETTERS = "dead_letters.sqlite"
"""Beside the folder of segments of a store."""
PRODUCER = "producer.json"
"""Each spool has it, from its first opening on; no store does."""
_OF_STORES = ("owners.json", "trimmed.json", "checkpoints.json", "cursor.json")
"""Without `PRODUCER` beside them. (A spool has a cursor too, and gets it later.)"""


def refuse_spool(root: Path) -> None:
    """Raise SpoolError if a sender keeps its spool here: a receiver would hand out what waits to be sent."""
    path = root / FOLDER / PRODUCER
    if path.exists():
        raise SpoolError(
            f"{root} is the spool of a sender ({path} says so), and no store of a receiver: give the "
            "receiver (out=...) a folder of its own; what waits in the spool comes with a sender that opens "
            f"it, or with `trainer-bridge replay {root}`"
        )


def refuse_store(root: Path) -> None:
    """Raise SpoolError if a receiver keeps its store here: a sender would send other producers' messages."""
    folder = root / FOLDER
    if (folder / PRODUCER).exists():
        return
    held = [path for path in segment_paths(folder) if path.stat().st_size > FILE_HEADER_SIZE]
    signs = [*held, *(folder / name for name in _OF_STORES), root / LETTERS]
    found = next((path for path in signs if path.exists()), None)
    if found is not None:
        raise SpoolError(
            f"{root} is the store of a receiver (it has {found.relative_to(root)} and no "
            f"{FOLDER}/{PRODUCER}), and no spool of a sender: give the sender (spool=...) a folder of its "
            "own. If it was a spool that lost that file, restore it, or send what is there with "
            f"`trainer-bridge replay {root}`"
        )
