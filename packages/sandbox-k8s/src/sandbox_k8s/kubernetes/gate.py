"""The gate before all starts of one client: what `Pacer` and `ImageBreakers` decide, as tasks and figures."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from sandbox_k8s.errors import ClusterError, DiagnosedError, SandboxStartError
from sandbox_k8s.stats import ClientStats

from .breaker import ImageBreakers
from .config import KubernetesConfig
from .diagnosis import Diagnosis
from .failure import FailureName
from .pacing import Pacer, Turn

_log = logging.getLogger("sandbox_k8s")
_AT_ONCE = 8
"""Starts that are let in per turn of the event loop: each makes a manifest before it first waits."""

OVERLOAD: frozenset[FailureName] = frozenset(
    {
        "api_overloaded",
        "api_unavailable",
        "quota_exceeded",
        "unschedulable_resources",
        "unschedulable_nodes_down",
        "unschedulable",
        "kubelet_rejected",
        "node_disk_full",
        "image_rate_limit",
        "image_pull_slow",
        "start_timeout",
    }
)
"""What says that the cluster has too much to do, rather than that one sandbox is wrong."""


class StartGate:
    """Lets starts through. `run` must be running."""

    def __init__(self, config: KubernetesConfig, stats: ClientStats) -> None:
        self._pacer = Pacer(config.start_concurrency, config.start_concurrency_max)
        self._breakers = ImageBreakers(config.image_failures, config.image_retry_s, config.image_rate_limit_s)
        self._injection = config.injection
        self._failing_s = config.failing_timeout_s
        self._told: set[FailureName | None] = set()
        """Ways of failing that were logged since a start last succeeded."""
        self._stats = stats
        self._events: dict[Turn, anyio.Event] = {}
        self._changed = anyio.Event()
        self._show()

    async def run(self) -> None:
        """Let starts in as their turns come, until cancelled."""
        while True:
            changed = self._changed
            for turn in self._pacer.admit(anyio.current_time(), _AT_ONCE):
                self._events.pop(turn).set()
                self._tell()
            self._show()
            if changed.is_set():
                await anyio.lowlevel.checkpoint()
                continue
            wake_s = self._pacer.wake_s()
            with anyio.move_on_at(float("inf") if wake_s is None else wake_s):
                await changed.wait()

    @asynccontextmanager
    async def turn(self, image: str) -> AsyncGenerator[Turn]:
        """Wait for a turn, and have it for the block; how the block ends says how the start went.

        Raises:
            SandboxStartError: The last starts of that image failed, with their diagnosis.
        """
        self._refuse(image, self._breakers.refusal(image, anyio.current_time()))
        turn = self._pacer.ask()
        self._events[turn] = come = anyio.Event()
        self._tell()
        try:
            await come.wait()
            # Those that were before it in the queue may have found out.
            self._refuse(image, self._breakers.begin(image, anyio.current_time()))
            async with self._watched(turn, image):
                yield turn
        finally:
            self._events.pop(turn, None)
            self._pacer.give_back(turn)
            self._tell()

    @asynccontextmanager
    async def _watched(self, turn: Turn, image: str) -> AsyncGenerator[None]:
        try:
            yield
        except DiagnosedError as problem:
            self._learn(turn, image, problem)
            raise
        except BaseException:
            self._breakers.unknown(image)
            raise
        self._pacer.succeeded(turn)
        self._told.clear()
        self._breakers.succeeded(image)

    def _learn(self, turn: Turn, image: str, problem: DiagnosedError) -> None:
        found = problem.diagnosis
        if found is None:
            self._breakers.unknown(image)
            return
        # The API's own refusals were heard of when they came, those that a retry got over too.
        if not isinstance(problem.__cause__, ClusterError):
            self.suffers(turn, found)
        now_s = anyio.current_time()
        if not self._blames(image, found):
            self._breakers.unknown(image)
            return
        if self._breakers.failed(image, found, now_s):
            self._stats.breakers_opened += 1
            opens_s = self._breakers.opens_s(image, now_s)
            _log.warning("image %s: %s: no start of it for %.0f s", image, found.failure, opens_s)

    def _blames(self, image: str, found: Diagnosis) -> bool:
        """Whether the sandbox's own image is at fault, and not the one with the tools."""
        said = found.evidence_text
        if found.failure == "image_architecture" and "exec format error" in said:
            return self._injection.kind == "baked"  # else it is the loader of the tools that cannot run
        return self._injection.image is None or self._injection.image not in said or image in said

    def _refuse(self, image: str, found: Diagnosis | None) -> None:
        if found is None:
            return
        self._stats.breaker_refusals += 1
        left_s = self._breakers.opens_s(image, anyio.current_time())
        raise SandboxStartError(
            f"image {image} is not tried again for {left_s:.0f} s, its last starts failed: {found.failure}: "
            f"{found.why}",
            evidence=found.evidence_text,
            diagnosis=found,
        )

    def suffers(self, turn: Turn, found: Diagnosis) -> None:
        """A start is failing, or has failed, in that way."""
        if found.state == "failing" and found.failure not in self._told:
            self._told.add(found.failure)
            text = "a start is failing, and is given up after %.0f s of it: %s: %s"
            _log.warning(text, self._failing_s, found.failure, found.why)
        if found.failure in OVERLOAD:
            self._slow(turn.admitted_s or anyio.current_time(), found.why, found.retry_after_s)

    def heard(self, seconds: float, problem: ClusterError | None) -> None:
        """How long a create took to be answered, and how it was refused."""
        now_s = anyio.current_time()
        found = None if problem is None else problem.diagnosis
        if found is not None and found.failure in OVERLOAD:
            self._slow(now_s - seconds, found.why, found.retry_after_s)
        elif self._pacer.answered(seconds, now_s):
            self._slowed(f"the API server took {seconds:.1f} s for a create")

    def _slow(self, begun_s: float, why: str, retry_after_s: float | None) -> None:
        now_s = anyio.current_time()
        if self._pacer.overloaded(begun_s, now_s, retry_after_s):
            pause_s = self._pacer.paused_until_s - now_s
            self._slowed(f"{why}; none for {pause_s:.0f} s" if pause_s > 0 else why)

    def _slowed(self, why: str) -> None:
        level = logging.WARNING if self._pacer.slowdowns == 1 else logging.DEBUG
        _log.log(level, "at most %d starts at once from now on: %s", int(self._pacer.limit), why)
        self._tell()

    def _tell(self) -> None:
        self._show()
        self._changed.set()
        self._changed = anyio.Event()

    def _show(self) -> None:
        stats, pacer = self._stats, self._pacer
        stats.start_limit = int(pacer.limit)
        stats.starts_in_flight, stats.starts_waiting = pacer.in_flight, pacer.waiting
        stats.start_slowdowns = pacer.slowdowns
