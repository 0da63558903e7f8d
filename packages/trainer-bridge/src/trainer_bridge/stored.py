"""Reading segments that someone else wrote, or is writing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from token_tracking.sample import Sample

from trainer_bridge.codec import decode_frames
from trainer_bridge.errors import SpoolError
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import FOLDER, segment_paths

log = logging.getLogger(__name__)


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


def read_samples(path: Path | str) -> Iterator[Sample]:
    """Every sample of a spool, a store or one segment, in the order of sending; changes nothing there.

    Arrays are read-only views of the record they came in. A rollout that was sent twice comes twice. A torn
    end, as a killed or still running writer leaves it, ends the iteration with a logged warning.

    Args:
        path: a `segment-*.tbs` file, a `samples` folder, or a folder that has one (a run folder).

    Raises:
        SpoolError: there is no segment, or a segment is damaged and others follow it.
        ProtocolError: an intact record holds something else than samples.
    """
    place = Path(path)
    last = find_segments(place)[-1]
    for segment, fault, rest in scan_segments(place):
        for record in segment.records():
            yield from decode_frames(record.frames).samples
        if fault and segment.path != last:
            raise SpoolError(f"{segment.path}: {fault} ({rest} bytes from there on are not readable)")
        if fault:
            log.warning("%s: %s; its last %d bytes were not read", segment.path, fault, rest)
