"""Reading segments that someone else wrote, or is writing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from token_tracking.sample import Sample

from trainer_bridge.codec import decode_frames
from trainer_bridge.errors import DamagedError, SpoolError
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import FOLDER, segment_paths
from trainer_bridge.state_file import TrimmedFile, load
from trainer_bridge.trimmed import FILE as TRIMMED

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


class Scanned(NamedTuple):
    """One file of segments, read to its end."""

    segment: Segment
    faults: list[str]
    """Damaged records, records that are missing before or after it, and what stands where none begins."""
    torn: str
    """How the last file ends, if a writer was killed there or is still writing. Empty: in order."""


def scan_segments(path: Path) -> Iterator[Scanned]:
    """Each file with what is wrong in it; its records are those that are whole."""
    paths = find_segments(path)
    expected: int | None = None
    for each in paths:
        try:
            segment, end = Segment.scan(each, verify=True)
            rest = each.stat().st_size - segment.size
        except SpoolError:
            raise
        except OSError as error:
            raise SpoolError(f"cannot read {each}: {error.strerror or error}") from error
        faults = [damage.text for damage in segment.damage]
        if expected is not None and segment.first != expected:
            faults.insert(0, f"{each}: begins with record {segment.first}, not {expected}")
        torn = f"{each}: {end} ({rest} bytes)" if end else ""
        if end and not (end.endswith("cut off") and each == paths[-1]):
            faults.append(f"{each}: {end} ({rest} bytes from there on are not readable)")
            torn = ""
        yield Scanned(segment, faults, torn)
        expected = segment.last + 1


def read_samples(path: Path | str) -> Iterator[Sample]:
    """Every sample of a spool, a store or one segment, in the order of sending; changes nothing there.

    Arrays are read-only views of the record they came in. A rollout that was sent twice comes twice. A torn
    end, as a killed or still running writer leaves it, ends the iteration with a logged warning; what a store
    has deleted (`ReceiverConfig.keep_committed`) is not there, and a warning says how much that is.

    Args:
        path: a `segment-*.tbs` file, a `samples` folder, or a folder that has one (a run folder).

    Raises:
        SpoolError: there is no segment, or records are damaged or missing; what is whole in that file came
            before.
        ProtocolError: an intact record holds something else than samples.
    """
    place = Path(path)
    folder = find_segments(place)[-1].parent
    trimmed = None if place.is_file() else load(folder / TRIMMED, TrimmedFile)
    if trimmed is not None:
        log.warning("%s: records 1 to %d were deleted (keep_committed)", folder, trimmed.upto)
    for segment, faults, torn in scan_segments(place):
        for record in segment.records():
            yield from decode_frames(record.frames).samples
        if faults:
            more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
            raise DamagedError(
                f"{faults[0]}{more}: such records are not readable; `trainer-bridge replay` sends the others"
            )
        if torn:
            log.warning("%s; these bytes were not read", torn)
