"""At most one owner, and nothing left, in random schedules of workers, faults and reapers in virtual time."""

import os
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest
from sandbox_k8s.run_key import RunKey

from .virtual_network import quiet
from .virtual_time import run
from .virtual_workers import RECORD_LASTS_S, Worker, World

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
SEED = int(os.environ.get("SANDBOX_K8S_SEED", "0"))
STEPS = int(os.environ.get("SANDBOX_K8S_STEPS", "6"))


async def schedule(seed: int, key: RunKey, steps: int = 14) -> World:
    """One random life of a few workers and sandboxes, to its end."""
    async with anyio.create_task_group() as tasks:
        world = World(seed, key, tasks)
        for _ in range(world.chance.choice((2, 2, 3))):
            await world.worker()
        (await _somebody(world)).do(partial(_start, await _somebody(world)))
        for _ in range(steps):
            await _step(world)
            await anyio.sleep(world.chance.choice((0.0, 0.01, 0.5, 3.0, 10.0, 25.0)))
            world.check()
        await world.end()
    return world


async def _somebody(world: World) -> Worker:
    alive = world.alive()
    return world.chance.choice(alive) if alive else await world.worker()


async def _start(worker: Worker) -> None:
    await worker.start()


async def _step(world: World) -> None:
    chance = world.chance
    worker = await _somebody(world)
    kind = chance.choices(
        (
            "use",
            "write",
            "attach",
            "any",
            "race",
            "detach",
            "stop",
            "start",
            "kill",
            "trouble",
            "skew",
            "reap",
            "restart",
            "due",
            "down",
        ),
        (6, 2, 4, 3, 3, 5, 1, 3, 2, 3, 1, 4, 1, 2, 3),
    )[0]
    mine = list(worker.mine.values())
    if kind in ("use", "write", "detach", "stop") and mine:
        sandbox = chance.choice(mine)
        work: dict[str, Callable[[], Awaitable[object]]] = {
            "use": partial(worker.execute, sandbox, chance.choice((0.1, 2.0, 40.0))),
            "write": partial(worker.write, sandbox),
            "detach": partial(worker.detach, sandbox),
            "stop": partial(worker.stop, sandbox),
        }
        worker.do(work[kind])
    elif kind in ("attach", "race") and world.handles:
        handle = chance.choice(list(world.handles.values()))
        for one in world.alive() if kind == "race" else [worker]:
            one.do(partial(one.attach, handle))
    elif kind == "any":
        worker.do(worker.attach_any)
    elif kind == "kill":
        worker.kill()
        await world.worker()
    elif kind == "trouble":
        worker.network.trouble = chance.choice((0.0, 0.1, 0.4))
        worker.network.lag_s = chance.choice((0.0, 0.0, 0.3, 1.5))
    elif kind == "skew":
        worker.clock.skew_s = world.skew_s()
    elif kind == "reap":
        await world.sweep(chance.choice((0.0, 0.3)))
    elif kind in ("due", "down"):
        lag_s = chance.choice((0.0, 0.5, 3.0))
        world.sweep_when_due(chance.randrange(3), chance.uniform(-3.0, 9.0), lag_s, down=kind == "down")
        await anyio.sleep(chance.choice((0.0, RECORD_LASTS_S)))
    elif kind == "restart" and world.cluster.launchers:
        world.cluster.restart_container(chance.choice(list(world.cluster.launchers)))
    elif len(world.cluster.pods) < 3:
        worker.do(worker.start)


def lives(seeds: range, key: RunKey, steps: int = 14) -> None:
    """Run the schedules of those seeds; one that fails is named, and what runs it again."""
    for seed in seeds:
        try:
            with quiet(), pytest.MonkeyPatch.context() as change:
                # The watch for stalls is a third of all turns, and in virtual time nothing stalls.
                change.setattr("sandbox_k8s.stall._EVERY_S", 0.25)
                run(schedule(seed, key, steps))
        except BaseException as problem:
            raise AssertionError(
                f"schedule {seed}; again with SANDBOX_K8S_SEED={seed} SANDBOX_K8S_STEPS={steps}"
            ) from problem


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> RunKey:
    return RunKey(tmp_path_factory.mktemp("key") / "run.key")


def test_300_schedules(key: RunKey) -> None:
    lives(range(SEED, SEED + 1) if SEED else range(300), key, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("thousand", range(10))
def test_10_000_schedules(key: RunKey, thousand: int) -> None:
    lives(range(1000 * thousand, 1000 * (thousand + 1)), key)
