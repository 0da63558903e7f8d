"""Sandboxes that are started before somebody needs them."""

import logging
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from .errors import ConfigError, SandboxError
from .many import stop_all
from .sandbox import Sandbox
from .spec import SandboxSpec

if TYPE_CHECKING:
    from .client import SandboxClient

_log = logging.getLogger("sandbox_k8s")
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_ANSWER_S = 5.0
_LOOKS_PER_LEASE = 2


class _Taker:
    """Somebody who waits for the next sandbox."""

    def __init__(self) -> None:
        self.served = anyio.Event()
        self.sandbox: Sandbox | None = None
        self.problem: SandboxError | None = None


class WarmPool:
    """Keeps ``size`` sandboxes of one spec ready: ``async with client.warm_pool(spec, size=8) as pool:``.

    Each is replaced as soon as it is taken, or found dead. What is left is stopped at the end of the block;
    what was taken belongs to whoever took it, and to the client. While starts fail the pool pauses, longer
    each time; after a failure that no further try changes it starts none until somebody takes.
    """

    def __init__(self, client: "SandboxClient", spec: SandboxSpec, size: int) -> None:
        if size < 1:
            raise ConfigError(f"a warm pool has at least one sandbox, got size={size}")
        self._client = client
        self._spec = spec
        self._size = size
        self._ready: deque[Sandbox] = deque()
        self._takers: deque[_Taker] = deque()
        self._starting = 0
        self._rounds = 0
        """Pauses in a row without a start that came up between them."""
        self._pausing = False
        self._recovered = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def ready(self) -> int:
        """Sandboxes that can be taken at once."""
        return len(self._ready)

    async def __aenter__(self) -> "WarmPool":
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._look_after)
        self._refill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._opened(), None
        tasks.cancel_scope.cancel()
        for taker in self._takers:
            taker.problem = ConfigError("the warm pool was closed while somebody waited for a sandbox")
            taker.served.set()
        try:
            # Not the block's exception: the group would wrap it.
            await tasks.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await stop_all(self._ready)
            self._ready.clear()

    async def take(self) -> Sandbox:
        """A sandbox that answers, at once when one is ready. Whoever came first is served first.

        Raises:
            SandboxStartError: None was ready, and the one that was started for this call did not come up.
        """
        self._opened()
        while self._ready:
            sandbox = self._ready.popleft()
            self._refill()
            try:
                alive = await self._answers(sandbox)
            except BaseException:
                self._came(sandbox)
                raise
            if alive:
                self._client.stats.pool_hits += 1
                return sandbox
            self._opened().start_soon(self._discard, sandbox)
            await self._weed()  # others may be as silent: all at once, not 5 s for each
        self._client.stats.pool_misses += 1
        return await self._wait()

    async def _wait(self) -> Sandbox:
        taker = _Taker()
        self._takers.append(taker)
        self._refill()
        try:
            await taker.served.wait()
        except BaseException:
            if taker in self._takers:
                self._takers.remove(taker)
            if taker.sandbox is not None:
                self._came(taker.sandbox)
            raise
        if taker.sandbox is None:
            raise taker.problem or ConfigError("the warm pool is closed")
        return taker.sandbox

    def _refill(self) -> None:
        """Start what is missing; while the pool pauses, only what somebody waits for."""
        if self._tasks is None:
            return
        spare = 0 if self._pausing else self._size - len(self._ready)
        for _ in range(len(self._takers) + spare - self._starting):
            self._starting += 1
            self._tasks.start_soon(self._fill)

    async def _fill(self) -> None:
        try:
            sandbox = await self._client.start(self._spec)
        except SandboxError as problem:
            self._starting -= 1
            self._failed(problem)
        except BaseException:
            self._starting -= 1
            raise
        else:
            self._starting -= 1
            self._rounds = 0
            self._recovered.set()
            self._recovered = anyio.Event()
            self._came(sandbox)

    def _came(self, sandbox: Sandbox) -> None:
        if self._takers:
            taker = self._takers.popleft()
            taker.sandbox = sandbox
            taker.served.set()
        else:
            self._ready.append(sandbox)

    def _failed(self, problem: SandboxError) -> None:
        self._client.stats.pool_failures += 1
        if self._takers:
            taker = self._takers.popleft()
            taker.problem = problem
            taker.served.set()
        if not self._pausing and self._tasks is not None:
            if not self._rounds:
                _log.warning("a warm pool cannot start a sandbox: %s", problem)
            self._pausing = True
            self._rounds += 1
            self._tasks.start_soon(self._pause, problem.retryable)

    async def _pause(self, retryable: bool) -> None:
        if retryable:
            await anyio.sleep(min(_FIRST_PAUSE_S * 2 ** min(self._rounds - 1, 16), _LONGEST_PAUSE_S))
        else:
            await self._recovered.wait()
        self._pausing = False
        self._refill()

    async def _look_after(self) -> None:
        """Replace those that died while they waited."""
        while True:
            await anyio.sleep(self._spec.lease_s / _LOOKS_PER_LEASE)
            await self._weed()

    async def _weed(self) -> None:
        async with anyio.create_task_group() as tasks:
            for sandbox in list(self._ready):
                tasks.start_soon(self._keep_if_alive, sandbox)

    async def _keep_if_alive(self, sandbox: Sandbox) -> None:
        alive = await self._answers(sandbox)
        if not alive and sandbox in self._ready:
            self._ready.remove(sandbox)
            self._opened().start_soon(self._discard, sandbox)
            self._refill()

    async def _answers(self, sandbox: Sandbox) -> bool:
        """Whether it lives and is still ours."""
        with anyio.move_on_after(_ANSWER_S):
            try:
                await sandbox.renew()
            except SandboxError:
                return False
            return True
        return False

    async def _discard(self, sandbox: Sandbox) -> None:
        self._client.stats.pool_dead += 1
        with anyio.CancelScope(shield=True):
            await stop_all([sandbox])

    def _opened(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise ConfigError("the warm pool is not open; use: async with client.warm_pool(spec, size=8)")
        return self._tasks
