"""Bits that flip, files that vanish: what is damaged is counted and named, and the rest is delivered."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_bridge import (
    ReceiverConfig,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    SenderEvent,
    SpoolError,
)
from trainer_bridge.cli import main
from trainer_bridge.clock import SystemClock
from trainer_bridge.codec import Frames, draft
from trainer_bridge.errors import DamagedError
from trainer_bridge.outbox import SpoolOutbox
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import SegmentLog, segment_paths
from trainer_bridge.seqset import SeqSet
from trainer_bridge.testing import make_sample

Wait = Callable[..., None]
NOWHERE = "tcp://127.0.0.1:9"
SMALL = 5000
"""A segment of so many bytes holds five of these samples."""


@pytest.fixture
def sender(sender_config: Callable[..., SenderConfig], tmp_path: Path) -> Callable[..., SampleSender]:
    def start(address: str, **more: object) -> SampleSender:
        config = sender_config(segment_bytes=SMALL, keep_segments=True)
        return SampleSender(address, spool=tmp_path / "spool", config=config, **more)  # type: ignore[arg-type]

    return start


def train(receiver: SampleReceiver, count: int) -> list[int]:
    """Trains on so many, however long they take, and on those that are there then."""
    got: list[int] = []
    while (lease := receiver.next(40.0 if len(got) < count else 0.3)) is not None:
        got.append(int(lease.rollout_id, 16))
        lease.commit()
    return got


def files(folder: Path) -> list[Path]:
    return segment_paths(folder / "samples")


def flip(path: Path, record: int, byte: int) -> None:
    """One bit, so many bytes into a record of a file, counted from 0."""
    segment, _ = Segment.scan(path, verify=False)
    raw = bytearray(path.read_bytes())
    raw[segment.offsets[record] + byte] ^= 1
    path.write_bytes(raw)


def audit(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["audit", str(path)]) == 1
    return capsys.readouterr().out


# -- the log


def message(n: int) -> Frames:
    return draft([make_sample(n, tokens=16)]).numbered(b"p" * 16, 1, n, 0)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    """A segment of six records, and where each begins."""
    log = SegmentLog(tmp_path_factory.mktemp("six"), segment_bytes=1 << 20, now_ns=1)
    for n in range(1, 7):
        log.append(message(n))
    log.close()
    (segment,) = log.segments()
    return segment.path.read_bytes(), [*segment.offsets, segment.size]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), last=st.booleans())
def test_one_flipped_bit_costs_one_record_at_most(
    six: tuple[bytes, list[int]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    last: bool,
) -> None:
    """Before, it cost all records behind it in the last file, and the whole folder in another one."""
    raw, offsets = six
    spoilt = bytearray(raw)
    # Its number of the first record, and anything behind it: the rest of the file's header says what it is.
    place = data.draw(st.integers(16, 23) | st.integers(32, len(raw) - 1) | st.sampled_from(offsets[:-1]))
    spoilt[place] ^= 1 << data.draw(st.integers(0, 7))
    hit = next((n for n in range(1, 7) if offsets[n - 1] <= place < offsets[n]), 0)
    root = tmp_path_factory.mktemp("flip")
    path = root / "samples" / "segment-000000.tbs"
    path.parent.mkdir()
    path.write_bytes(spoilt)
    if not last:
        end = SegmentLog(tmp_path_factory.mktemp("end"), segment_bytes=1, now_ns=1)
        end.skip_to(7)
        end.append(message(7))
        *_, other = end.segments()
        shutil.copy(other.path, path.with_name("segment-000001.tbs"))
        end.close()
    log = SegmentLog(root, segment_bytes=1 << 20, now_ns=1)
    named = {n for each in log.damage for n in range(each.first, each.last + 1)}
    assert named <= {hit}
    if last and hit == 6 and not named:
        assert (log.last, log.torn_bytes) == (5, offsets[6] - offsets[5]), "it looks like a torn one"
    for n in range(1, log.last + 1):
        if n == hit:
            with pytest.raises(DamagedError):
                log.read(n)
        else:
            assert bytes(log.read(n).frames.payload) == bytes(message(n).payload)
    assert log.append(message(8)) == log.last
    log.close()
    again = SegmentLog(root, segment_bytes=1 << 20, now_ns=1)
    assert again.last == log.last
    again.close()


def test_what_cannot_be_read_just_now_is_not_lost(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=1, now_ns=1)
    log.append(message(1))
    log.append(message(2))
    first, _ = files(tmp_path)
    first.rename(tmp_path / "away")
    first.mkdir()  # as with too many open files: it cannot be opened, and nobody says that it is gone
    with pytest.raises(SpoolError, match=r"cannot read record 1 in .*segment-000000\.tbs") as found:
        log.read(1)
    assert not isinstance(found.value, DamagedError)
    first.rmdir()
    with pytest.raises(DamagedError, match="No such file"):
        log.read(1)
    log.close()


def test_a_file_of_another_folder_is_refused(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, segment_bytes=1, now_ns=1)
    for n in range(1, 4):
        log.append(message(n))
    log.close()
    first, *_ = files(tmp_path)
    shutil.copy(first, first.with_name("segment-000009.tbs"))
    with pytest.raises(SpoolError, match=r"segment-000009\.tbs begins with record 1, .* ends with record 3"):
        SegmentLog(tmp_path, segment_bytes=1, now_ns=1)


# -- a spool


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_damaged_record_holds_up_no_other(
    tmp_path: Path,
    sender: Callable[..., SampleSender],
    receiver_config: Callable[..., ReceiverConfig],
    where: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the last file all behind it was cut off; in another one the sender died at each start."""
    with sender(NOWHERE, durability="sync") as worker:
        for n in range(12):
            worker.send(make_sample(n))
        worker.close(drain_s=0.0)
    path = files(tmp_path / "spool")[0 if where == "first" else -1]
    bad = 1 if where == "first" else 11
    size = path.stat().st_size
    flip(path, 1, 700)
    events: list[SenderEvent] = []
    with (
        SampleReceiver(config=receiver_config()) as receiver,
        sender(receiver.address, on_event=events.append) as worker,
    ):
        assert worker.stats().inherited == 12
        assert train(receiver, 11) == [n for n in range(12) if n != bad]
        assert worker.wait_settled(40.0)
        stats = worker.stats()
        assert (stats.acknowledged, stats.lost, stats.pending) == (11, 1, 0)
        (told,) = [event.text for event in events if event.kind == "lost"]
        assert told == stats.last_error
        assert f"{path}: record {bad + 1} at byte" in told
        worker.send(make_sample(12))
        assert train(receiver, 1) == [12]
        assert worker.wait_settled(40.0)
    assert path.stat().st_size >= size, "the bytes are kept"
    assert f"record {bad + 1} at byte" in audit(tmp_path / "spool", capsys)
    with sender(NOWHERE) as worker:
        stats = worker.close(drain_s=0.0)
        assert (stats.inherited, stats.lost) == (0, 0), "it was said once"


