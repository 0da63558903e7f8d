"""A store that deletes what nobody needs again: what it still knows, and what it says."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_bridge import (
    ConfigError,
    ReceiverConfig,
    ReceiverEvent,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    SpoolError,
    StuckError,
    read_samples,
)
from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.cli import main
from trainer_bridge.retention import Retention
from trainer_bridge.segment_log import segment_paths
from trainer_bridge.testing import make_rollout

Config = Callable[..., ReceiverConfig]
Wait = Callable[..., None]
SMALL = 4000
"""A segment of so many bytes holds two or three of these rollouts."""


@pytest.fixture
def config(receiver_config: Config) -> Config:
    return lambda **changes: receiver_config(
        **{"segment_bytes": SMALL, "commit_on": "checkpoint", "keep_committed": "checkpoint", **changes}
    )


@pytest.fixture
def worker(sender_config: Callable[..., SenderConfig], tmp_path: Path) -> Callable[..., SampleSender]:
    def start(address: str) -> SampleSender:
        return SampleSender(address, spool=tmp_path / "spool", config=sender_config(keep_segments=True))

    return start


def send(sender: SampleSender, *numbers: int) -> None:
    for n in numbers:
        sender.send(make_rollout(n, tokens=32))


def train(receiver: SampleReceiver, count: int, got: list[int] | None = None) -> list[int]:
    got = [] if got is None else got
    for _ in range(count):
        lease = receiver.next(40.0)
        assert lease is not None
        got.append(int(lease.rollout_id, 16))
        lease.commit()
    return got


def save(receiver: SampleReceiver) -> dict[str, Any]:
    """A checkpoint, as it comes back from a file."""
    state = json.loads(json.dumps(receiver.state_dict()))
    receiver.checkpoint_saved(state)
    return state


def audited(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["audit", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    return found


def test_everything_is_kept_unless_it_is_asked_for(
    tmp_path: Path, config: Config, worker: Callable[..., SampleSender]
) -> None:
    out, keep_all = tmp_path / "store", config(keep_committed="all")
    with SampleReceiver(out=out, config=keep_all) as receiver, worker(receiver.address) as sender:
        send(sender, *range(12))
        train(receiver, 12)
        save(receiver)
        assert sender.wait_settled(40.0)
    assert ReceiverConfig().keep_committed == "all"
    assert receiver.stats().trimmed == 0
    assert len(list(read_samples(out))) == 12


def test_what_a_checkpoint_covers_goes_and_stays_known_over_a_restart(
    tmp_path: Path,
    config: Config,
    worker: Callable[..., SampleSender],
    wait: Wait,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = tmp_path / "store"
    with SampleReceiver(out=store, config=config()) as receiver, worker(receiver.address) as sender:
        send(sender, *range(20))
        train(receiver, 10)
        assert receiver.stats().trimmed == 0
        save(receiver)
        wait(lambda: receiver.stats().trimmed >= 6)
        stats = receiver.stats()
        assert stats.trimmed <= 10, "what is not in the checkpoint is there"
        assert stats.stored == 20 - stats.trimmed
        assert receiver.metrics()["store_trimmed_total"] == stats.trimmed
        on_disk = sum(path.stat().st_size for path in segment_paths(store / "samples"))
        assert receiver.metrics()["store_bytes"] == on_disk
        train(receiver, 10)
        state = save(receiver)
        assert sender.wait_settled(40.0)
        wait(lambda: len(segment_paths(store / "samples")) == 1)
    found = audited(tmp_path, capsys)
    assert (found["ledger"]["sent"], found["ledger"]["committed"]) == (20, 20)
    assert audited(store, capsys)["ledger"]["sent"] == 20
    with caplog.at_level(logging.WARNING):
        left = len(list(read_samples(store)))
    assert f"records 1 to {20 - left} were deleted" in caplog.text
    # The worker loses its note of what is settled, and another one runs a rollout again.
    (tmp_path / "spool" / "samples" / "cursor.json").unlink()
    with SampleReceiver(out=store, config=config()) as receiver:
        receiver.load_state_dict(state)
        with worker(receiver.address) as sender, SampleSender(receiver.address) as other:
            send(other, 3)
            send(sender, 20)
            assert train(receiver, 1) == [20]
            save(receiver)
            assert sender.wait_settled(40.0)
            assert other.wait_settled(40.0)
            stats = receiver.stats()
            assert (stats.doubled, stats.unavailable, stats.unaccounted) == (1, 0, 0)
            assert stats.messages == 1, "nothing came as new but what is new"
            assert receiver.next(0.0) is None


@pytest.mark.parametrize("keep", [1, 2])
def test_a_trainer_goes_back_to_as_many_checkpoints_as_are_kept(
    tmp_path: Path, config: Config, worker: Callable[..., SampleSender], wait: Wait, keep: int
) -> None:
    """verl PR #4199, OpenRLHF#1322: what lay between the two checkpoints was skipped without a word."""
    store, kept = tmp_path / "store", config(keep_checkpoints=keep)
    states: list[dict[str, Any]] = []
    with SampleReceiver(out=store, config=kept) as receiver, worker(receiver.address) as sender:
        send(sender, *range(18))
        for _ in range(3):
            train(receiver, 6)
            states.append(save(receiver))
            receiver.checkpoint_saved(states[-1])  # said twice, it is one checkpoint
        assert sender.wait_settled(40.0)
        wait(lambda: receiver.stats().trimmed >= (14 if keep == 1 else 8))
        trimmed = receiver.stats().trimmed
    assert trimmed <= 18 - 6 * (keep - 1)
    events: list[ReceiverEvent] = []
    with SampleReceiver(out=store, config=kept, on_event=events.append) as receiver:
        receiver.load_state_dict(states[1])
        gone = max(trimmed - 12, 0)
        assert receiver.metrics()["unavailable_total"] == gone
        assert (gone > 0) == (keep == 1)
        with worker(receiver.address) as sender:
            assert train(receiver, 6 - gone) == list(range(12 + gone, 18))
            if gone:
                wait(lambda: any(event.kind == "store" for event in events))
                (text,) = [event.text for event in events if event.kind == "store"]
                assert f"{gone} rollouts ({gone} of producer {sender.stats().producer})" in text
                assert "cannot come again" in text
            state = save(receiver)
            send(sender, 18)
            assert train(receiver, 1) == [18]
            sender.close(drain_s=0.0)
    with SampleReceiver(out=store, config=kept) as receiver:
        receiver.load_state_dict(state)
        assert receiver.stats().unavailable == 0, "it was said once, and this checkpoint knows"
        assert train(receiver, 1) == [18]


