"""The launcher's rules and its log, without any I/O; and its box, where they meet threads."""

import io
import threading
from pathlib import Path

import msgspec
import pytest
from sandbox_k8s import LogEntry, double_owners
from sandbox_k8s.launcher import body, tenure
from sandbox_k8s.launcher.box import Box, BoxSettings
from sandbox_k8s.launcher.clean import CleanState
from sandbox_k8s.launcher.clock import monotonic_s
from sandbox_k8s.launcher.execute import CutOffError
from sandbox_k8s.launcher.log import Log
from sandbox_k8s.launcher.ownership import FencedError, Ownership, StillRunningError
from sandbox_k8s.launcher.tenure import Caller


def entries(log: Log) -> tuple[LogEntry, ...]:
    return msgspec.convert(log.after(0), tuple[LogEntry, ...])


def test_a_fence_is_not_answered_while_something_of_an_older_owner_runs() -> None:
    """It was answered after 15 s whatever still ran."""
    own = Ownership(10.0, 0.0)
    own.fence(1, 0.0)
    operation = own.begin("command", 1, 0.0)
    number, older = own.fence(2, 1.0)
    assert older == [operation]
    with pytest.raises(StillRunningError, match="the first is line 2 of the log; epoch 2 is in force"):
        own.fenced(number, 2, 2.0)
    with pytest.raises(FencedError):
        own.end(operation, 3.0)
    own.fenced(number, 2, 4.0)
    assert [one.what for one in entries(own.log)] == ["fence", "command", "fence", "end", "fenced"]
    assert double_owners(entries(own.log)) == ()


def test_a_fence_that_a_higher_one_overtook_is_not_answered() -> None:
    own = Ownership(10.0, 0.0)
    number, _ = own.fence(1, 0.0)
    own.fence(2, 0.0)
    with pytest.raises(FencedError):
        own.fenced(number, 1, 1.0)


def test_a_command_without_a_time_out_holds_the_lease_of_a_client_without_heartbeats() -> None:
    """SWE-ReX's own client is silent while its command runs, and its sandbox ended under it."""
    own = Ownership(10.0, 0.0)
    operation = own.begin("command", None, 0.0, busy_s=None)
    assert own.left_s(1e6) is None
    assert not own.over(1e6)
    own.end(operation, 1e6)
    assert own.left_s(1e6) == 10.0
    held = own.begin("command", None, 1e6, busy_s=None)
    own.fence(1, 1e6)
    assert own.left_s(1e6) == 10.0, "what an owner finds running does not hold its lease"
    own.end(held, 1e6)


def test_the_keeper_is_told_when_such_a_command_begins_and_ends(tmp_path: Path) -> None:
    told: list[float | None] = []
    here = Box(BoxSettings({}, "/", tmp_path), Ownership(30.0, monotonic_s()), told=told.append)
    with here.operation("command", busy_s=None):
        assert told == [None]
    assert told[1] is not None
    assert told[1] > 29


def test_a_zombie_that_asks_again_and_again_pushes_nothing_out_of_the_log() -> None:
    log = Log(kept=5)
    for what, epoch, owner in (("fence", 2, 2), ("fenced", 2, 2), ("command", 1, 2)):
        log.add(0.0, what, epoch, owner)
    for number in range(10_000):
        log.refused(0.0, number % 2, 2)
    assert "began under owner 2" in double_owners(entries(log))[0]
    assert [(one.what, one.epoch, one.times) for one in entries(log)[3:]] == [
        ("refused", 0, 5000),
        ("refused", 1, 5000),
    ]
    log.add(0.0, "command", 2, 2)
    log.add(0.0, "command", 2, 2)
    for _ in range(4):
        log.add(0.0, "end", 2, 2)
    log.refused(1.0, 0, 2)
    assert entries(log)[-1].times == 1, "its first line is gone: another one"


def test_the_judge_says_what_it_has_not_seen() -> None:
    log = Log(kept=3)
    for _ in range(5):
        log.add(0.0, "lease", 1, 1)
    assert double_owners(entries(log)) == ("lines 1 to 2 are missing: nothing is proven of them",)
    first, last = entries(log)[0], entries(log)[2]
    assert double_owners([first, last])[1:] == ("lines 4 to 4 are missing: nothing is proven of them",)
    assert double_owners([]) == ()


def test_a_box_refuses_a_fence_and_lets_a_later_one_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure, "_OLDER_END_S", 0.05)
    here = Box(BoxSettings({}, "/", tmp_path), Ownership(None, 0.0))
    here.fence(1)
    begun, may_end = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def stuck() -> None:
        try:
            with here.operation("command", Caller(1)) as wake:
                begun.set()
                assert may_end.wait(10)
                here.remember(state, wake)
        except (CutOffError, FencedError) as problem:
            ended.append(problem)

    state = CleanState.__new__(CleanState)
    thread = threading.Thread(target=stuck)
    thread.start()
    assert begun.wait(10)
    with pytest.raises(StillRunningError):
        here.fence(2)
    with pytest.raises(FencedError), here.operation("command", Caller(1)):
        pass
    may_end.set()
    thread.join(10)
    assert here.fence(3) == 3
    assert here.clean is None, "an older owner's mark must not become its successor's"
    assert [type(one) for one in ended] == [FencedError]
    assert double_owners(msgspec.convert(here.log(), tuple[LogEntry, ...])) == ()


def test_without_descriptors_nothing_begins_that_would_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Box(BoxSettings({}, "/", tmp_path), Ownership(None, 0.0))
    here.fence(1)

    def none_left() -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as change:
        change.setattr("os.pipe", none_left)
        with pytest.raises(OSError, match="Too many"), here.operation("command", Caller(1)):
            pass
    assert here.fence(2) == 2


def test_a_body_that_is_too_large_is_refused_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command got the first 256 MiB of its standard input, and nobody was told."""
    monkeypatch.setattr(body, "LARGEST", 10)
    assert body.Body(io.BytesIO(b"x" * 10), 10, chunked=False).whole() == b"x" * 10
    two_chunks = b"6\r\nxxxxxx\r\n" * 2 + b"0\r\n\r\n"
    for sent, length, chunked in ((b"x" * 11, 11, False), (two_chunks, None, True)):
        with pytest.raises(body.BadRequestError, match="more than 10 bytes"):
            body.Body(io.BytesIO(sent), length, chunked).whole()
