"""`audit` and `inspect`: do they find what is wrong, and name it?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig, SpoolError
from trainer_bridge.cli import main
from trainer_bridge.segment import Segment
from trainer_bridge.segment_log import segment_paths
from trainer_bridge.state_file import CursorFile, save
from trainer_bridge.testing import make_rollout, make_sample

Command = Callable[..., tuple[int, str]]
Audited = Callable[..., tuple[int, dict[str, object]]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*argv: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def audited(command: Command) -> Audited:
    def run(path: Path) -> tuple[int, dict[str, object]]:
        code, out = command("audit", path, "--json")
        return code, json.loads(out)

    return run


@pytest.fixture
def run_folder(
    tmp_path: Path,
    sender_config: Callable[..., SenderConfig],
    receiver_config: Callable[..., ReceiverConfig],
    wait: Callable[..., None],
) -> Path:
    """Of ten rollouts, four are committed, one is given up, two wait, one came twice, two never left."""
    spool, store = tmp_path / "run", tmp_path / "run" / "trainer"
    config = sender_config(keep_segments=True)
    with SampleReceiver(out=store, config=receiver_config(max_nacks=0)) as receiver:
        with SampleSender(receiver.address, spool=spool, config=config) as sender:
            for n in (0, 1, 2, 3, 4, 0, 5, 6):  # rollout 0 again, as a worker does that was restarted
                sender.send(make_rollout(n, parts=2, tokens=8))
            for n in range(5):
                lease = receiver.next(40.0)
                assert lease is not None
                if n == 4:
                    lease.nack("it is no good")
                else:
                    lease.commit()
            wait(lambda: sender.stats().acknowledged == 6)
            sender.close(drain_s=0.0)
        address = receiver.address
    sender = SampleSender(address, spool=spool, config=config)
    for n in (7, 8):
        sender.send(make_rollout(n, parts=2, tokens=8))
    sender.close(drain_s=0.0)
    return spool


def rewrite_cursor(folder: Path, upto: int) -> None:
    save(folder / "samples" / "cursor.json", CursorFile(upto=upto))


def test_a_run_folder_adds_up(run_folder: Path, audited: Audited, command: Command) -> None:
    code, found = audited(run_folder)
    assert code == 0
    assert found["ledger"] == {
        "sent": 10,
        "committed": 4,
        "dropped": {"nacked": 1, "duplicate": 1},
        "leased_or_queued": 2,
        "in_flight_or_spooled": 2,
        "adds_up": True,
    }
    assert [folder["kind"] for folder in found["folders"]] == ["spool", "store"]  # type: ignore[union-attr]
    assert (found["repeated"], found["missing"], found["doubled"]) == (1, [], [])
    code, out = command("audit", run_folder)
    assert code == 0
    equation, why, end = out.splitlines()[-3:]
    assert equation == (
        "sent 10 = committed 4 + dropped 2 (duplicate 1, nacked 1) + leased or queued 2"
        " + in flight or spooled 2"
    )
    assert "leases live in the receiver's memory" in why
    assert end == "it adds up"


def test_a_running_receiver_tells_leased_from_queued(
    tmp_path: Path,
    command: Command,
    receiver_config: Callable[..., ReceiverConfig],
    wait: Callable[..., None],
) -> None:
    with (
        SampleReceiver(out=tmp_path / "trainer", config=receiver_config()) as receiver,
        SampleSender(receiver.address, spool=tmp_path, config=SenderConfig(keep_segments=True)) as sender,
    ):
        for n in range(6):
            sender.send(make_rollout(n))
        leases = [receiver.next(40.0) for _ in range(3)]
        assert leases[0] is not None
        leases[0].commit()
        wait(lambda: receiver.stats().messages == 6)
        live = ("--live", receiver.address)
        code, out = command("audit", tmp_path, *live, "--json")
        found = json.loads(out)
        assert (code, found["ledger"]["committed"], found["ledger"]["leased_or_queued"]) == (0, 1, 5)
        assert found["live"] == {
            "address": receiver.address,
            "queued": 3,
            "leased": 2,
            "trained_not_saved": 0,
            "unaccounted": 0,
            "stood_still": True,
        }
        code, out = command("audit", tmp_path, *live)
        assert code == 0
        assert "queued 3, leased 2, trained on and in no saved checkpoint 0" in out
        assert "it adds up" in out
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "segment-000000.tbs").write_bytes(
            (tmp_path / "trainer" / "samples" / "segment-000000.tbs").read_bytes()
        )
        save(tmp_path / "other" / "cursor.json", CursorFile(upto=5))
        code, out = command("audit", tmp_path / "other", *live)
        assert code == 1
        assert "is it the receiver of another run?" in out
        sender.close(drain_s=0.0)
    assert main(["audit", str(tmp_path), *live, "--timeout", "0.2"]) == 2


def test_a_spool_and_a_store_alone_add_up(run_folder: Path, audited: Audited) -> None:
    code, found = audited(run_folder / "samples")
    assert code == 0
    assert found["ledger"]["sent"] == 10  # type: ignore[index]
    assert found["ledger"]["in_flight_or_spooled"] == 4  # type: ignore[index]
    code, found = audited(run_folder / "trainer")
    assert code == 0
    assert found["ledger"]["sent"] == 7  # type: ignore[index]


def test_what_a_sender_forgot_and_nobody_has_is_named(run_folder: Path, audited: Audited) -> None:
    rewrite_cursor(run_folder, 9)  # it forgets rollout 7, which never left
    code, found = audited(run_folder)
    assert code == 1
    (missing,) = found["missing"]  # type: ignore[misc]
    assert f"rollout {7:032x}, attempt 0 (message 9 of producer" in missing
    assert found["ledger"]["adds_up"] is False  # type: ignore[index]


def test_a_rollout_that_is_stored_twice_is_named(run_folder: Path, audited: Audited) -> None:
    (path,) = segment_paths(run_folder / "trainer" / "samples")
    segment, _ = Segment.scan(path, verify=True)
    record = next(iter(segment.records()))
    with path.open("r+b", buffering=0) as file:
        file.seek(segment.size)
        segment.append(file, record.frames)
    code, found = audited(run_folder)
    assert code == 1
    (doubled,) = found["doubled"]  # type: ignore[misc]
    assert f"rollout {0:032x}, attempt 0: stored 2 times" in doubled


def test_damage_is_located_and_a_torn_end_is_none(run_folder: Path, audited: Audited) -> None:
    (path,) = segment_paths(run_folder / "samples")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    code, found = audited(run_folder)
    assert code == 0
    assert found["ledger"]["sent"] == 9  # type: ignore[index]
    (torn,) = found["torn"]  # type: ignore[misc]
    assert "record 10 at byte" in torn
    rewrite_cursor(run_folder, 10)
    code, found = audited(run_folder)
    assert code == 1
    assert "the cursor knows of record 10, and the last record is 9" in found["faults"][0]  # type: ignore[index]
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    code, found = audited(run_folder)
    assert code == 1
    assert "record 10 at byte" in found["faults"][0]  # type: ignore[index]
    assert "hash" in found["faults"][0]  # type: ignore[index]


def test_a_replaced_attempt_is_accounted_for(tmp_path: Path, audited: Audited) -> None:
    with (
        SampleReceiver(out=tmp_path / "trainer") as receiver,
        SampleSender(receiver.address, spool=tmp_path, config=SenderConfig(keep_segments=True)) as sender,
    ):
        for attempt in (1, 0):
            sender.send(make_rollout(1, attempt=attempt))
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
        assert sender.wait_settled(40.0)
    code, found = audited(tmp_path)
    assert code == 0
    assert found["ledger"]["dropped"] == {"fenced": 1}  # type: ignore[index]


def test_drops_by_a_rule_are_told_by_their_reason_also_after_a_return_to_a_checkpoint(
    tmp_path: Path, audited: Audited
) -> None:
    config = ReceiverConfig(max_staleness=0, commit_on="checkpoint")
    with (
        SampleReceiver(out=tmp_path / "trainer", config=config) as receiver,
        SampleSender(receiver.address, spool=tmp_path) as sender,
    ):
        receiver.publish(policy_run="run-1", weights_version=3)
        before = receiver.state_dict()
        sender.send(make_sample(0))
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
        receiver.publish(weights_version=4)
        sender.send(make_sample(1))
        assert receiver.next(0.5) is None
        receiver.checkpoint_saved(receiver.state_dict())
        assert sender.wait_settled(40.0)
    code, found = audited(tmp_path)
    assert code == 0
    ledger = found["ledger"]
    assert (ledger["committed"], ledger["dropped"]) == (1, {"stale": 1})  # type: ignore[index]
    with SampleReceiver(out=tmp_path / "trainer", config=config) as receiver:
        receiver.load_state_dict(before)
    code, found = audited(tmp_path)
    assert code == 0
    ledger = found["ledger"]
    assert (ledger["dropped"], ledger["leased_or_queued"]) == ({}, 2)  # type: ignore[index]
    with SampleReceiver(out=tmp_path / "trainer") as receiver:
        for _ in range(2):
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
    code, found = audited(tmp_path)
    ledger = found["ledger"]
    assert (code, ledger["committed"], ledger["dropped"]) == (0, 2, {})  # type: ignore[index]


# -- inspect


def test_every_golden_vector_is_readable_or_says_what_is_wrong(command: Command) -> None:
    folder = Path(__file__).parent / "vectors"
    index = json.loads((folder / "index.json").read_text())
    whole = {name: entry for name, entry in index["bundles"].items() if not any(entry["errors"])}
    for name, entry in (index["messages"] | index["data"] | whole).items():
        code, out = command("inspect", folder / entry["frames"][0])
        assert (code, "DAMAGED" in out) == (0, False), name
        assert "head of" in out.splitlines()[0]
    for name, entry in index["hostile"].items():
        if entry["frames"] and not entry["after"] and name != "too-large":
            code, out = command("inspect", folder / entry["frames"][0], "--json")
            assert code == 1, name
            assert json.loads(out)["fault"].startswith(entry["error"]), (name, out)
    code, out = command("inspect", folder / "bundle-with-strangers.0.bin")
    assert code == 1
    assert out.splitlines()[-1] == "DAMAGED 7 of its 9 messages"


def test_a_record_is_shown_whole(run_folder: Path, command: Command) -> None:
    code, out = command("inspect", run_folder / "trainer", "--limit", 3)
    assert code == 0
    assert out.count("record ") == 3
    assert "(4 more records: --limit)" in out
    code, out = command("inspect", run_folder / "trainer", "--record", 2)
    assert code == 0
    first = " ".join(str(token) for token in make_rollout(1, parts=2, tokens=8)[1].token_ids.tolist())
    for wanted in (f"rollout_id: {1:032x}", "task_id: task-1", "array 1/token_ids", f"token_ids: {first}"):
        assert wanted in out, wanted
    code, out = command("inspect", run_folder / "trainer" / "dead_letters.sqlite")
    assert code == 0
    assert "nacked (1 times): it is no good" in out
    assert f"rollout {4:032x}" in out


def test_a_damaged_record_is_shown_with_its_place(tmp_path: Path, command: Command) -> None:
    with SampleReceiver(out=tmp_path) as receiver, SampleSender(receiver.address) as sender:
        for n in range(3):
            sender.send(make_sample(n))
        for _ in range(3):
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
    (path,) = segment_paths(tmp_path / "samples")
    raw = bytearray(path.read_bytes())
    segment, _ = Segment.scan(path, verify=True)
    raw[segment.offsets[1] + 50] ^= 1
    path.write_bytes(raw)
    code, out = command("inspect", path)
    assert code == 1
    assert f"record 2 at byte {segment.offsets[1]}: hash" in out


@pytest.mark.parametrize(
    "argv", [("inspect", "x.txt"), ("inspect", "gone"), ("audit", "gone"), ("inspect", ".")]
)
def test_bad_input_is_one_line(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("hello")
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "trainer-bridge" in said.err


def test_a_record_that_is_not_there(run_folder: Path, command: Command) -> None:
    with pytest.raises(SpoolError, match="no readable record 99"):
        main(["inspect", str(run_folder), "--record", "99", "--debug"])
