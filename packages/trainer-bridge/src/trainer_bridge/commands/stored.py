"""Reading segments that someone else wrote, or is writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer_bridge.errors import SpoolError
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import FOLDER, segment_paths


def find_segments(path: Path) -> list[Path]:
    """The segments of a file, a `samples` folder, or a folder that has one.

    Raises:
        SpoolError: there are none.
    """
    if path.is_file():
        return [path]
    found = segment_paths(path) or segment_paths(path / FOLDER)
    if not found:
        raise SpoolError(
            f"{path} holds no segments: give a segment-*.tbs file, or the folder of a spool or store"
        )
    return found


def scan_segments(path: Path) -> Iterator[tuple[Segment, str, int]]:
    """Each segment up to its first bad record, what is wrong there ("": nothing), and the bytes after it."""
    for each in find_segments(path):
        try:
            segment, fault = Segment.scan(each, verify=True)
            yield segment, fault, each.stat().st_size - segment.size
        except SpoolError:
            raise
        except OSError as error:
            raise SpoolError(f"cannot read {each}: {error.strerror or error}") from error