def test_nothing_goes_before_there_are_as_many_checkpoints_as_are_kept(tmp_path: Path) -> None:
    def checkpoint(upto: int) -> ReceiverState:
        return ReceiverState(done={"ab" * 16: ((1, upto, ()),)})

    def allowed(upto: int) -> bool:
        return retention.allows(checkpoint(upto).watermark())

    retention = Retention(tmp_path, "checkpoint", 2)
    assert not allowed(1)
    retention.saved(checkpoint(5))
    retention.saved(checkpoint(5))
    assert not allowed(1), "the same checkpoint was said twice"
    retention.saved(checkpoint(9))
    assert (allowed(5), allowed(6)) == (True, False)
    retention.saved(checkpoint(12))
    assert (allowed(9), allowed(10)) == (True, False)
    retention.loaded(checkpoint(9))
    assert not allowed(1), "the checkpoints after it are void, and only one before them is known"
    retention.saved(checkpoint(14))
    assert (allowed(9), allowed(10)) == (True, False)
    retention.save()
    again = Retention(tmp_path, "checkpoint", 2)
    again.loaded(checkpoint(14))
    assert again.allows(checkpoint(9).watermark()), "a restart goes on where it was"
    assert not again.allows(checkpoint(10).watermark())
    assert not Retention(tmp_path, "checkpoint", 3).allows(checkpoint(1).watermark())
    assert Retention(tmp_path, "checkpoint", 1).allows(checkpoint(14).watermark())
    again.loaded(checkpoint(9))
    again.save()
    later = Retention(tmp_path, "checkpoint", 1)
    assert (later.allows(checkpoint(9).watermark()), later.allows(checkpoint(10).watermark())) == (
        True,
        False,
    )


def test_none_keeps_what_is_not_committed(
    tmp_path: Path, config: Config, worker: Callable[..., SampleSender], wait: Wait
) -> None:
    none = config(keep_committed="none", commit_on="commit")
    with SampleReceiver(out=tmp_path / "store", config=none) as receiver, worker(receiver.address) as sender:
        send(sender, *range(12))
        held = receiver.next(40.0)
        assert held is not None
        train(receiver, 11)
        wait(lambda: sender.stats().pending == 1)
        assert receiver.stats().trimmed == 0, "the first segment holds one that is in the trainer's hands"
        held.commit()
        wait(lambda: receiver.stats().trimmed >= 9)
        assert receiver.dead_letters() == ()
        trimmed = receiver.stats().trimmed
    # Without a checkpoint the store alone knows what there was.
    with (
        SampleReceiver(out=tmp_path / "store", config=none) as receiver,
        SampleSender(receiver.address) as other,
    ):
        send(other, *range(trimmed))
        assert other.wait_settled(40.0)
        assert receiver.stats().doubled == trimmed
        assert receiver.next(0.0) is None


