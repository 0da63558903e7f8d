"""Keys, the allow-list, and what one misbehaving peer may cost."""

from __future__ import annotations

import ast
import json
import pickle
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trainer_bridge
import zmq
from trainer_bridge import (
    AddressError,
    AuthError,
    ConfigError,
    CurveKeys,
    ReceiverConfig,
    RefusedError,
    SampleObserver,
    SampleReceiver,
    SampleSender,
)
from trainer_bridge.address import absence_hint
from trainer_bridge.cli import main
from trainer_bridge.errors import ErrorCode
from trainer_bridge.guard import Guard
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.keys import SecretKey, write_keys
from trainer_bridge.messages import Error, Hello
from trainer_bridge.session.handshake import SCHEMAS
from trainer_bridge.testing import make_sample
from trainer_bridge.zmq_auth import new_keypair

SOURCE = Path(trainer_bridge.__file__).parent


class Keyring:
    """Key files as `keygen` writes them: a receiver's, its allow-list, workers' and an observer's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("receiver", "worker", "other", "laptop", "stranger"):
            write_keys(root, name, *new_keypair())
        allowed = root / "allowed"
        (allowed / "observers").mkdir(parents=True)
        for name, place in (("worker", ""), ("other", ""), ("laptop", "observers")):
            (allowed / place / f"{name}.pub").write_bytes((root / f"{name}.pub").read_bytes())

    def receiver(self) -> CurveKeys:
        return CurveKeys.load(self.root / "receiver.secret", peers=self.root / "allowed")

    def of(self, name: str, *, peer: str = "receiver") -> CurveKeys:
        return CurveKeys.load(self.root / f"{name}.secret", peers=self.root / f"{peer}.pub")


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


def test_the_right_keys_carry_samples_and_a_look(keyring: Keyring) -> None:
    with (
        SampleReceiver(keys=keyring.receiver()) as receiver,
        SampleSender(receiver.address, keys=keyring.of("worker")) as sender,
        SampleObserver(receiver.address, keys=keyring.of("laptop")) as observer,
    ):
        sender.send(make_sample(1, tokens=20_000))
        seen = observer.next(40.0)
        lease = receiver.next(40.0)
        assert seen is not None
        assert lease is not None
        assert seen.samples[0].rollout_id == lease.rollout_id == f"{1:032x}"
        lease.commit()


TurnedAway = Callable[[Callable[[float], object]], AuthError]


def test_who_is_not_in_the_allow_list_is_told_in_time(keyring: Keyring, turned_away: TurnedAway) -> None:
    stranger = keyring.of("stranger")
    with SampleReceiver(keys=keyring.receiver()) as receiver:
        address = receiver.address
        said = str(turned_away(lambda s: SampleSender(address, keys=stranger, connect_timeout_s=s)))
        assert re.search(r"does not know this end's public key: add it to .*allow-list", said)
        said = str(turned_away(lambda s: SampleSender(address, connect_timeout_s=s)))
        assert "the receiver wants keys" in said
        said = str(turned_away(lambda s: SampleObserver(address, keys=stranger, connect_timeout_s=s)))
        assert "allow-list" in said
        assert receiver.stats().producers == ()


def test_a_receiver_with_another_key_or_none_is_not_talked_to(
    keyring: Keyring, turned_away: TurnedAway
) -> None:
    for receiver_keys, peer, words in (
        (keyring.receiver(), "other", "has another key"),
        (None, "receiver", "or has no keys at all"),
    ):
        with SampleReceiver(keys=receiver_keys) as receiver:
            address, keys = receiver.address, keyring.of("worker", peer=peer)
            said = turned_away(
                lambda s, address=address, keys=keys: SampleSender(address, keys=keys, connect_timeout_s=s)
            )
            assert words in str(said)


def test_nothing_readable_is_on_the_wire_and_plain_bytes_get_nowhere(keyring: Keyring) -> None:
    """sgl-project/sglang PR #21435: whoever reached the port could speak."""
    with SampleReceiver(keys=keyring.receiver()) as receiver:
        host, port = receiver.address.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5.0) as raw:
            raw.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL".ljust(64, b"\x00"))
            while raw.recv(4096):
                pass  # the receiver hangs up
        with SampleSender(receiver.address, keys=keyring.of("worker")) as sender:
            sender.send(make_sample(1))
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()


