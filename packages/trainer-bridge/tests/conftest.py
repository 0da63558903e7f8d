from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer_bridge.config import ReceiverConfig, SenderConfig, Timing

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

    def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        changed = threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            changed.wait(0.01)
        raise AssertionError("it did not happen in time")

    return until
