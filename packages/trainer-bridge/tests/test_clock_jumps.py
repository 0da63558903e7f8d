"""Wall clocks are set, machines are suspended; samples do not care."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.clock import SystemClock
from trainer_bridge.testing import make_sample

HOUR_S = 3600


class JumpingClock(SystemClock):
    """The machine's clocks, moved by hand."""

    wall_s = 0
    monotonic_offset_s = 0.0

    def now_ns(self) -> int:
        return super().now_ns() + self.wall_s * 1_000_000_000

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.monotonic_offset_s


def take(receiver: SampleReceiver, count: int) -> list[int]:
    got: list[int] = []
    for _ in range(count):
        lease = receiver.next(40.0)
        assert lease is not None
        got.append(int(lease.rollout_id, 16))
        lease.commit()
    return got


def test_a_wall_clock_that_is_set_back_and_forth_changes_nothing(tmp_path: Path) -> None:
    clock = JumpingClock()
    with SampleReceiver(out=tmp_path / "store", clock=clock) as receiver:
        for run in range(3):
            with SampleSender(receiver.address, spool=tmp_path / "spool", clock=clock) as sender:
                for n in range(10):
                    clock.wall_s = (-1) ** n * HOUR_S
                    sender.send(make_sample(run * 10 + n))
                assert take(receiver, 10) == list(range(run * 10, run * 10 + 10))
                assert sender.wait_settled(40.0)
                assert sender.stats().epoch == run + 1


@pytest.mark.parametrize("spooled", [False, True])
def test_a_machine_that_slept_for_an_hour_goes_on(
    spooled: bool,
    tmp_path: Path,
    sender_config: Callable[..., SenderConfig],
    receiver_config: Callable[..., ReceiverConfig],
    wait: Callable[..., None],
) -> None:
    here, there = JumpingClock(), JumpingClock()
    with (
        SampleReceiver(config=receiver_config(), clock=there) as receiver,
        SampleSender(
            receiver.address, spool=tmp_path if spooled else None, config=sender_config(), clock=here
        ) as sender,
    ):
        wait(lambda: sender.stats().connected)
        for n in range(40):
            if n in (10, 20):
                # Whether a side takes the other for lost depends on what it just heard; nothing else may.
                (here if n == 10 else there).monotonic_offset_s += HOUR_S
            sender.send(make_sample(n), timeout_s=40.0)
        assert take(receiver, 40) == list(range(40))
        assert sender.wait_settled(40.0)
        assert receiver.stats().committed == 40
