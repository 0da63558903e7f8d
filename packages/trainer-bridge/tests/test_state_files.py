"""The small files beside the segments, and the dead letters: damaged, cut off, or of another folder."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import trainer_bridge.dead_letters as catalogue
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig, SpoolError
from trainer_bridge.clock import SystemClock
from trainer_bridge.codec import draft
from trainer_bridge.dead_letters import DeadLetter, DeadLetters, read_letters
from trainer_bridge.errors import DamagedError
from trainer_bridge.outbox import SpoolOutbox
from trainer_bridge.seqset import SeqSet
from trainer_bridge.state_file import (
    CheckpointsFile,
    CursorFile,
    OwnersFile,
    ProducerFile,
    TrimmedFile,
    load,
    save,
)
from trainer_bridge.store import Store
from trainer_bridge.testing import make_sample

NOWHERE = "tcp://127.0.0.1:9"
EACH = [
    ProducerFile(producer="ab" * 16, streams=((1, 1), (2, 40))),
    CursorFile(upto=12, ranges=((14, 20),), dropped={"stale": ((3, 5),)}),
    OwnersFile(keys={"worker": ("ab" * 16,)}),
    TrimmedFile(
        upto=9, done={"ab" * 16: ((1, 9, ()),)}, ids="trimmed-000001.ids", rollouts=9, digest="0" * 16
    ),
    CheckpointsFile(saved=({"ab" * 16: ((1, 9, ((11, 12),)),)},)),
]
OF_STORES = {
    "cursor.json": EACH[1],
    "owners.json": EACH[2],
    "trimmed.json": EACH[3],
    "checkpoints.json": EACH[4],
}


@pytest.mark.parametrize("state", EACH, ids=lambda state: type(state).__name__)
def test_a_flipped_bit_in_any_byte_and_a_cut_are_found(state: CursorFile, tmp_path: Path) -> None:
    """A bit of `upto` settled everything."""
    path = tmp_path / "file.json"
    save(path, state)
    assert load(path, type(state)) == state
    raw = path.read_bytes()
    assert json.loads(raw)["kind"].startswith("trainer-bridge/")
    spoilt = [raw[:n] for n in range(0, len(raw), 10)]
    spoilt += [raw[:at] + bytes([raw[at] ^ (1 << at * 5 % 8)]) + raw[at + 1 :] for at in range(len(raw))]
    for each in spoilt:
        path.write_bytes(each)
        with pytest.raises(DamagedError, match=r"cannot read .*file\.json, it is damaged \(.*\): restore it"):
            load(path, type(state))


def spool(root: Path) -> SpoolOutbox:
    return SpoolOutbox(root, durability="none", config=SenderConfig(), clock=SystemClock())


def store(root: Path) -> Store:
    config = ReceiverConfig(keep_committed="checkpoint")
    return Store(root, config=config, now_ns=1, progressed=lambda: None)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def test_a_spool_does_without_its_cursor_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = spool(tmp_path)
    for n in range(3):
        box.append(draft([make_sample(n)]).numbered(box.producer, 1, n + 1, 0))
    box.close(SeqSet(2))
    cut(tmp_path / "samples" / "cursor.json")
    with caplog.at_level(logging.WARNING), SampleSender(NOWHERE, spool=tmp_path) as sender:
        stats = sender.close(drain_s=0.0)
    assert (stats.inherited, stats.disk_faults, stats.lost) == (3, 1, 0)
    assert "messages that were settled are sent once more" in caplog.text
    assert (tmp_path / "samples" / "cursor.damaged").exists()


@pytest.mark.parametrize("name", ["producer.json", *OF_STORES])
def test_what_a_folder_cannot_do_without_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    """Without its cursor, a store would hand everything out again."""
    path = tmp_path / "samples" / name
    if name == "producer.json":
        spool(tmp_path).close(SeqSet())
        opened: Callable[[Path], object] = spool
    else:
        store(tmp_path).close()
        save(path, OF_STORES[name])
        opened = store
    cut(path)
    for _ in range(2):  # and nothing stays locked
        with pytest.raises(SpoolError, match=rf"{name}, it is damaged \(no xxh3: .*\): restore it from"):
            opened(tmp_path)


def test_a_folder_of_the_other_kind_is_refused(
    tmp_path: Path,
    sender_config: Callable[..., SenderConfig],
    receiver_config: Callable[..., ReceiverConfig],
    wait: Callable[..., None],
) -> None:
    """A receiver handed out what a sender had not sent yet; a sender sent messages of other producers."""
    mine, yours = tmp_path / "spool", tmp_path / "store"
    with SampleReceiver(out=yours, config=receiver_config()) as receiver:
        with SampleSender(receiver.address, spool=mine, config=sender_config()) as sender:
            sender.send(make_sample(1))
            wait(lambda: receiver.stats().stored == 1)
            sender.close(drain_s=0.0)
        before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
        with pytest.raises(SpoolError, match=r"is the spool of a sender .* a folder of its own"):
            SampleReceiver(out=mine)
        assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before
    for sign in ("samples/segment-000000.tbs", "samples/cursor.json", "dead_letters.sqlite"):
        with pytest.raises(SpoolError, match=r"is the store of a receiver .* a folder of its own"):
            SampleSender(NOWHERE, spool=yours)
        (yours / sign).unlink(missing_ok=True)
    shutil.rmtree(yours)
    SampleSender(NOWHERE, spool=yours).close(drain_s=0.0)
    SampleSender(NOWHERE, spool=yours).close(drain_s=0.0)


# -- dead letters


def letter(n: int, **more: object) -> DeadLetter:
    return DeadLetter(
        **{"reason": "nacked", "detail": "no", "at_ns": n, "rollout_id": f"{n:032x}", "sequence": n} | more
    )  # type: ignore[arg-type]


def test_a_letter_is_bounded_and_so_are_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1 MB of detail each, 100,000 times, is a full disk."""
    monkeypatch.setattr(catalogue, "MAX_BYTES", 100_000)
    letters = DeadLetters(tmp_path)
    for n in range(100):
        letters.add(letter(n, detail="x" * 1_100_000))
    kept = letters.all()
    assert 20 < len(kept) < 60
    assert letters.not_kept == 100 - len(kept)
    assert kept[0].detail == "x" * 2000 + "... (1100000 characters)"
    letters.close()
    assert (tmp_path / "dead_letters.sqlite").stat().st_size <= 100_000


