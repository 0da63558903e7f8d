"""Pacing of starts and breakers of images: state machines in a time of their own, then on a fake cluster."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sandbox_k8s import Sandbox, SandboxClient, SandboxSpec, SandboxStartError
from sandbox_k8s.kubernetes.breaker import ImageBreakers
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.diagnosis import Diagnosis, diagnose
from sandbox_k8s.kubernetes.pacing import Pacer, Turn
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, RefusalError

NOT_FOUND = diagnose("image_not_found", "no such tag")
LIMITED = diagnose("image_rate_limit", "toomanyrequests", final=True)


class PacedStarts(RuleBasedStateMachine):
    """Starts that come, go ahead, end and are given up in any order, while the cluster complains."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pacer = Pacer(first=4, most=12)
        self.waiting: list[Turn] = []
        self.flying: list[Turn] = []

    @rule(count=st.integers(1, 8))
    def ask(self, count: int) -> None:
        self.waiting += [self.pacer.ask() for _ in range(count)]

    @rule(most=st.integers(1, 20))
    def admit(self, most: int) -> None:
        free = int(self.pacer.limit) - len(self.flying)
        let_in = self.pacer.admit(self.now_s, most)
        paused = self.now_s < self.pacer.paused_until_s
        assert len(let_in) == (0 if paused else max(0, min(most, free, len(self.waiting))))
        assert let_in == self.waiting[: len(let_in)], "first come, first served"
        del self.waiting[: len(let_in)]
        self.flying += let_in

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        turn = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        before = self.pacer.limit
        if well:
            self.pacer.succeeded(turn)
            assert before <= self.pacer.limit <= before + 1
        self.pacer.give_back(turn)
        self.pacer.give_back(turn)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.pacer.give_back(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @rule(age_s=st.floats(0, 5), asked_s=st.none() | st.floats(0, 5))
    def complain(self, age_s: float, asked_s: float | None) -> None:
        before = self.pacer.limit
        halved = self.pacer.overloaded(self.now_s - age_s, self.now_s, asked_s)
        assert self.pacer.limit == (max(1.0, before / 2) if halved else before)
        if halved:
            assert not self.pacer.overloaded(self.now_s - 0.001, self.now_s), "one burst halves once"

    @rule(seconds=st.floats(0.001, 30))
    def answer(self, seconds: float) -> None:
        self.pacer.answered(seconds, self.now_s)

    @rule(seconds=st.floats(0.01, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def figures_are_true(self) -> None:
        assert 1 <= self.pacer.limit <= 12
        assert (self.pacer.in_flight, self.pacer.waiting) == (len(self.flying), len(self.waiting))

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if self.waiting and not self.flying:
            wake_s = self.pacer.wake_s()
            assert wake_s is not None
            assert wake_s <= max(self.now_s + 5, self.pacer.paused_until_s)


TestPacedStarts = PacedStarts.TestCase
TestPacedStarts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def round_of(pacer: Pacer, now_s: float, *, well: bool = True) -> int:
    """As many starts as may go ahead, while more wait; all end together."""
    waiting = [pacer.ask() for _ in range(500)]
    flying = pacer.admit(now_s, 500)
    for turn in flying:
        if well:
            pacer.succeeded(turn)
        else:
            pacer.overloaded(now_s, now_s + 1)
    for turn in (*flying, *waiting):
        pacer.give_back(turn)
    return len(flying)


def test_the_limit_doubles_until_it_is_too_much_then_grows_by_one() -> None:
    pacer = Pacer(first=4, most=100)
    assert [round_of(pacer, now_s) for now_s in (0, 1, 2)] == [4, 8, 16]
    assert round_of(pacer, 3, well=False) == 32
    assert pacer.slowdowns == 1, "32 complaints of one round are one sign"
    # What grows by a 16th for each of 16 is a little short of one.
    assert [round_of(pacer, now_s) for now_s in (5, 6, 7)] == [16, 16, 17]


def test_a_server_that_asks_to_wait_is_obeyed_also_by_those_that_come_later() -> None:
    pacer = Pacer(first=4, most=8)
    pacer.overloaded(0, 0, retry_after_s=7)
    pacer.overloaded(0, 1, retry_after_s=2)
    pacer.ask()
    assert pacer.admit(6.9, 9) == []
    assert pacer.wake_s() == 7
    assert len(pacer.admit(7, 9)) == 1


def test_a_server_that_asks_for_a_day_is_asked_again_after_a_minute() -> None:
    pacer = Pacer(first=4, most=8)
    pacer.overloaded(0, 0, retry_after_s=86400)
    pacer.ask()
    assert pacer.wake_s() == 60
    assert len(pacer.admit(60, 9)) == 1


def test_an_api_server_that_becomes_slow_slows_starts_down() -> None:
    pacer = Pacer(first=64, most=64)
    assert not any(pacer.answered(0.02, now_s) for now_s in range(50))
    assert not pacer.answered(5.0, 51), "one slow answer is none"
    assert [pacer.answered(5.0, 60 + now_s) for now_s in range(3)].count(True) == 1
    assert pacer.limit == 32


@given(st.lists(st.sampled_from(["found", "missing", "cancelled", "other"]), max_size=40))
def test_a_breaker_opens_after_so_many_in_a_row_and_lets_one_find_out(outcomes: list[str]) -> None:
    breakers = ImageBreakers(after=3, open_s=10, rate_limit_s=5)
    now_s, row, opened = 0.0, 0, False
    for outcome in outcomes:
        now_s += 1
        if opened:
            assert breakers.begin("i", now_s) == NOT_FOUND
            now_s += 10
        assert breakers.begin("i", now_s) is None
        assert (breakers.begin("i", now_s) is not None) == opened, "half open: only one finds out"
        assert breakers.refusal("another", now_s) is None
        if outcome == "missing":
            breakers.failed("i", NOT_FOUND, now_s)
            row += 1
            opened = opened or row >= 3
        elif outcome == "found":
            breakers.succeeded("i")
            row, opened = 0, False
        elif outcome == "other":
            assert not breakers.failed("i", diagnose("node_lost", "gone"), now_s)
        else:
            breakers.unknown("i")
        if opened and outcome in ("cancelled", "other"):
            breakers.failed("i", NOT_FOUND, now_s)
            row += 1


@pytest.mark.parametrize(("advised_s", "lasts_s"), [(None, 5), (30.0, 30)])
def test_a_rate_limit_opens_at_once_for_as_long_as_was_advised(
    advised_s: float | None, lasts_s: float
) -> None:
    breakers = ImageBreakers(after=3, open_s=300, rate_limit_s=5)
    found = Diagnosis(state="failed", failure="image_rate_limit", why=LIMITED.why, retry_after_s=advised_s)
    assert breakers.failed("i", found, 100)
    assert breakers.opens_s("i", 100) == lasts_s
    assert breakers.refusal("i", 99.9 + lasts_s) == found
    assert breakers.refusal("i", 100 + lasts_s) is None


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    with FakeCluster(FakeClusterConfig(speed=50)) as cluster:
        yield cluster


def config_of(cluster: FakeCluster, tmp_path: Path, **more: float) -> KubernetesConfig:
    return KubernetesConfig(
        injection=Injection(kind="baked"),
        kubeconfig=cluster.kubeconfig,
        run_key_file=tmp_path / "run.key",
        image="example.com/any:1",
        data_path="api_proxy",
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.anyio
async def test_an_image_that_is_missing_is_asked_for_three_times_only(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """daytonaio/daytona#3289: a warm pool recreated failing sandboxes for ever."""
    for _ in range(3):
        cluster.doom("image-not-found")
    config = config_of(cluster, tmp_path, start_concurrency=1, start_concurrency_max=1)
    async with SandboxClient.kubernetes(config) as client:
        results: list[SandboxStartError] = []

        async def start() -> None:
            with pytest.raises(SandboxStartError) as failed:
                await client.start(SandboxSpec(image="example.com/missing:1"))
            results.append(failed.value)

        async with anyio.create_task_group() as tasks:  # all of them are in the queue before the first fails
            for _ in range(20):
                tasks.start_soon(start)
        diagnoses = [one.diagnosis for one in results]
        assert {one.failure for one in diagnoses if one is not None} == {"image_not_found"}
        assert cluster.requests["POST pods"] == 3
        assert (client.stats.breakers_opened, client.stats.breaker_refusals) == (1, 17)
        assert "not tried again for" in str(results[-1])
        async with await client.start():
            pass  # another image is not concerned
    assert [one.message for one in caplog.records if "no start of it" in one.message] == [
        "image example.com/missing:1: image_not_found: no start of it for 300 s"
    ]


@pytest.mark.anyio
async def test_what_failing_starts_wait_for_is_logged_once_while_they_wait(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two minutes of silence although the first event had told the cause."""
    config = config_of(cluster, tmp_path, failing_timeout_s=0.3)
    for _ in range(3):
        cluster.doom("image-registry-refused")
    async with SandboxClient.kubernetes(config) as client:
        assert not any(isinstance(one, Sandbox) for one in await client.start_many([SandboxSpec()] * 3))
        cluster.doom("image-registry-refused")
        (found,) = await client.prefetch(["example.com/b:1"], ["node-1"])
        assert found.diagnosis is not None
    said = [one.message for one in caplog.records if "is given up after 0 s of it" in one.message]
    assert [one.partition(" is failing")[0] for one in said] == [
        "a start",
        "image example.com/b:1 on node node-1",
    ]
    assert all("image_registry_unreachable: container " in one for one in said)


@pytest.mark.anyio
async def test_an_overloaded_api_server_halves_the_starts_and_is_left_alone(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    busy = RefusalError(429, "TooManyRequests", "too many requests", retry_after_s=1)
    cluster.refuse_creates(busy)
    config = config_of(cluster, tmp_path, start_concurrency=8)
    async with SandboxClient.kubernetes(config) as client:
        begun_s = anyio.current_time()
        results = await client.start_many([SandboxSpec()] * 12)
        assert all(not isinstance(one, Exception) for one in results)
        assert anyio.current_time() - begun_s >= 1
        stats = client.stats
        assert (stats.start_slowdowns, stats.starts_in_flight, stats.starts_waiting) == (1, 0, 0)
        assert 4 <= stats.start_limit < 8


@pytest.mark.anyio
async def test_starts_that_are_given_up_leave_the_queue(cluster: FakeCluster, tmp_path: Path) -> None:
    config = config_of(cluster, tmp_path, start_concurrency=1, start_concurrency_max=1)
    async with SandboxClient.kubernetes(config) as client:
        cluster.cordon()
        with anyio.move_on_after(0.3):
            await client.start_many([SandboxSpec()] * 9)
        assert (client.stats.starts_in_flight, client.stats.starts_waiting) == (0, 0)
        assert cluster.requests["POST pods"] == 1
        cluster.cordon(back=True)
        await (await client.start()).stop()
