"""Owners, leases and the reaper, one situation at a time, in virtual time on the real rules."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest
from sandbox_k8s import (
    ClusterError,
    FencedError,
    LogEntry,
    Sandbox,
    SandboxLostError,
    SandboxNotFoundError,
    double_owners,
)
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.listing import Listing
from sandbox_k8s.kubernetes.reaper import CLOCK_SKEW_NS, reap
from sandbox_k8s.launcher import ownership
from sandbox_k8s.launcher.ownership import LeaseOverError, NotOwnerError, Ownership
from sandbox_k8s.run_key import RunKey

from .virtual_network import Network, VirtualApi, quiet
from .virtual_time import VirtualClock, run
from .virtual_workers import CONFIG, DETACHED_S, LEASE_S, SKEW_S, SPEC, Worker, World, record_of

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
Play = Callable[[World], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    """Run a situation, and check that its sandboxes end as all do."""

    async def whole(situation: Play) -> None:
        async with anyio.create_task_group() as tasks:
            world = World(1, RunKey(tmp_path / "run.key"), tasks)
            await situation(world)
            world.check()
            await world.end()

    def start(situation: Play) -> None:
        with quiet():
            run(whole(situation))

    return start


def api_of(world: World, skew_s: float = 0.0) -> VirtualApi:
    clock = VirtualClock(world.cluster.loop, world.chance, skew_s)
    return VirtualApi(world.cluster, Network(world.chance), CONFIG, clock, "reaper")


async def sweep(world: World, skew_s: float = 0.0) -> list[str]:
    """What a sweep removes whose clock is off by so much."""
    api = api_of(world, skew_s)
    now_ns = VirtualClock(world.cluster.loop, world.chance, skew_s).now_ns()
    return [one.why for one in await reap(api, CONFIG, now_ns, dry_run=False)]


async def pair(world: World, skew_s: float = 0.0) -> tuple[Worker, Worker, Sandbox]:
    one, two = await world.worker(), await world.worker()
    one.clock.skew_s = two.clock.skew_s = skew_s
    return one, two, await one.start()


def record(world: World, sandbox: Sandbox) -> records.PodRecord:
    pod = world.cluster.pod(f"sbx-{sandbox.id}")
    assert pod is not None
    return record_of(pod)


def test_a_detached_sandbox_is_owned_by_one_of_two_who_race(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        handle = await one.detach(sandbox)
        got: list[Worker] = []

        async def try_it(worker: Worker) -> None:
            try:
                await worker.attach(handle)
                got.append(worker)
            except FencedError:
                return

        async with anyio.create_task_group() as racing:
            racing.start_soon(try_it, one)
            racing.start_soon(try_it, two)
        assert len(got) == 1
        assert world.owners(sandbox.id) == got

    play(situation)


def test_a_reaper_leaves_the_skew_and_takes_what_is_over(play: Callable[[Play], None]) -> None:
    """The record is the reaper's only sign of a pod whose node is silent."""

    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world, -SKEW_S)
        world.cluster.loop.call_later(1.0, one.kill)
        await anyio.sleep(LEASE_S / 2)
        launcher = world.cluster.launchers[f"sbx-{sandbox.id}"]
        launcher.ownership.lease.change(None, world.cluster.now_s())  # nothing ends by itself here
        launcher.look()
        over_s = (
            record(world, sandbox).expires_ns - VirtualClock(world.cluster.loop, world.chance).now_ns()
        ) / 1e9
        await anyio.sleep(over_s + SKEW_S - 0.1)
        assert await sweep(world, skew_s=SKEW_S) == []
        await anyio.sleep(0.3)
        assert await sweep(world, skew_s=-SKEW_S) == []
        assert await sweep(world, skew_s=SKEW_S) == ["nobody renewed it, 0 s too long"]

    play(situation)