def test_a_key_cannot_speak_for_the_producer_of_another(
    keyring: Keyring, tmp_path: Path, wait: Callable[..., None]
) -> None:
    spool = tmp_path / "spool"
    with SampleReceiver(keys=keyring.receiver()) as receiver:
        with SampleSender(receiver.address, keys=keyring.of("worker"), spool=spool) as sender:
            sender.send(make_sample(1))
            lease = receiver.next(40.0)
            assert lease is not None
            lease.commit()
        with SampleSender(receiver.address, keys=keyring.of("other"), spool=spool) as thief:
            wait(lambda: "belongs to key worker, not other" in thief.stats().last_error)
            with pytest.raises(RefusedError, match="belongs to key worker"):
                thief.send(make_sample(2))
        assert receiver.stats().rejected == {"wrong_key": 1}


def raw_dealer(address: str) -> tuple[zmq.Context, zmq.Socket]:  # type: ignore[type-arg]
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, 10_000)
    dealer.connect(address)
    return context, dealer


def test_a_peer_that_keeps_sending_noise_is_quarantined_and_the_others_are_not(
    wait: Callable[..., None],
) -> None:
    config = ReceiverConfig(malformed_limit=5)
    with SampleReceiver(config=config) as receiver, SampleSender(receiver.address) as sender:
        context, dealer = raw_dealer(receiver.address)
        for _ in range(20):
            dealer.send(b"noise")
        codes = [answer.code for _ in range(6) if isinstance(answer := decode_head(dealer.recv()), Error)]
        assert codes == [ErrorCode.SHORT_HEAD] * 5 + [ErrorCode.QUARANTINED]
        sender.send(make_sample(1))
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
        wait(lambda: receiver.stats().unread == 15)
        stats = receiver.stats()
        assert (stats.quarantines, stats.rejected) == (1, {"short_head": 5, "quarantined": 1})
        dealer.close(0)
        context.term()


def test_chatter_is_read_at_a_bounded_rate(wait: Callable[..., None]) -> None:
    hello = Hello(1, "observer", b"o" * 16, "chatterbox", 0, 0, SCHEMAS)
    with SampleReceiver(config=ReceiverConfig(messages_per_s=10)) as receiver:
        context, dealer = raw_dealer(receiver.address)
        for n in range(500):
            dealer.send(encode_head(msgspec.structs.replace(hello, session=n + 1)))
        wait(lambda: receiver.stats().unread > 400)
        assert receiver.stats().observers == 1
        dealer.close(0)
        context.term()


def test_a_guard_forgives_with_time_and_new_samples_cost_nothing() -> None:
    guard = Guard(ReceiverConfig(messages_per_s=2, malformed_limit=2, quarantine_s=60.0))
    assert all(guard.admits(b"a", "", 0.0) for _ in range(1000))
    for _ in range(2):
        guard.charge(b"a", 0.0)
    assert not guard.admits(b"a", "", 0.0)
    assert guard.admits(b"b", "", 0.0)
    assert guard.admits(b"a", "", 1.0)
    # One malformed message now and then is a flipped bit, not an attack.
    assert [guard.malformed(b"a", "", t) for t in (1.0, 100.0, 200.0, 201.0)] == [False] * 3 + [True]
    assert not guard.admits(b"a", "", 260.0)
    assert guard.admits(b"a", "", 261.0)
    # A key is one peer, however often it connects.
    assert [guard.malformed(n, "worker", 0.0) for n in (b"1", b"2")] == [False, True]