def test_no_letter_ends_a_receiver(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """sqlite has no integers of 64 bits without sign, and no halves of surrogate pairs."""
    letters = DeadLetters(tmp_path)
    odd = letter(1, epoch=2**64 - 1, attempt=2**63, sequence=2**64 - 1, detail="half \ud800 a pair")
    letters.add(odd)
    (kept,) = read_letters(tmp_path / "dead_letters.sqlite")
    assert (kept.epoch, kept.attempt, kept.sequence) == (2**64 - 1, 2**63, 2**64 - 1)
    assert kept.detail == "half ? a pair"
    with sqlite3.connect(tmp_path / "dead_letters.sqlite") as other:
        other.execute("drop table letters")
    other.close()
    for n in range(3):
        letters.add(letter(n))
    assert letters.not_kept == 3
    assert caplog.text.count("takes no more dead letters") == 1
    letters.close()


def test_a_broken_catalogue_is_moved_aside(
    tmp_path: Path, wait: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with SampleReceiver(out=tmp_path):
        pass
    path = tmp_path / "dead_letters.sqlite"
    path.write_bytes(b"x" * 4096)
    with caplog.at_level(logging.WARNING), SampleReceiver(out=tmp_path) as receiver:
        assert receiver.dead_letters() == ()
        wait(lambda: receiver.metrics()["letters_not_kept_total"] == 1.0)
    assert "dead_letters.sqlite is damaged (file is not a database): it was moved to" in caplog.text
    assert path.with_suffix(".damaged").read_bytes() == b"x" * 4096
    assert read_letters(path) == ()