def test_a_renewal_saves_a_pod_from_a_sweep_that_has_already_seen_it_over(
    play: Callable[[Play], None],
) -> None:
    """The API server was away for longer than the record lasts: both come as soon as it is back."""

    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        due_s = (record(world, sandbox).expires_ns - one.clock.now_ns()) / 1e9
        world.cluster.break_api(due_s + 6.0)
        await anyio.sleep(due_s + 6.0)
        api = api_of(world)
        list_pods = api.list

        async def list_and_be_late(selector: str) -> Listing:
            found = await list_pods(selector)
            await one.client._backend.renewed(sandbox.handle)
            return found

        api.list = list_and_be_late  # type: ignore[method-assign]
        seen = VirtualClock(world.cluster.loop, world.chance).now_ns()
        assert seen - record(world, sandbox).expires_ns > CLOCK_SKEW_NS, "it was over when it was listed"
        assert await reap(api, CONFIG, seen, dry_run=False) == ()
        await one.execute(sandbox, 1.0)

    play(situation)


def test_a_worker_that_leaves_changes_nothing_of_the_next_owner(play: Callable[[Play], None]) -> None:
    """Its detach crosses an attach: the record is the other's, who would never renew one that waits."""

    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        await two.client._backend._owners.win(sandbox.handle.place, sandbox.id)  # type: ignore[attr-defined]
        before = record(world, sandbox)
        await one.client._backend.detached(sandbox.handle, before.expires_ns - 1)
        assert record(world, sandbox) == before
        await one.client._backend.detached(sandbox.handle, before.expires_ns + 1)
        after = record(world, sandbox)
        assert (after.state, after.handle.epoch, after.owner) == ("running", 2, before.owner)
        assert after.expires_ns == before.expires_ns + 1, "that nobody reaps it sooner is as promised"

    play(situation)


def test_an_attach_that_fails_half_way_costs_the_owner_nothing(play: Callable[[Play], None]) -> None:
    """Whoever wins the next number and never reaches the launcher must not end its owner's sandbox."""

    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        await two.client._backend._owners.win(sandbox.handle.place, sandbox.id)  # type: ignore[attr-defined]
        two.kill()
        await anyio.sleep(5 * CONFIG.record_s)
        assert await sweep(world, skew_s=5.0) == []
        await one.execute(sandbox, 1.0)
        handle = await one.detach(sandbox)
        waits_s = (record(world, sandbox).expires_ns - one.clock.now_ns()) / 1e9
        assert DETACHED_S - 1 < waits_s <= DETACHED_S
        third = await world.worker()
        assert (await third.attach(handle)).handle.epoch == 3

    play(situation)


def test_a_claim_that_got_nowhere_does_not_make_a_fenced_worker_the_owner(
    play: Callable[[Play], None],
) -> None:
    """It may stop what it owns after an attach of its own that failed; not what another took in between."""

    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        await two.attach(sandbox.handle)
        await one.client._backend._owners.win(sandbox.handle.place, sandbox.id)  # type: ignore[attr-defined]
        with pytest.raises(FencedError):
            await sandbox.stop()
        assert world.owners(sandbox.id) == [two]
        own = await one.start()
        for _ in range(2):
            await one.client._backend._owners.win(own.handle.place, own.id)  # type: ignore[attr-defined]
        await own.stop()
        assert world.cluster.pod(f"sbx-{own.id}") is None

    play(situation)