def test_keygen_writes_a_private_and_a_shared_file_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "worker-7"
    assert main(["keygen", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    paths = [Path(said["public"]), Path(said["secret"])]
    assert [p.name for p in paths] == ["worker-7.pub", "worker-7.secret"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in paths] == [0o644, 0o600]
    before = [p.read_bytes() for p in paths]
    assert main(["keygen", str(folder)]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert [p.read_bytes() for p in paths] == before
    assert b"secret-key" not in before[0]
    # The files are pyzmq's certificates.
    import zmq.auth

    public, secret = zmq.auth.load_certificate(paths[1])
    keys = CurveKeys.load(paths[1], peers=paths[0])
    assert (keys.public, keys.secret.reveal()) == (public.decode(), (secret or b"").decode())
    paths[1].chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
        CurveKeys.load(paths[1], peers=paths[0])


def test_a_secret_is_neither_printed_nor_encoded(keyring: Keyring) -> None:
    keys = keyring.of("worker")
    secret = keys.secret.reveal()
    assert "***" in repr(keys)
    assert secret not in repr(keys) + str(keys) + f"{keys.secret}"
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError):
            encode(keys)
    with pytest.raises(TypeError, match="not copied or written"):
        pickle.dumps(keys)


def test_wrong_key_files_are_named(keyring: Keyring) -> None:
    root = keyring.root
    with pytest.raises(ConfigError, match=r"worker\.pub.*can be read|has no secret-key"):
        CurveKeys.load(root / "worker.pub", peers=root / "receiver.pub")
    with pytest.raises(ConfigError, match=r"cannot read the key .*nobody\.secret"):
        CurveKeys.load(root / "nobody.secret", peers=root / "receiver.pub")
    (root / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no \.pub files"):
        CurveKeys.load(root / "worker.secret", peers=root / "empty")
    with pytest.raises(ConfigError, match="not a CURVE key"):
        CurveKeys(public="short", secret=SecretKey("short"), peers={"x": "short"})
    with pytest.raises(ConfigError, match="needs one peer"):
        SampleSender("tcp://127.0.0.1:9", keys=keyring.receiver())
    with pytest.raises(ConfigError, match="letters, digits"):
        write_keys(root, "../escape", *new_keypair())


def test_keys_open_other_machines_and_the_command_line(
    keyring: Keyring, capsys: pytest.CaptureFixture[str]
) -> None:
    with SampleReceiver("tcp://0.0.0.0:0", keys=keyring.receiver()) as receiver:
        port = receiver.address.rsplit(":", 1)[1]
        with pytest.raises(AddressError, match=r"'0\.0\.0\.0' can be bound, not connected to"):
            SampleSender(receiver.address, keys=keyring.of("worker"))
        key, peer = str(keyring.root / "laptop.secret"), str(keyring.root / "receiver.pub")
        here = f"tcp://127.0.0.1:{port}"
        assert main(["tail", here, "--count", "0", "--key", key, "--peer", peer]) == 0
        assert main(["tail", here, "--count", "0", "--key", key]) == 2
        assert "--key and --peer belong together" in capsys.readouterr().err


def test_a_host_that_cannot_be_found_is_named() -> None:
    """PrimeIntellect-ai/prime-rl PR #3149."""
    assert "'nowhere.invalid' cannot be resolved" in absence_hint("tcp://nowhere.invalid:5557")
    assert "this very machine" in absence_hint("tcp://localhost:5557")
    assert "/none/here does not exist" in absence_hint("ipc:///none/here")


def test_no_source_file_can_run_what_it_reads() -> None:
    """CVE-2026-3059, CVE-2026-3060: pickle behind a socket. No pickle, no eval, no object arrays."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert name not in {"eval", "exec", "compile_command", "__import__", "loads_pickle"}, path
            if isinstance(node, ast.Attribute):
                assert node.attr not in {"send_pyobj", "recv_pyobj"}, path
            if isinstance(node, ast.keyword):
                assert node.arg not in {"allow_pickle"}, path
