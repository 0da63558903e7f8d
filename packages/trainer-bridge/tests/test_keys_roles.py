"""What a key is for: which ends may send, look on and take samples, and whose producers are whose."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trainer_bridge import (
    AuthError,
    ConfigError,
    CurveKeys,
    RankReceiver,
    ReceiverEvent,
    RefusedError,
    SampleObserver,
    SampleReceiver,
    SampleSender,
    SenderConfig,
    SpoolError,
    Timing,
)
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.keys import SecretKey, write_keys
from trainer_bridge.messages import Role
from trainer_bridge.owners import PRODUCERS_PER_KEY, Owners
from trainer_bridge.testing import make_rollout, make_sample
from trainer_bridge.zmq_auth import new_keypair

NAMES = ("receiver", "worker", "other", "laptop", "gpu-1", "all", "stranger")
ROLES: dict[str, tuple[Role, ...]] = {
    "laptop": ("observer",),
    "gpu-1": ("rank",),
    "all": ("producer", "observer", "rank"),
}
REFUSED = int(ErrorCode.ROLE_NOT_ALLOWED)


class Keyring:
    """Fresh keys of a receiver and of everyone else."""

    def __init__(self) -> None:
        self.pairs = {name: new_keypair() for name in NAMES}

    def receiver(self) -> CurveKeys:
        peers = {name: self.pairs[name][0] for name in NAMES if name not in ("receiver", "stranger")}
        return self._keys("receiver", peers, ROLES)

    def of(self, name: str) -> CurveKeys:
        return self._keys(name, {"receiver": self.pairs["receiver"][0]}, {})

    def _keys(self, name: str, peers: dict[str, str], roles: dict[str, tuple[Role, ...]]) -> CurveKeys:
        public, secret = self.pairs[name]
        return CurveKeys(public=public, secret=SecretKey(secret), peers=peers, roles=roles)

    def write(self, root: Path) -> None:
        """As files: `root/NAME.secret`, and the allow-list `root/allowed`."""
        for name, (public, secret) in self.pairs.items():
            write_keys(root, name, public, secret)
        for place, names in (
            ("", ("worker", "other", "all")),
            ("observers", ("laptop", "all")),
            ("ranks", ("gpu-1", "all")),
        ):
            (root / "allowed" / place).mkdir(parents=True, exist_ok=True)
            for name in names:
                (root / "allowed" / place / f"{name}.pub").write_bytes((root / f"{name}.pub").read_bytes())


@pytest.fixture(scope="module")
def keyring() -> Keyring:
    return Keyring()


def test_a_workers_key_sends_and_does_nothing_else(keyring: Keyring, timing: Timing) -> None:
    events: list[ReceiverEvent] = []
    with (
        SampleReceiver(keys=keyring.receiver(), on_event=events.append) as receiver,
        SampleSender(receiver.address, keys=keyring.of("worker")) as sender,
    ):
        sender.send(make_sample(1))
        with pytest.raises(
            RefusedError, match=r"key worker may connect as producer, not as rank.*ranks"
        ) as no:
            RankReceiver(receiver.address, rank=1, world=2, keys=keyring.of("worker"), timing=timing)
        with pytest.raises(RefusedError, match=r"not as observer.*folder observers") as neither:
            SampleObserver(receiver.address, keys=keyring.of("worker"))
        assert [no.value.code, neither.value.code] == [REFUSED, REFUSED]
        stats = receiver.stats()
        assert stats.rejected == {"role_not_allowed": 2}
        assert (stats.observers, stats.queued, stats.dropped) == (0, 1, {})
        assert receiver.dead_letters() == ()
        lease = receiver.next(40.0)
        assert lease is not None
        lease.commit()
    told = [event.text for event in events if event.kind == "rejected"]
    assert told[0].startswith("rank rank 1 was refused: role_not_allowed: key worker")
    assert len(told) == 2


def test_a_rank_takes_its_share_with_a_key_for_it_and_cannot_send(keyring: Keyring, timing: Timing) -> None:
    with (
        SampleReceiver(keys=keyring.receiver()) as receiver,
        SampleSender(receiver.address, keys=keyring.of("worker")) as sender,
        RankReceiver(receiver.address, rank=1, world=2, keys=keyring.of("gpu-1"), timing=timing) as rank,
        ThreadPoolExecutor(1) as thread,
    ):
        for n in range(2):
            sender.send_group(make_rollout(n, parts=1, group=n))
        theirs = thread.submit(rank.next_batch, groups=2, deadline_s=40.0)
        mine = receiver.next_batch(groups=2, world=2, deadline_s=40.0)
        lease = theirs.result(40.0)
        assert mine is not None
        assert lease is not None
        lease.commit()
        mine.commit()
        assert receiver.stats().committed == 2
        with pytest.raises(RefusedError, match="key gpu-1 may connect as rank, not as producer"):
            SampleSender(receiver.address, keys=keyring.of("gpu-1"))
        with pytest.raises(RefusedError, match="key laptop may connect as observer, not as rank"):
            RankReceiver(receiver.address, rank=1, world=2, keys=keyring.of("laptop"), timing=timing)
        # One key for everything, if the operator says so.
        with (
            SampleSender(receiver.address, keys=keyring.of("all")),
            SampleObserver(receiver.address, keys=keyring.of("all")),
        ):
            assert receiver.stats().observers == 1


def test_a_rank_with_a_key_that_is_not_known_is_told_so(keyring: Keyring, timing: Timing) -> None:
    with (
        SampleReceiver(keys=keyring.receiver()) as receiver,
        pytest.raises(AuthError, match=r"rank 1 at .*allow-list"),
    ):
        RankReceiver(
            receiver.address,
            rank=1,
            world=2,
            keys=keyring.of("stranger"),
            timing=timing,
            connect_timeout_s=0.4,
        )


def test_the_place_of_a_file_says_what_the_key_is_for(keyring: Keyring, tmp_path: Path) -> None:
    keyring.write(tmp_path)
    secret, allowed = tmp_path / "receiver.secret", tmp_path / "allowed"
    loaded = CurveKeys.load(secret, peers=allowed)
    wanted = keyring.receiver()
    assert dict(loaded.peers) == dict(wanted.peers)
    for name in (*wanted.peers, "stranger"):
        assert loaded.roles_of(name) == wanted.roles_of(name), name
    assert (loaded.roles_of("worker"), loaded.roles_of("stranger")) == (("producer",), ())
    # As Kubernetes mounts a secret: the same files once more, in a folder of its own.
    (allowed / "..data").mkdir()
    (allowed / "..data" / "twice.pub").write_bytes((allowed / "worker.pub").read_bytes())
    assert dict(CurveKeys.load(secret, peers=allowed).peers) == dict(wanted.peers)

    (allowed / "rank").mkdir()
    (allowed / "rank" / "gpu-2.pub").write_bytes((tmp_path / "stranger.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"allowed/rank holds keys and is no role.*observers or ranks"):
        CurveKeys.load(secret, peers=allowed)
    (allowed / "rank" / "gpu-2.pub").unlink()
    (allowed / "ranks" / "worker.pub").write_bytes((tmp_path / "stranger.pub").read_bytes())
    with pytest.raises(ConfigError, match="worker has another public key elsewhere"):
        CurveKeys.load(secret, peers=allowed)
    (allowed / "ranks" / "worker.pub").rename(allowed / "ranks" / "twin.pub")
    (allowed / "ranks" / "twin.pub").write_bytes((tmp_path / "worker.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"(worker and twin|twin and worker) have the same public key"):
        CurveKeys.load(secret, peers=allowed)


def test_roles_that_cannot_be_are_refused(keyring: Keyring) -> None:
    public, secret = keyring.pairs["receiver"]
    peers = {"worker": keyring.pairs["worker"][0]}
    for roles, why in [
        ({"nobody": ("rank",)}, "nobody, whose public key is not among the peers"),
        ({"worker": ()}, "roles of worker are one or more of producer, observer, rank"),
        ({"worker": ("admin",)}, "roles of worker are one or more"),
    ]:
        with pytest.raises(ConfigError, match=why):
            CurveKeys(public=public, secret=SecretKey(secret), peers=peers, roles=roles)  # type: ignore[arg-type]


# -- whose producers are whose


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: object) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "trainer_bridge", "receive", "--json", *map(str, args)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["address"]

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_key_keeps_its_producer_over_a_kill_of_the_receiver(
    keyring: Keyring, tmp_path: Path, running: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    """Whoever reached a restarted receiver first could once speak for any worker that was known to it."""
    keyring.write(tmp_path)
    out, spool = tmp_path / "run", tmp_path / "spool"
    receiver, address = running(
        "--out", out, "--key", tmp_path / "receiver.secret", "--allow", tmp_path / "allowed"
    )
    producer = arrives(address, keyring.of("worker"), spool, 1)
    receiver.send_signal(signal.SIGKILL)
    receiver.wait()
    kept = json.loads((out / "samples" / "owners.json").read_text())
    assert (kept["kind"], kept["version"], kept["keys"]) == (
        "trainer-bridge/owners",
        1,
        {"worker": [producer]},
    )

    with SampleReceiver(out=out, keys=keyring.receiver()) as again:
        with pytest.raises(RefusedError, match="belongs to key worker, not other") as no:
            arrives(again.address, keyring.of("other"), spool, 2)
        assert no.value.code == ErrorCode.WRONG_KEY
        assert arrives(again.address, keyring.of("worker"), spool, 3) == producer
    # Its key was taken out of the list: whoever replaces it goes on with its spool.
    keys = keyring.receiver()
    left = CurveKeys(public=keys.public, secret=keys.secret, peers={"other": keys.peers["other"]})
    with SampleReceiver(out=out, keys=left) as later:
        arrives(later.address, keyring.of("other"), spool, 4)
    assert list(json.loads((out / "samples" / "owners.json").read_text())["keys"]) == ["other"]


def arrives(address: str, keys: CurveKeys, spool: Path, number: int) -> str:
    """A sample of this spool, sent under a key; returns the producer id."""
    sender = SampleSender(address, keys=keys, spool=spool, config=SenderConfig(settle="stored"))
    try:
        sender.send(make_sample(number))
        if not sender.wait_settled(40.0):
            sender.send(make_sample(number))  # raises, and says why it was refused
        return sender.stats().producer
    finally:
        sender.close(drain_s=0.0)


def test_a_key_that_makes_up_producers_pushes_out_its_own_alone() -> None:
    news: list[int] = []
    owners = Owners(changed=lambda: news.append(1))
    ids = [n.to_bytes(16, "big") for n in range(PRODUCERS_PER_KEY + 2)]
    owners.claim(ids[0], "worker")
    for each in (*ids[1:-1], ids[1], ids[-1]):  # ids[1] says HELLO again: ids[2] is now the oldest
        owners.claim(each, "flood")
    owners.claim(ids[2], "worker")
    for taken in (ids[1], ids[-1]):
        with pytest.raises(ProtocolError, match="belongs to key flood, not worker"):
            owners.claim(taken, "worker")
    with pytest.raises(ProtocolError, match="belongs to key worker, not flood"):
        owners.claim(ids[0], "flood")
    assert len(news) == PRODUCERS_PER_KEY + 3

    written = owners.take_file()
    assert written is not None
    assert owners.take_file() is None
    again = Owners(written)
    with pytest.raises(ProtocolError, match="belongs to key worker"):
        again.claim(ids[0], "flood")
    again.keep_only({"flood"})
    again.claim(ids[0], "flood")
    assert {user: len(mine) for user, mine in written.keys.items()} == {
        "worker": 2,
        "flood": PRODUCERS_PER_KEY,
    }


def test_a_damaged_list_of_owners_is_not_taken_for_none(keyring: Keyring, tmp_path: Path) -> None:
    SampleReceiver(out=tmp_path, keys=keyring.receiver()).close()
    path = tmp_path / "samples" / "owners.json"
    path.write_text('{"kind": "trainer-bridge/owners", "version": 1, "keys": {"worker": ["xyz"]}}')
    with pytest.raises(SpoolError, match=r"cannot read .*owners\.json"):
        SampleReceiver(out=tmp_path, keys=keyring.receiver())


def test_a_key_that_is_turned_away_is_counted(
    keyring: Keyring, turned_away: Callable[[Callable[[float], object]], AuthError]
) -> None:
    """The log said so; no number did."""
    with SampleReceiver(keys=keyring.receiver()) as receiver:
        with SampleSender(receiver.address, keys=keyring.of("worker")):
            assert receiver.metrics()["connections_refused_total"] == 0
        address, keys = receiver.address, keyring.of("stranger")
        refusal = turned_away(lambda s: SampleSender(address, keys=keys, connect_timeout_s=s))
        assert "does not know this end's public key" in str(refusal)
        assert receiver.metrics()["connections_refused_total"] >= 1
        assert receiver.stats().connections_refused >= 1