def test_an_attach_that_fails_does_not_shorten_what_was_promised(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        handle = await one.detach(sandbox)
        promised_ns = record(world, sandbox).expires_ns
        await two.client._backend._owners.win(handle.place, sandbox.id)  # type: ignore[attr-defined]
        assert record(world, sandbox).expires_ns == promised_ns

    play(situation)


def test_a_heartbeat_that_overlaps_a_detach_does_not_shorten_it(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        handle = await one.detach(sandbox)
        promised = record(world, sandbox)
        await one.client._backend.renewed(handle)  # it was on its way
        assert record(world, sandbox).expires_ns == promised.expires_ns

    play(situation)


def test_a_detach_that_fails_gives_the_lease_its_length_back(play: Callable[[Play], None]) -> None:
    """With the detached lease still in force, kill -9 would leave the sandbox for an hour."""

    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        lease = world.cluster.launchers[f"sbx-{sandbox.id}"].ownership.lease
        serve, world.cluster.serve = world.cluster.serve, _refuse
        with pytest.raises(ClusterError, match="reading pod"):
            await sandbox.detach()
        assert lease.length_s == DETACHED_S
        world.cluster.serve = serve  # type: ignore[method-assign]
        await anyio.sleep(LEASE_S / 2)
        assert lease.length_s == LEASE_S
        assert world.owners(sandbox.id) == [one]

    play(situation)


def test_a_detach_that_fails_after_its_record_was_written_is_taken_back(play: Callable[[Play], None]) -> None:
    """A record that says "waits" was never renewed again, and its owner's sandbox was reaped."""

    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        serve = world.cluster.serve

        def once_more(request: Request, who: str) -> tuple[int, object]:
            answer = serve(request, who)
            if request.method != "PATCH":
                return answer
            world.cluster.serve = _refuse  # type: ignore[method-assign]
            return _refuse(request, who)

        world.cluster.serve = once_more  # type: ignore[method-assign]
        with pytest.raises(ClusterError):
            await sandbox.detach()
        assert record(world, sandbox).state == "detached"
        world.cluster.serve = serve  # type: ignore[method-assign]
        await anyio.sleep(LEASE_S / 2)
        assert record(world, sandbox).state == "running"
        await anyio.sleep(DETACHED_S)
        assert await sweep(world, skew_s=SKEW_S) == []
        await one.execute(sandbox, 1.0)
        handle = await one.detach(sandbox)
        assert record(world, sandbox).state == "detached"
        await one.client._backend.renewed(handle)
        assert record(world, sandbox).state == "detached"

    play(situation)


def test_a_heartbeat_that_meets_our_own_stop_is_no_failure(play: Callable[[Play], None]) -> None:
    """The launcher is gone some time before the pod is."""

    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        launcher = world.cluster.launchers[f"sbx-{sandbox.id}"]
        await anyio.sleep(LEASE_S / 3 - 0.1)  # the next one comes while the pod is going
        world.cluster.deleted_by = lambda name, who: launcher.kill()
        await one.stop(sandbox)
        assert launcher.asked_in_vain > 0
        assert one.client.stats.renewal_failures == 0

    play(situation)


def _refuse(request: Request, who: str) -> tuple[int, object]:
    return 500, {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd is down"}


def test_an_api_server_that_is_down_does_not_stop_heartbeats(play: Callable[[Play], None]) -> None:
    """Each record renewal is tried for a minute; the launcher must hear of its owner meanwhile."""

    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        serve, world.cluster.serve = world.cluster.serve, _refuse  # type: ignore[method-assign]
        await anyio.sleep(CONFIG.record_s / 2)
        world.cluster.serve = serve  # type: ignore[method-assign]
        assert world.owners(sandbox.id) == [one]
        await one.execute(sandbox, 1.0)

    play(situation)


def test_a_lease_longer_than_the_record_is_not_reaped(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one = await world.worker()
        long = CONFIG.record_s * 10
        spec = msgspec.structs.replace(SPEC, lease_s=long)
        sandbox = await one.client.start(spec)
        one.mine[sandbox.id] = sandbox
        for _ in range(20):
            await anyio.sleep(long / 5)
            assert await sweep(world, skew_s=5.0) == []
        await one.stop(sandbox)

    play(situation)


def test_a_pod_that_was_taken_while_it_was_being_started_is_left_to_its_taker(
    play: Callable[[Play], None],
) -> None:
    """The first owner read its epoch from the record, and then deleted the pod of the second."""

    async def situation(world: World) -> None:
        one, two = await world.worker(), await world.worker()
        one.network.lag_s = 1.5
        one.do(partial(_start, one))
        while not world.handles:
            await anyio.sleep(0.05)
            for info in await two.client.list():
                if info.state == "running":
                    await two.attach(info.handle)
        await anyio.sleep(10)
        (sandbox_id,) = world.handles
        assert world.owners(sandbox_id) == [two]

    play(situation)


async def _start(worker: Worker) -> None:
    await worker.start()


def test_a_pod_that_is_still_being_started_cannot_be_attached(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, two = await world.worker(), await world.worker()
        one.do(partial(_start, one))
        await anyio.sleep(0.05)
        (shown,) = await two.client.list()
        assert shown.state == "starting"
        with pytest.raises(SandboxNotFoundError, match="still being started"):
            await two.attach(shown.handle)

    play(situation)


def test_a_restarted_container_is_not_the_sandbox_any_more(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        taken = await two.attach(sandbox.handle)
        world.cluster.restart_container(f"sbx-{sandbox.id}")
        with pytest.raises(FencedError):
            await one.execute(sandbox, 1.0)
        with pytest.raises(SandboxNotFoundError, match="restarted"):
            await one.attach(taken.handle)

    play(situation)


def test_stopping_a_sandbox_whose_record_was_spoiled_still_deletes_it(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, _, sandbox = await pair(world)
        api = api_of(world)
        pod = await api.get(f"sbx-{sandbox.id}")
        spoiled = {records.EPOCH: "", records.RECORD: "?"}
        await api.annotate(pod["metadata"]["name"], spoiled, pod["metadata"]["resourceVersion"])
        await anyio.sleep(2 * CONFIG.record_s)  # heartbeats find it spoiled, and go on
        assert world.owners(sandbox.id) == [one]
        await one.stop(sandbox)
        assert world.cluster.pods == {}

    play(situation)


# The rules themselves


def test_only_the_owner_moves_the_lease() -> None:
    own = Ownership(10.0, 0.0)
    own.heard(None, 1.0)
    assert own.left_s(1.0) == 10.0, "before there is an owner, whoever asks counts"
    own.fence(2, 5.0)
    own.heard(1, 6.0)
    own.heard(None, 6.0)
    assert own.left_s(6.0) == 9.0
    own.heard(2, 6.0)
    assert own.left_s(6.0) == 10.0
    with pytest.raises(NotOwnerError, match="only the owner, epoch 2"):
        own.change_lease(None, 1000.0, 6.0)
    with pytest.raises(ownership.FencedError):
        own.change_lease(1, 1000.0, 6.0)


def test_a_command_of_a_client_without_heartbeats_holds_the_lease_and_no_other_does() -> None:
    own = Ownership(10.0, 0.0)
    operation = own.begin("command", None, 0.0, busy_s=100.0)
    assert own.left_s(0.0) == 110.0
    own.end(operation, 90.0)
    assert own.left_s(90.0) == 10.0
    own.fence(1, 90.0)
    own.begin("command", 1, 90.0, busy_s=3600.0)
    assert own.left_s(90.0) == 10.0, "its owner is killed: the command must not keep the sandbox"


def test_once_over_it_stays_over_even_for_a_launcher_that_was_frozen() -> None:
    own = Ownership(10.0, 0.0)
    own.fence(1, 0.0)
    for late in (
        lambda: own.fence(2, 10.5),
        lambda: own.begin("command", 1, 10.5),
        lambda: own.check(1, 0.0),
    ):
        with pytest.raises(LeaseOverError, match="ran out"):
            late()
    own.heard(1, 11.0)
    assert own.over(11.0)


def test_an_epoch_that_never_fenced_owns_nothing() -> None:
    own = Ownership(10.0, 0.0)
    own.fence(1, 0.0)
    with pytest.raises(NotOwnerError, match="epoch 2 never became the owner"):
        own.begin("command", 2, 1.0)
    assert [one["what"] for one in own.log.after(0)] == ["fence", "refused"]


def test_the_judge_names_what_is_wrong() -> None:
    def line(number: int, what: str, epoch: int | None, owner: int, of: int = 0) -> LogEntry:
        return LogEntry(number=number, at_s=0.0, what=what, epoch=epoch, owner=owner, of=of)

    good = [
        line(1, "fence", 1, 1),
        line(2, "fenced", 1, 1, 1),
        line(3, "command", 1, 1),
        line(4, "fence", 2, 2),
    ]
    ended = [*good, line(5, "end", 1, 2, 3), line(6, "fenced", 2, 2, 4), line(7, "write", None, 2)]
    assert double_owners(ended) == ()
    assert "ran on after line 5" in double_owners([*good, line(5, "fenced", 2, 2, 4)])[0]
    assert "of epoch 1 began under owner 2" in double_owners([*ended, line(8, "command", 1, 2)])[0]
    assert "became owner after 2" in double_owners([*ended, line(8, "fence", 1, 1)])[0]


def test_a_killed_worker_does_not_reach_anybody(play: Callable[[Play], None]) -> None:
    async def situation(world: World) -> None:
        one, two, sandbox = await pair(world)
        one.network.dead = True
        with pytest.raises(SandboxLostError):
            await sandbox.execute(["work", "1"], timeout_s=1.0)
        one.network.dead = False
        one.kill()
        taken = await two.attach(sandbox.handle)
        assert world.owners(sandbox.id) == [two]
        assert [one.what for one in await taken.log()][-2:] == ["fenced", "lease"]

    play(situation)