def test_a_full_store_asks_for_no_more_and_goes_on_after_a_checkpoint(
    tmp_path: Path, config: Config, worker: Callable[..., SampleSender], wait: Wait
) -> None:
    events: list[ReceiverEvent] = []
    tight = config(store_quota_bytes=3 * SMALL, queue_messages=4, patience_s=0.3)
    out = tmp_path / "store"
    with (
        SampleReceiver(out=out, config=tight, on_event=events.append) as receiver,
        worker(receiver.address) as sender,
    ):
        send(sender, *range(60))
        got: list[int] = []
        with pytest.raises(StuckError, match=r"the store .* has \d+ bytes of 12000 \(store_quota_bytes\)"):
            train(receiver, 60, got)
        assert 4 <= len(got) < 20
        assert receiver.metrics()["store_bytes"] < 6 * SMALL
        assert receiver.metrics()["store_left_bytes"] < SMALL
        assert [event.kind for event in events].count("store") >= 1
        assert "no more credit" in [event.text for event in events if event.kind == "store"][-1]
        assert sender.stats().pending == 60
        while len(got) < 60:
            save(receiver)
            train(receiver, 1, got)
        save(receiver)
        assert sender.wait_settled(40.0)
        assert got == list(range(60)), "nothing was lost"
        assert receiver.stats().unaccounted == 0


def test_kill_minus_nine_at_each_file_operation(in_memory: Path, programs: Path) -> None:
    """Each record is either there, or gone and known; and the next start finishes what was begun."""
    done = subprocess.run(
        [sys.executable, str(programs / "killed_trim.py"), str(in_memory)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) > 40
    assert len({line["after"]["upto"] for line in lines}) == 6, "deaths before and after each segment's end"
    for line in lines:
        for found in (line["after"], line["end"]):
            upto = found["upto"]
            assert found["here"] == list(range(upto + 1, 13)), line
            assert found["known"] == upto, line
            assert found["rollouts"] == list(range(1, upto + 1))[-4:], line
            assert found["dropped"] == ({"stale": 1} if upto >= 3 else {}), line
            assert found["strays"] == (upto > 0), line
        assert line["end"]["upto"] == 10


def trimmed_store(folder: Path, config: ReceiverConfig, wait: Wait) -> Path:
    with SampleReceiver(out=folder, config=config) as receiver, SampleSender(receiver.address) as sender:
        send(sender, *range(8))
        train(receiver, 8)
        save(receiver)
        wait(lambda: len(segment_paths(folder / "samples")) == 1)
    (ids,) = (folder / "samples").glob("trimmed-*.ids")
    return ids


def test_damage_to_what_is_known_is_an_error_and_an_unconfirmed_end_is_none(
    tmp_path: Path, config: Config, wait: Wait
) -> None:
    ids = trimmed_store(tmp_path, config(), wait)
    whole = ids.read_bytes()
    ids.write_bytes(whole + b"half an ent")
    SampleReceiver(out=tmp_path, config=config()).close()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"x" * len(whole), b""):
        ids.write_bytes(damaged)
        with pytest.raises(SpoolError, match=r"trimmed-000001.ids is damaged: restore it"):
            SampleReceiver(out=tmp_path, config=config())
    ids.write_bytes(whole)
    for path in segment_paths(tmp_path / "samples"):
        path.unlink()
    with pytest.raises(SpoolError, match="segments are missing"):
        SampleReceiver(out=tmp_path, config=config())


def test_a_note_that_the_disk_does_not_take_deletes_nothing_and_is_tried_again(
    tmp_path: Path, config: Config, worker: Callable[..., SampleSender], wait: Wait
) -> None:
    with SampleReceiver(out=tmp_path / "store", config=config()) as receiver:
        obstacle = tmp_path / "store" / "samples" / "trimmed.new"
        obstacle.mkdir()
        with worker(receiver.address) as sender:
            send(sender, *range(8))
            train(receiver, 8)
            save(receiver)
            wait(lambda: receiver.metrics()["store_faults_total"] >= 1.0)
            assert receiver.stats().trimmed == 0
            obstacle.rmdir()
            send(sender, 8)
            train(receiver, 1)
            save(receiver)
            wait(lambda: receiver.stats().trimmed >= 5)
            assert sender.wait_settled(40.0)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least two segments"):
        ReceiverConfig(segment_bytes=1000, store_quota_bytes=1999)
    with pytest.raises(ConfigError, match="keep_checkpoints must be at least 1"):
        ReceiverConfig(keep_checkpoints=0)
