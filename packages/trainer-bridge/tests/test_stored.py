"""Reading samples back from segments that someone else wrote, or is writing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from trainer_bridge import read_samples
from trainer_bridge.codec import draft
from trainer_bridge.errors import SpoolError
from trainer_bridge.segment_log import SegmentLog, segment_paths
from trainer_bridge.testing import differences, make_rollout


def write(root: Path, count: int, *, segment_bytes: int = 1 << 20) -> list[Path]:
    log = SegmentLog(root, segment_bytes=segment_bytes, now_ns=1)
    for n in range(1, count + 1):
        log.append(draft(make_rollout(n, parts=2)).numbered(b"p" * 16, 1, n, 0))
    log.close()
    return segment_paths(root / "samples")


def test_every_part_of_every_rollout_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path, 5)
    wanted = [part for n in range(1, 6) for part in make_rollout(n, parts=2)]
    for place in (tmp_path, tmp_path / "samples", tmp_path / "samples" / "segment-000000.tbs"):
        found = list(read_samples(place))
        assert len(found) == 10
        assert [differences(a, b) for a, b in zip(found, wanted, strict=True)] == [[]] * 10


def test_a_torn_end_gives_what_is_whole_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (segment,) = write(tmp_path, 3)
    segment.write_bytes(segment.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING):
        assert [sample.part for sample in read_samples(tmp_path)] == [0, 1, 0, 1]
    assert "bytes were not read" in caplog.text


def test_damage_before_the_end_is_an_error_and_no_short_answer(tmp_path: Path) -> None:
    first, *others = write(tmp_path, 6, segment_bytes=2000)
    assert others
    damaged = bytearray(first.read_bytes())
    damaged[-9] ^= 1
    first.write_bytes(damaged)
    with pytest.raises(SpoolError, match="are not readable"):
        list(read_samples(tmp_path))


def test_a_folder_without_segments_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="holds no segments"):
        list(read_samples(tmp_path))
