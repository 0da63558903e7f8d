from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from trainer_bridge import SampleReceiver
from trainer_bridge.codec import draft
from trainer_bridge.config import ReceiverConfig, SenderConfig, Timing
from trainer_bridge.errors import AuthError, ConnectError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.memory_transport import MemoryClient
from trainer_bridge.messages import Ack, Hello, Message
from trainer_bridge.payload import Buffer
from trainer_bridge.session.handshake import FEATURES, SCHEMAS
from trainer_bridge.testing import VirtualNetwork, make_sample
from trainer_bridge.testing.virtual import VirtualServer

QUICK = Timing(heartbeat_s=0.05, peer_timeout_s=5.0, greet_again_s=0.2, resend_s=1.0)


@pytest.fixture
def timing() -> Timing:
    """Heartbeats fast enough for tests, timeouts long enough for a loaded machine."""
    return QUICK


@pytest.fixture
def sender_config() -> Callable[..., SenderConfig]:
    return lambda **changes: SenderConfig(**{"timing": QUICK, **changes})


@pytest.fixture
def receiver_config() -> Callable[..., ReceiverConfig]:
    return lambda **changes: ReceiverConfig(**{"timing": QUICK, **changes})


@pytest.fixture
def programs() -> Path:
    """Folder of the small programs that tests run as processes of their own."""
    return Path(__file__).parent / "programs"


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that costs no disk flushes, where the system has such: for many short lives of a spool."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def wait() -> Callable[..., None]:
    """Wait until something holds; fails after `timeout_s`."""

    def until(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
        changed = threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            changed.wait(0.01)
        raise AssertionError("it did not happen in time")

    return until


@pytest.fixture
def turned_away() -> Callable[[Callable[[float], object]], AuthError]:
    """Connect with a deadline that grows until the refusal was here before it: a loaded machine is slow."""

    def connect(opened: Callable[[float], object]) -> AuthError:
        for deadline_s in (0.2, 2.0, 20.0):
            try:
                opened(deadline_s)
            except AuthError as refusal:
                return refusal
            except ConnectError:
                continue
            raise AssertionError("it was let in")
        raise AssertionError("it was not told why")

    return connect


LOUD = ReceiverConfig(malformed_limit=1 << 30, messages_per_s=1 << 30)
"""Nothing is left unread: everything must be withstood."""


class Scene(NamedTuple):
    """A receiver in virtual time, and raw connections to it."""

    network: VirtualNetwork
    server: VirtualServer
    receiver: SampleReceiver

    def say(self, client: MemoryClient, *messages: Message | Sequence[Buffer]) -> None:
        """Put messages on a connection, and let the receiver answer."""
        for message in messages:
            client.send((encode_head(message),) if isinstance(message, msgspec.Struct) else message)
        self.network.run(0.01)

    def heard(self, client: MemoryClient) -> list[Message]:
        """What it was told since; DATA as its head."""
        events = client.events(1 << 20)
        return [decode_head(event.frames[0]) for event in events if event.kind == "message"]

    def serves(self, number: int) -> None:
        """Whether another sender still gets its rollout through."""
        peer = number.to_bytes(16, "big")
        client = MemoryClient(self.server)
        frames = draft([make_sample(number, tokens=8)]).numbered(peer, 1, 1, 0)
        greeting = Hello(1, "producer", peer, "good", 0, 0, SCHEMAS, FEATURES, 1, ((1, 1),))
        self.say(client, greeting, frames)
        found: list[str] = []
        while (lease := self.receiver.next(0.0)) is not None:
            found.append(lease.rollout_id)
            lease.commit()
        self.network.run(1.5)  # a heartbeat, with STATUS
        assert f"{number:032x}" in found
        acks = [message for message in self.heard(client) if isinstance(message, Ack)]
        assert acks[-1].levels[0].committed.upto == 1


@contextmanager
def open_scene(config: ReceiverConfig = LOUD) -> Iterator[Scene]:
    network = VirtualNetwork()
    server = network.server()
    receiver = SampleReceiver(transport=server, clock=network, config=config)
    try:
        yield Scene(network, server, receiver)
    finally:
        network.release()
        receiver.close()


@pytest.fixture(scope="session")
def scene() -> Callable[..., AbstractContextManager[Scene]]:
    """Opens a receiver in virtual time that can be spoken to with raw messages."""
    return open_scene