def test_a_spool_that_gives_nothing_back_for_a_moment_ends_no_sender(
    tmp_path: Path,
    sender: Callable[..., SampleSender],
    receiver_config: Callable[..., ReceiverConfig],
    wait: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sender(NOWHERE) as worker:
        for n in range(12):
            worker.send(make_sample(n))
        worker.close(drain_s=0.0)
    first = files(tmp_path / "spool")[0]
    with SampleReceiver(config=receiver_config()) as receiver:
        address = receiver.address
    with sender(address) as worker:
        first.rename(tmp_path / "away")
        first.mkdir()  # as with too many open files: it cannot be opened, and nobody says that it is gone
        with SampleReceiver(address, config=receiver_config()) as receiver:
            wait(lambda: worker.stats().disk_faults > 1)
            first.rmdir()
            (tmp_path / "away").rename(first)
            assert train(receiver, 12) == list(range(12))
            assert worker.wait_settled(40.0)
            assert (worker.stats().lost, worker.stats().dropped) == (0, {})
    assert len([each for each in caplog.messages if "cannot read record" in each]) == 1


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_file_is_named_and_holds_up_no_other(
    tmp_path: Path,
    sender: Callable[..., SampleSender],
    receiver_config: Callable[..., ReceiverConfig],
    gone: int,
) -> None:
    with sender(NOWHERE) as worker:
        for n in range(15):
            worker.send(make_sample(n))
        worker.close(drain_s=0.0)
    (tmp_path / "spool" / "samples" / "cursor.json").unlink(missing_ok=gone == 0)
    if gone == 0:
        with sender(NOWHERE) as worker:
            worker.close(drain_s=0.0)  # it notes that nothing is settled
    files(tmp_path / "spool")[gone].unlink()
    with SampleReceiver(config=receiver_config()) as receiver, sender(receiver.address) as worker:
        assert train(receiver, 10) == [n for n in range(15) if n // 5 != gone]
        assert worker.wait_settled(40.0)
        stats = worker.stats()
        assert (stats.inherited, stats.acknowledged, stats.lost) == (15, 10, 5)
        assert ("no file begins before record 6" if gone == 0 else "no file between it") in stats.last_error


def test_numbers_that_are_used_anew_are_not_taken_for_settled_after_two_crashes(tmp_path: Path) -> None:
    def opened() -> SpoolOutbox:
        return SpoolOutbox(tmp_path, durability="none", config=SenderConfig(), clock=SystemClock())

    def put(box: SpoolOutbox) -> None:
        epoch = box.streams[-1].epoch
        box.append(draft([make_sample(1)]).numbered(box.producer, epoch, box.last + 1, 0))

    box = opened()
    for _ in range(5):
        put(box)
    box.close(SeqSet(5))
    (path,) = files(tmp_path)
    segment, _ = Segment.scan(path, verify=False)
    os.truncate(path, segment.offsets[2])  # the machine lost records 3 to 5, the cursor survived
    box = opened()
    put(box)
    box._log.close()  # kill -9: no cursor is written
    box = opened()
    assert box.settled == SeqSet(2)
    box.close(box.settled)


# -- a store


@pytest.fixture
def filled(tmp_path: Path, sender: Callable[..., SampleSender], config: ReceiverConfig, wait: Wait) -> Path:
    """A store of 15 samples in three files, 3 of them committed; the sender has all, and knows of the 3."""
    store = tmp_path / "store"
    with SampleReceiver(out=store, config=config) as receiver, sender(receiver.address) as worker:
        for n in range(15):
            worker.send(make_sample(n))
        for _ in range(3):
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
        wait(lambda: (worker.stats().pending, receiver.stats().stored) == (12, 15))
        worker.close(drain_s=0.0)
    assert len(files(store)) == 3
    return store


@pytest.fixture
def config(receiver_config: Callable[..., ReceiverConfig]) -> ReceiverConfig:
    return receiver_config(segment_bytes=SMALL)


def head_byte() -> int:
    return 32 + 60


@pytest.mark.parametrize(
    ("file", "record", "byte", "letter"),
    [(0, 3, head_byte(), ""), (2, 1, head_byte(), ""), (2, 1, 900, f"{11:032x}"), (2, 1, 8, f"{11:032x}")],
)
def test_a_store_sets_a_damaged_record_aside(
    filled: Path,
    config: ReceiverConfig,
    sender: Callable[..., SampleSender],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    file: int,
    record: int,
    byte: int,
    letter: str,
) -> None:
    """All behind it was cut off, or the store did not open. Its sender still has it: it comes again."""
    bad = 5 * file + record
    flip(files(filled)[file], record, byte)
    with caplog.at_level(logging.WARNING), SampleReceiver(out=filled, config=config) as receiver:
        stats = receiver.stats()
        assert (stats.restored, stats.queued, stats.unaccounted) == (12, 11, 0)
        assert (stats.dropped, stats.store_damaged, stats.stored) == ({"unreadable": 1}, 1, 14)
        assert receiver.metrics()["store_damaged_total"] == 1.0
        (found,) = receiver.dead_letters()
        assert (found.reason, found.position, found.rollout_id) == ("unreadable", bad + 1, letter)
        assert f"record {bad + 1}" in found.detail
        assert train(receiver, 11) == [n for n in range(3, 15) if n != bad]
        with sender(receiver.address) as worker:
            assert train(receiver, 1) == [bad]
            assert worker.wait_settled(40.0)
    assert f"record {bad + 1}" in caplog.text
    assert f"record {bad + 1}" in audit(filled, capsys)
    with SampleReceiver(out=filled, config=config) as receiver, sender(receiver.address) as worker:
        stats = receiver.stats()
        assert (stats.restored, stats.dropped, stats.store_damaged) == (0, {}, 1), "it was said once"
        assert train(receiver, 0) == []
        worker.send(make_sample(15))
        assert train(receiver, 1) == [15]


def test_a_damaged_record_that_was_committed_is_not_trained_on_again(
    filled: Path, config: ReceiverConfig, sender: Callable[..., SampleSender], tmp_path: Path
) -> None:
    flip(files(filled)[0], 1, head_byte())
    (tmp_path / "spool" / "samples" / "cursor.json").unlink()  # the sender does not know, and sends all again
    with SampleReceiver(out=filled, config=config) as receiver, sender(receiver.address) as worker:
        assert receiver.stats().store_damaged == 1
        assert receiver.stats().dropped == {}
        got = train(receiver, 13)
        assert worker.wait_settled(40.0)
        assert got == [*range(3, 15), 1], "whose head is gone cannot be known; it is told, and counted"
    flip(files(filled)[0], 2, 900)
    (tmp_path / "spool" / "samples" / "cursor.json").unlink()
    with SampleReceiver(out=filled, config=config) as receiver, sender(receiver.address) as worker:
        assert worker.wait_settled(40.0)
        assert train(receiver, 0) == [], "its head says what it was"


def test_a_missing_file_of_a_store_is_named(
    filled: Path,
    config: ReceiverConfig,
    sender: Callable[..., SampleSender],
    capsys: pytest.CaptureFixture[str],
) -> None:
    files(filled)[1].unlink()
    with SampleReceiver(out=filled, config=config) as receiver:
        stats = receiver.stats()
        assert (stats.restored, stats.queued, stats.stored) == (12, 7, 10)
        assert (stats.dropped, stats.unaccounted) == ({"unreadable": 5}, 0)
        (letter,) = receiver.dead_letters()
        assert "5 records" in letter.detail
        assert "records 6 to 10 are missing" in letter.detail
        state = json.loads(json.dumps(receiver.state_dict()))
    assert "begins with record 11, not 6" in audit(filled, capsys)
    with SampleReceiver(out=filled, config=config) as receiver:
        receiver.load_state_dict(state)
        assert receiver.stats().dropped == {}, "a checkpoint brings back what is there"
        assert train(receiver, 7) == [3, 4, *range(10, 15)]
        with sender(receiver.address):
            assert train(receiver, 5) == list(range(5, 10))


def test_what_comes_after_a_cut_does_not_count_as_committed(
    filled: Path, config: ReceiverConfig, sender: Callable[..., SampleSender], wait: Wait
) -> None:
    """The cursor was ahead of the log, and new samples under these numbers were lost without a word."""
    with SampleReceiver(out=filled, config=config) as receiver:
        assert len(train(receiver, 12)) == 12
    last = files(filled)[-1]
    segment, _ = Segment.scan(last, verify=False)
    os.truncate(last, segment.offsets[1])
    with SampleReceiver(out=filled, config=config) as receiver, sender(receiver.address) as worker:
        assert receiver.stats().store_damaged == 4
        for n in range(20, 24):
            worker.send(make_sample(n))
        wait(lambda: receiver.stats().messages == 8)  # what the store lost comes again too
        assert receiver.stats().queued == 8, "none of them counts as committed"
        worker.close(drain_s=0.0)
    with SampleReceiver(out=filled, config=config) as receiver:
        assert set(range(20, 24)) <= set(train(receiver, 4))
