"""Segments, spool and store on real files: torn tails, locks, cursors, quotas."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_bridge.clock import SystemClock
from trainer_bridge.codec import Frames, decode_frames, draft
from trainer_bridge.config import Durability, ReceiverConfig, SenderConfig
from trainer_bridge.errors import NotDurableError, SpoolError
from trainer_bridge.outbox import SpoolOutbox
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import SegmentLog, segment_paths
from trainer_bridge.seqset import SeqSet
from trainer_bridge.store import Store
from trainer_bridge.testing import differences, make_sample


def message(n: int, tokens: int = 16) -> Frames:
    return draft([make_sample(n, tokens=tokens)]).numbered(b"p" * 16, 1, n, 0)


def open_log(root: Path, segment_bytes: int = 1 << 20) -> SegmentLog:
    return SegmentLog(root, segment_bytes=segment_bytes, now_ns=1)


def rollouts(log: SegmentLog) -> list[int]:
    return [
        int(decode_frames(record.frames).rollout_id, 16) for seg in log.segments() for record in seg.records()
    ]


def outbox(root: Path, durability: Durability = "async", **config: object) -> SpoolOutbox:
    return SpoolOutbox(root, durability=durability, config=SenderConfig(**config), clock=SystemClock())  # type: ignore[arg-type]


def put(box: SpoolOutbox, n: int) -> None:
    box.append(
        draft([make_sample(n, tokens=16)]).numbered(box.producer, box.streams[-1].epoch, box.last + 1, 0)
    )


def test_what_was_written_is_read_back_over_many_segments(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=2000)
    assert [log.append(message(n)) for n in range(1, 21)] == list(range(1, 21))
    assert len(segment_paths(tmp_path / "samples")) > 3
    for n in (20, 1, 11):
        got = decode_frames(log.read(n).frames).samples[0]
        assert not differences(got, make_sample(n, tokens=16))
    log.close()
    log = open_log(tmp_path, segment_bytes=2000)
    assert (log.first, log.last, log.torn_bytes) == (1, 20, 0)
    assert rollouts(log) == list(range(1, 21))
    with pytest.raises(SpoolError, match="holds records 1 to 20, not 21"):
        log.read(21)
    log.close()


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 5000))
def test_a_torn_tail_is_cut_off_and_nothing_before_it_is_touched(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    root = tmp_path_factory.mktemp("torn")
    log = open_log(root)
    ends = []
    for n in range(1, 7):
        log.append(message(n))
        ends.append(log.nbytes)
    log.close()
    (path,) = segment_paths(root / "samples")
    size = path.stat().st_size
    os.truncate(path, max(size - cut, 32))
    left = sum(end <= max(size - cut, 32) for end in ends)
    log = open_log(root)
    assert log.last == left
    assert log.torn_bytes == max(size - cut, 32) - ([32, *ends][left])
    log.append(message(99))
    assert rollouts(log) == [*range(1, left + 1), 99]
    log.close()


def test_a_torn_tail_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(tmp_path)
    log.append(message(1))
    log.close()
    (path,) = segment_paths(tmp_path / "samples")
    with path.open("ab") as file:
        file.write(struct.pack("<I", 0x43524254) + b"half a record")
    with caplog.at_level("WARNING"):
        open_log(tmp_path).close()
    assert "cut a torn record of 17 bytes after record 1" in caplog.text


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    log.append(message(1))
    log.append(message(2))
    first, _ = segment_paths(tmp_path / "samples")
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    with pytest.raises(SpoolError, match=r"record 1 .* does not match its hash"):
        log.read(1)
    log.close()
    segment, fault = Segment.scan(first, verify=True)
    assert (segment.last, fault) == (1, "")
    assert segment.damage == [(1, 1, f"{first}: record 1 at byte 32: hash")]


def test_a_segment_killed_at_birth_is_no_obstacle(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(message(1))
    log.close()
    (tmp_path / "samples" / "segment-000001.tbs").write_bytes(b"TBSE")
    log = open_log(tmp_path)
    assert log.append(message(2)) == 2
    log.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(SpoolError, match=f"in use by process {os.getpid()}"):
        open_log(tmp_path)
    log.close()
    open_log(tmp_path).close()


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "segment-000000.tbs").write_bytes(b"\x89PNG" * 20)
    with pytest.raises(SpoolError, match="not a trainer-bridge segment"):
        open_log(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="choose a folder that can be written to"):
        open_log(tmp_path / "file" / "spool")


def test_a_full_disk_takes_the_record_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    log.append(message(1))
    real = os.writev

    def half(fd: int, pieces: list[memoryview]) -> int:
        os.write(fd, pieces[0][:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(SpoolError, match="No space left on device; free some space"):
        log.append(message(2))
    monkeypatch.setattr(os, "writev", real)
    assert log.append(message(3)) == 2
    assert rollouts(log) == [1, 3]
    log.close()


@pytest.mark.parametrize("durability", ["none", "async", "sync"])
def test_a_spool_keeps_its_identity_and_never_reuses_an_epoch(tmp_path: Path, durability: Durability) -> None:
    box = outbox(tmp_path, durability)
    producer = box.producer
    for n in range(3):
        put(box, n)
    box.wait_durable(box.last)
    box.close(SeqSet(1))
    box = outbox(tmp_path, durability)
    assert box.producer == producer
    assert [(s.epoch, s.first) for s in box.streams] == [(1, 1), (2, 4)]
    assert box.settled == SeqSet(1)
    assert decode_frames(box.frames(3)).rollout_id == f"{2:032x}"
    put(box, 3)
    assert box.last == 4
    box.close(SeqSet(3))
    box = outbox(tmp_path, durability)
    assert [(s.epoch, s.first) for s in box.streams] == [(2, 4), (3, 5)]  # epoch 1 is settled
    box.close(SeqSet(4))


def test_numbers_that_a_crash_took_back_are_not_taken_for_settled(tmp_path: Path) -> None:
    box = outbox(tmp_path)
    for n in range(3):
        put(box, n)
    box.close(SeqSet(3))
    (path,) = segment_paths(tmp_path / "samples")
    segment, _ = Segment.scan(path, verify=False)
    os.truncate(path, segment.offsets[1])  # the machine lost records 2 and 3, the cursor survived
    box = outbox(tmp_path)
    assert box.settled.upto == 1
    assert (box.last, box.streams[-1].epoch, box.streams[-1].first) == (1, 2, 2)
    box.close(box.settled)


def test_settled_segments_are_deleted_and_the_rest_stays(tmp_path: Path) -> None:
    box = outbox(tmp_path, segment_bytes=1)
    for n in range(5):
        put(box, n)
    box.settle(SeqSet(3))
    assert len(segment_paths(tmp_path / "samples")) == 2
    assert decode_frames(box.frames(4)).rollout_id == f"{3:032x}"
    box.close(SeqSet(3))
    kept = outbox(tmp_path, segment_bytes=1, keep_segments=True)
    kept.settle(SeqSet(5))
    assert len(segment_paths(tmp_path / "samples")) == 2
    kept.close(SeqSet(5))


def test_a_quota_fills_up(tmp_path: Path) -> None:
    box = outbox(tmp_path, spool_quota_bytes=1500)
    assert not box.is_full(0)
    while not box.is_full(1):
        put(box, box.last)
    assert 1 < box.last < 10
    assert not box.is_full(0)  # nothing waits: there is nothing to wait for
    box.close(SeqSet())


def test_a_store_remembers_what_was_committed(tmp_path: Path, wait: Callable[..., None]) -> None:
    def opened() -> Store:
        return Store(tmp_path, config=ReceiverConfig(), now_ns=1, progressed=lambda: None)

    store = opened()
    for n in range(1, 5):
        store.append(message(n))
    wait(lambda: store.synced == 4)
    store.commit_many([(1, ""), (3, "")])
    done: list[int] = []
    wait(lambda: done.extend(store.take_committed()) or sorted(done) == [1, 3])
    store.close()
    store = opened()
    assert [(h.position, h.committed) for h in store.held()] == [(1, True), (2, False), (3, True), (4, False)]
    assert store.read(2).rollout_id == f"{2:032x}"
    store.close()


def test_the_cursor_of_a_store_is_never_ahead_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[..., None]
) -> None:
    """What comes while the disk is busy is on it after the next flush; a power cut took the record alone."""
    store = Store(tmp_path, config=ReceiverConfig(), now_ns=1, progressed=lambda: None)
    cursor = tmp_path / "samples" / "cursor.json"
    on_disk: list[int] = []
    noted: list[int] = []
    real = os.fdatasync

    def busy(fd: int) -> None:
        if cursor.exists():
            noted.append(json.loads(cursor.read_text())["upto"] - on_disk[-1])
        upto = store.last
        real(fd)
        on_disk.append(upto)
        if upto < 5:
            store.append(message(upto + 1))
            store.commit_many([(upto + 1, "")])

    monkeypatch.setattr(os, "fdatasync", busy)
    store.append(message(1))
    store.commit_many([(1, "")])
    wait(lambda: store.synced == 5)
    store.close()
    assert json.loads(cursor.read_text())["upto"] == 5
    assert len(noted) >= 4
    assert max(noted) <= 0


def test_a_disk_that_does_not_confirm_is_told_and_nothing_more_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sync`: the message was taken and will be sent, and the error says so; the next one is refused."""
    box = outbox(tmp_path, "sync")
    monkeypatch.setattr(os, "fdatasync", _fail, raising=False)
    monkeypatch.setattr(os, "fsync", _fail)
    box.append(message(1))
    with pytest.raises(NotDurableError, match="will be sent"):
        box.wait_durable(box.last)
    taken = box.last
    with pytest.raises(SpoolError, match="nothing more is taken"):
        box.append(message(2))
    assert box.last == taken
    monkeypatch.undo()
    box.close(SeqSet(0))


