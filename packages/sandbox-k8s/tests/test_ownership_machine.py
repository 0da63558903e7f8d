"""At most one owner under any interleaving: hypothesis looks for one that breaks it, and shrinks it.

Time is virtual and everything is in one process: workers with real clients, a reaper whose clock is off, and
the launcher's own rules. A rule only begins something; the others begin more while it is under way.
"""

import logging
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sandbox_k8s import Sandbox
from sandbox_k8s.run_key import RunKey

from .virtual_time import VirtualLoop
from .virtual_workers import RECORD_LASTS_S, SKEW_S, Worker, World

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
WHO = st.integers(0, 2)
WHICH = st.integers(0, 5)


class Owners(RuleBasedStateMachine):
    """Two or three workers, a few sandboxes."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.loop = VirtualLoop()
        self.folder = tempfile.TemporaryDirectory(prefix="sbx-")

    @initialize(seed=st.integers(0, 1 << 16), workers=st.integers(2, 3))
    def begin(self, seed: int, workers: int) -> None:
        ready = self.loop.create_future()
        self.leave = self.loop.create_future()

        async def life() -> None:
            async with anyio.create_task_group() as tasks:
                world = World(seed, RunKey(Path(self.folder.name) / "run.key"), tasks)
                for _ in range(workers):
                    await world.worker()
                ready.set_result(world)
                await self.leave
                await world.end()

        self.life = self.loop.create_task(life())
        self.world: World = self.loop.run_until_complete(ready)
        self.start(0)
        self.go(2.0)

    def go(self, seconds: float) -> None:
        self.loop.run_until_complete(_sleep(seconds))
        if self.life.done():
            self.life.result()

    def now(self, begin: Callable[..., object], *arguments: Any) -> None:
        """Begin something inside the loop, and go on at once."""

        async def inside() -> None:
            begin(*arguments)

        self.loop.run_until_complete(inside())

    def worker(self, who: int) -> Worker:
        alive = self.world.alive()
        return alive[who % len(alive)]

    def with_mine(self, who: int, which: int, use: Callable[[Worker, Sandbox], Awaitable[Any]]) -> None:
        worker = self.worker(who)
        mine = list(worker.mine.values())
        if mine:
            self.now(worker.do, partial(use, worker, mine[which % len(mine)]))

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.1, 1.0, 7.0, 25.0, 95.0]))
    def time_passes(self, seconds: float) -> None:
        self.go(seconds)

    @precondition(lambda self: len(self.world.cluster.pods) < 3)
    @rule(who=WHO)
    def start(self, who: int) -> None:
        self.now(self.worker(who).do, self.worker(who).start)

    @precondition(lambda self: self.world.handles)
    @rule(who=WHO, which=WHICH)
    def attach(self, who: int, which: int) -> None:
        handles = list(self.world.handles.values())
        worker = self.worker(who)
        self.now(worker.do, partial(worker.attach, handles[which % len(handles)]))

    @rule(who=WHO)
    def attach_what_is_listed(self, who: int) -> None:
        self.now(self.worker(who).do, self.worker(who).attach_any)

    @precondition(lambda self: self.world.handles)
    @rule(which=WHICH)
    def all_attach(self, which: int) -> None:
        handles = list(self.world.handles.values())
        for one in self.world.alive():
            self.now(one.do, partial(one.attach, handles[which % len(handles)]))

    @rule(who=WHO, which=WHICH, seconds=st.sampled_from([0.1, 3.0, 60.0]))
    def execute(self, who: int, which: int, seconds: float) -> None:
        self.with_mine(who, which, lambda worker, sandbox: worker.execute(sandbox, seconds))

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def all_execute(self, seconds: float) -> None:
        """Also those who do not know yet that they own nothing any more."""
        for one in self.world.alive():
            for sandbox in list(one.mine.values()):
                self.now(one.do, partial(one.execute, sandbox, seconds))
        self.go(1.0)

    @rule(who=WHO, which=WHICH)
    def write(self, who: int, which: int) -> None:
        self.with_mine(who, which, Worker.write)

    @rule(who=WHO, which=WHICH)
    def detach(self, who: int, which: int) -> None:
        self.with_mine(who, which, Worker.detach)

    @rule(who=WHO, which=WHICH)
    def stop(self, who: int, which: int) -> None:
        self.with_mine(who, which, Worker.stop)

    @rule(who=WHO)
    def kill_9(self, who: int) -> None:
        self.now(self.worker(who).kill)
        self.loop.run_until_complete(self.world.worker())

    @rule(who=WHO, skew_s=st.floats(-SKEW_S, SKEW_S))
    def clock_steps(self, who: int, skew_s: float) -> None:
        self.worker(who).clock.skew_s = skew_s

    @rule(who=WHO, trouble=st.sampled_from([0.0, 0.2, 0.6]), lag_s=st.sampled_from([0.0, 0.4, 2.0, 8.0]))
    def network_changes(self, who: int, trouble: float, lag_s: float) -> None:
        """Answers of the API server and fences are lost, late or doubled; heartbeats are late."""
        self.worker(who).network.trouble, self.worker(who).network.lag_s = trouble, lag_s

    @rule(trouble=st.sampled_from([0.0, 0.3]))
    def sweep(self, trouble: float) -> None:
        self.loop.run_until_complete(self.world.sweep(trouble))

    @precondition(lambda self: self.world.cluster.pods)
    @rule(
        which=WHICH,
        after_s=st.floats(-3.0, 9.0),
        lag_s=st.sampled_from([0.0, 0.5, 3.0]),
        down=st.booleans(),
        waits=st.booleans(),
    )
    def sweep_when_due(self, which: int, after_s: float, lag_s: float, down: bool, waits: bool) -> None:
        self.now(partial(self.world.sweep_when_due, which, after_s, lag_s, down=down))
        if waits:
            self.go(RECORD_LASTS_S)

    @precondition(lambda self: self.world.cluster.launchers)
    @rule(which=WHICH)
    def container_restarts(self, which: int) -> None:
        names = sorted(self.world.cluster.launchers)
        self.now(self.world.cluster.restart_container, names[which % len(names)])

    @invariant()
    def at_most_one_owner(self) -> None:
        self.now(self.world.check)

    def teardown(self) -> None:
        try:
            self.leave.set_result(None)
            self.loop.run_until_complete(self.life)  # and nothing is left
        finally:
            self.loop.close()
            self.folder.cleanup()
            logging.disable(logging.NOTSET)


async def _sleep(seconds: float) -> None:
    await anyio.sleep(seconds)


FEW = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class TestOwners(Owners.TestCase):
    settings = FEW


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestOwnersLong(Owners.TestCase):
    settings = settings(FEW, max_examples=300, stateful_step_count=50, derandomize=False)
