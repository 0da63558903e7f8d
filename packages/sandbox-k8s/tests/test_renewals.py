"""Heartbeats and renewals of records in virtual time: what is owned lives on, whatever is slow or odd."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from sandbox_k8s import Sandbox
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.run_key import RunKey

from .virtual_network import quiet
from .virtual_time import run
from .virtual_workers import LEASE_S, RECORD_LASTS_S, SPEC, Worker, World, record_of

Play = Callable[[World, Worker], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    """Run a situation with one worker whose clock is right, and check that its sandboxes end as all do."""

    async def whole(situation: Play) -> None:
        async with anyio.create_task_group() as tasks:
            world = World(1, RunKey(tmp_path / "run.key"), tasks)
            worker = await world.worker()
            worker.clock.skew_s = 0.0
            await situation(world, worker)
            world.check()
            with quiet():
                await world.end()

    def start(situation: Play) -> None:
        run(whole(situation))

    return start


def left_s(world: World, worker: Worker, sandbox: Sandbox) -> float:
    pod = world.cluster.pod(f"sbx-{sandbox.id}")
    assert pod is not None
    return (record_of(pod).expires_ns - worker.clock.now_ns()) / 1e9


def heard(world: World, what: list[str]) -> None:
    """Note each request to the API server about one pod."""
    serve = world.cluster.serve

    def noting(request: Request, who: str) -> tuple[int, object]:
        if "/pods/" in request.path:
            what.append(request.method)
        return serve(request, who)

    world.cluster.serve = noting  # type: ignore[method-assign]


def test_one_silent_heartbeat_does_not_cost_the_next(play: Callable[[Play], None]) -> None:
    """A lost packet ended the sandbox while its owner lived: the wait for it came on top of the pause."""

    async def situation(world: World, one: Worker) -> None:
        sandbox = await one.start()
        begun_s = anyio.current_time()
        await anyio.sleep_until(begun_s + LEASE_S * 0.6)  # the first beat was at a third
        fate, one.network.fate = one.network.fate, lambda: "lost"  # type: ignore[method-assign]
        await anyio.sleep_until(begun_s + LEASE_S * 0.7)
        one.network.fate = fate  # type: ignore[method-assign]
        await anyio.sleep_until(begun_s + LEASE_S)
        launcher = world.cluster.launchers[f"sbx-{sandbox.id}"]
        assert one.client.stats.renewal_failures == 1
        left_s = launcher.ownership.left_s(world.cluster.now_s())
        assert left_s is not None
        assert left_s > LEASE_S / 2, "it was said again at once"
        await anyio.sleep(2 * LEASE_S)
        assert world.owners(sandbox.id) == [one]

    play(situation)


def test_slow_answers_do_not_stretch_the_beat(play: Callable[[Play], None]) -> None:
    async def situation(world: World, one: Worker) -> None:
        sandbox = await one.start()
        one.network.lag_s = LEASE_S / 16
        launcher = world.cluster.launchers[f"sbx-{sandbox.id}"]
        for _ in range(40):
            await anyio.sleep(LEASE_S / 7)
            left_s = launcher.ownership.left_s(world.cluster.now_s())
            assert left_s is not None
            assert left_s > LEASE_S / 2
        assert one.client.stats.renewal_failures == 0

    play(situation)


def test_a_launcher_that_is_away_for_most_of_a_lease_is_found_again(play: Callable[[Play], None]) -> None:
    async def situation(world: World, one: Worker) -> None:
        sandbox = await one.start()
        begun_s = anyio.current_time()
        launcher = world.cluster.launchers[f"sbx-{sandbox.id}"]
        answer = launcher.answer

        async def refused(*_: object) -> tuple[int, object]:
            raise ConnectionRefusedError("nobody listens")

        await anyio.sleep_until(begun_s + LEASE_S * 0.4)
        launcher.answer = refused  # type: ignore[method-assign]
        await anyio.sleep_until(begun_s + LEASE_S * 1.2)  # it was heard at a third
        launcher.answer = answer  # type: ignore[method-assign]
        await anyio.sleep(LEASE_S)
        assert world.owners(sandbox.id) == [one]

    play(situation)


def test_a_short_record_beside_long_ones_is_renewed_in_time(play: Callable[[Play], None]) -> None:
    """The one task slept by the lease that was there first; the reaper took what came later, alive."""

    async def situation(world: World, one: Worker) -> None:
        long = await one.client.start(msgspec.structs.replace(SPEC, lease_s=100 * LEASE_S))
        one.mine[long.id] = long
        await anyio.sleep(1.0)
        short = await one.start()
        for _ in range(40):
            await anyio.sleep(RECORD_LASTS_S / 10)
            await world.sweep()
        assert left_s(world, one, short) > RECORD_LASTS_S / 2
        await one.stop(long)

    play(situation)


def test_many_records_are_renewed_in_time_by_a_slow_api_server(play: Callable[[Play], None]) -> None:
    """One after the other, two requests each: a round took longer than a record lasts."""

    async def situation(world: World, one: Worker) -> None:
        sandboxes = [await one.start() for _ in range(40)]
        one.network.lag_s = 0.5
        for _ in range(30):
            await anyio.sleep(RECORD_LASTS_S / 10)
            assert min(left_s(world, one, sandbox) for sandbox in sandboxes) > RECORD_LASTS_S / 3
            await world.sweep()
        assert (one.client.stats.records_late, one.client.stats.renewal_failures) == (0, 0)
        assert len(world.cluster.pods) == 40
        one.network.lag_s = 0.0

    play(situation)


def test_a_renewal_is_one_request_and_those_that_end_first_come_first(play: Callable[[Play], None]) -> None:
    async def situation(world: World, one: Worker) -> None:
        asked: list[str] = []
        sandboxes = [await one.start() for _ in range(3)]
        owners = one.client._backend._owners  # type: ignore[attr-defined]
        for sandbox, left in zip(sandboxes, (11.0, 5.0, 8.0), strict=True):
            owners._expires_ns[sandbox.id] = one.clock.now_ns() + int(left * 1e9)
        renewed: list[str] = []
        serve = world.cluster.serve

        def noting(request: Request, who: str) -> tuple[int, object]:
            renewed.append(request.path.rpartition("/sbx-")[2])
            return serve(request, who)

        one.network.travel = anyio.lowlevel.checkpoint  # type: ignore[method-assign]
        world.cluster.serve = noting  # type: ignore[method-assign]
        heard(world, asked)
        await anyio.sleep(RECORD_LASTS_S / 5)
        assert renewed == [sandboxes[number].id for number in (1, 2, 0)]
        assert asked == ["PATCH"] * 3

    play(situation)


def test_a_pod_that_somebody_else_changed_is_read_before_it_is_renewed(play: Callable[[Play], None]) -> None:
    async def situation(world: World, one: Worker) -> None:
        sandbox = await one.start()
        asked: list[str] = []
        serve, cluster = world.cluster.serve, world.cluster

        def crossing(request: Request, who: str) -> tuple[int, object]:
            if request.method == "PATCH" and "GET" not in asked:
                pod = cluster.pod(f"sbx-{sandbox.id}")
                assert pod is not None
                pod["status"]["message"] = "the kubelet was here"
                cluster._save("MODIFIED", pod)
            return serve(request, who)

        world.cluster.serve = crossing  # type: ignore[method-assign]
        heard(world, asked)
        await anyio.sleep(left_s(world, one, sandbox) - RECORD_LASTS_S * 0.5)
        assert asked == ["PATCH", "GET", "PATCH"]
        assert left_s(world, one, sandbox) > RECORD_LASTS_S * 0.7

    play(situation)


def test_records_that_are_late_are_counted_and_told_of(
    play: Callable[[Play], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def situation(world: World, one: Worker) -> None:
        sandboxes = [await one.start() for _ in range(3)]
        least_s = min(left_s(world, one, sandbox) for sandbox in sandboxes)
        world.cluster.break_api(1000.0)
        await anyio.sleep(least_s - RECORD_LASTS_S / 3 - 1.0)
        assert one.client.stats.records_late == 0
        await anyio.sleep(RECORD_LASTS_S / 4)
        assert one.client.stats.records_late == 3
        assert one.client.stats.renewal_failures >= 3
        world.cluster.break_api(0.0)
        await anyio.sleep(RECORD_LASTS_S / 4)
        assert min(left_s(world, one, sandbox) for sandbox in sandboxes) > RECORD_LASTS_S * 0.6
        assert one.client.stats.records_late == 3

    with caplog.at_level(logging.WARNING, logger="sandbox_k8s"):
        play(situation)
    assert "less than a third is left of the records of" in caplog.text


@pytest.mark.parametrize("of", ["launcher", "API server"])
def test_an_odd_answer_to_a_renewal_does_not_end_the_client(play: Callable[[Play], None], of: str) -> None:
    """An error that nobody thought of, in the beat of one sandbox, stopped all of them."""

    async def situation(world: World, one: Worker) -> None:
        sandbox, other = await one.start(), await one.start()
        launcher, cluster = world.cluster.launchers[f"sbx-{sandbox.id}"], world.cluster
        answer, serve = launcher.answer, cluster.serve

        async def odd(path: str, *rest: object) -> tuple[int, object]:
            raise KeyError("odd")

        def spoiled(request: Request, who: str) -> tuple[int, object]:
            status, said = serve(request, who)
            return status, {"metadata": None} if sandbox.id in request.path else said

        if of == "launcher":
            launcher.answer = odd  # type: ignore[method-assign]
        pod = cluster.pod(f"sbx-{sandbox.id}")
        assert pod is not None
        if of == "API server":
            cluster._save("MODIFIED", pod | {"metadata": pod["metadata"] | {"annotations": {}}})
            cluster.serve = spoiled  # type: ignore[method-assign]
        stats = one.client.stats
        with quiet():
            while not stats.task_faults:
                await anyio.sleep(1.0)
                assert world.owners(sandbox.id) == [one]
        launcher.answer, cluster.serve = answer, serve  # type: ignore[method-assign]
        await anyio.sleep(2 * RECORD_LASTS_S)
        assert world.owners(other.id) == [one]
        assert stats.renewal_failures >= stats.task_faults
        if of == "API server":
            cluster._save("MODIFIED", pod)

    play(situation)