def full_disk(programs: Path, folder: Path, mode: str, *prefix: str) -> dict[str, Any]:
    program = [sys.executable, str(programs / "full_disk.py"), str(folder), mode]
    done = subprocess.run([*prefix, *program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_disk_that_runs_full_loses_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, programs: Path
) -> None:
    got = full_disk(programs, tmp_path, "limit")
    assert "cannot write" in got["error"]
    assert "File too large; free some space" in got["error"]
    assert got["before"] > 10
    assert (got["whole"], got["arrived"], got["pending"], got["failed"]) == (True, got["before"] + 20, 0, "")


@pytest.mark.slow
def test_a_small_disk_that_is_really_full(tmp_path: Path, programs: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && head -c 500000 /dev/zero > {tmp_path}/filler && "
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("mounting needs user namespaces")
    got = full_disk(programs, tmp_path, "filler", "unshare", "-rm", "sh", "-c", mount + 'exec "$0" "$@"')
    assert "No space left on device; free some space" in got["error"]
    assert (got["whole"], got["arrived"], got["pending"]) == (True, got["before"] + 20, 0)


def test_a_segment_that_finds_no_room_at_birth_leaves_none_behind(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    log.append(message(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(SpoolError, match="File too large"):
            log.append(message(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(segment_paths(tmp_path / "samples")) == 1
    assert log.append(message(2)) == 2
    assert rollouts(log) == [1, 2]
    log.close()


def test_a_note_that_the_disk_does_not_take_costs_no_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cursor saves repeated sending only; a full disk is emptied by deleting what is settled."""
    box = outbox(tmp_path, segment_bytes=1)
    for n in range(5):
        put(box, n)
    (tmp_path / "samples" / "cursor.new").mkdir()
    box.settle(SeqSet(3))
    box.checkpoint(SeqSet(3))
    assert len(segment_paths(tmp_path / "samples")) == 2
    assert box.disk_faults == 2
    assert caplog.text.count("trying again with each heartbeat") == 1
    (tmp_path / "samples" / "cursor.new").rmdir()
    box.checkpoint(SeqSet(3))
    box.close(SeqSet(3))
    assert box.disk_faults == 2


def _fail(fd: int) -> None:
    raise OSError(28, "No space left on device")
