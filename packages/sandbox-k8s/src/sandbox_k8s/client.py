"""Starting, finding and ending sandboxes."""

import builtins
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.lowlevel

from .arrivals import Arrivals
from .backend import Backend
from .checks import check_value
from .clock import Clock, SystemClock
from .config import ClientConfig, LocalConfig
from .errors import ConfigError, FencedError, SandboxError
from .handle import SandboxHandle
from .kubernetes.config import KubernetesConfig
from .local_backend import LocalBackend
from .many import StartProgress, start_many
from .owned import OwnedSandboxes
from .pool import WarmPool
from .reset import reset
from .sandbox import Sandbox
from .spec import SandboxSpec
from .stall import StallWatch
from .stats import ClientStats, ReapedSandbox, SandboxInfo

if TYPE_CHECKING:
    from .kubernetes.prefetch import PrefetchedImage, Progress
    from .sync import SyncSandboxClient

_log = logging.getLogger("sandbox_k8s")
_STOPS_PER_TURN = 16
_STOP_EACH_S = 0.1
"""A thousand deletes take a busy API server longer than one does."""


class SandboxClient:
    """Sandboxes of one back end: ``async with SandboxClient.local() as client:``, or ``.kubernetes(...)``.

    Leaving the block stops what this client started or attached and did not detach, also when the block is
    cancelled. An open client renews the leases of its sandboxes. Use it from one event loop.
    """

    def __init__(self, backend: Backend, clock: Clock, stats: ClientStats) -> None:
        self.stats = stats
        self._backend = backend
        self._clock = clock
        self._tasks: anyio.abc.TaskGroup | None = None

    @classmethod
    def local(cls, config: LocalConfig | None = None, *, clock: Clock | None = None) -> "SandboxClient":
        """Sandboxes on this machine: bubblewrap where it works, else plain processes.

        Args:
            config: None is `LocalConfig()`.
            clock: Where wall time and ids come from; None is the system.
        """
        check_value("config", config, LocalConfig | None)
        clock, stats = clock or SystemClock(), ClientStats()
        return cls(LocalBackend(config or LocalConfig(), clock, stats), clock, stats)

    @classmethod
    def kubernetes(cls, config: KubernetesConfig, *, clock: Clock | None = None) -> "SandboxClient":
        """Sandboxes in pods. Needs the extra ``sandbox-k8s[kubernetes]``.

        Args:
            config: Which cluster, namespace and run; where images get the launcher from.
            clock: Where wall time and ids come from; None is the system.
        """
        from .kubernetes.backend import KubernetesBackend  # the local back end needs none of it

        check_value("config", config, KubernetesConfig)
        clock, stats = clock or SystemClock(), ClientStats()
        return cls(KubernetesBackend(config, clock, stats), clock, stats)

    def sync(self) -> "SyncSandboxClient":
        """The blocking face of this client, which must not be open: ``with client.sync() as client:``."""
        from .sync import SyncSandboxClient  # it is built on this class

        return SyncSandboxClient(self)

    @property
    def clock(self) -> Clock:
        """Where its times and ids come from."""
        return self._clock

    @property
    def config(self) -> ClientConfig:
        """The settings of its back end."""
        return self._backend.config

    async def __aenter__(self) -> "SandboxClient":
        """Open the back end.

        Raises:
            ConfigError: A setting is wrong, or the run key file is not safe to use.
            BackendUnavailableError: What was insisted on is not there.
        """
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._backend.opened())
            self._tasks = await opening.enter_async_context(anyio.create_task_group())
            opening.callback(self._tasks.cancel_scope.cancel)
            self._owned = OwnedSandboxes(self._tasks, self._backend, self.stats)
            self._stalls = StallWatch(self._tasks, self.stats)
            self._arrivals = Arrivals()
            self._guests: list[Sandbox] = []
            opening.push_async_callback(self._close_connections)
            self._opening = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened()
        try:
            with anyio.CancelScope(shield=True):
                await self._stop_owned()
        finally:
            # Also when asyncio's own cancel, which goes through shields, has cut that off: what is left must
            # be renewed no more. Not the block's exception: the group would wrap it, and callers catch
            # SandboxError, not groups.
            self._tasks = None
            await self._opening.__aexit__(None, None, None)

    async def _stop_owned(self) -> None:
        with anyio.move_on_after(self.config.stop_timeout_s):
            await self._arrivals.end()
        with anyio.move_on_after(self.config.stop_timeout_s + _STOP_EACH_S * len(tuple(self._owned))):
            async with anyio.create_task_group() as stopping:
                for number, owned in enumerate(self._owned, 1):
                    stopping.start_soon(self._stop_at_exit, owned.sandbox)
                    if number % _STOPS_PER_TURN == 0:
                        await anyio.lowlevel.checkpoint()  # a thousand at once would hold up the loop

    async def _close_connections(self) -> None:
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as closing:  # which goes on with the others when one is cut off
                for guest in self._guests:
                    closing.push_async_callback(guest.launcher.close)
                for owned in self._owned:
                    self.stats.stop_failures += 1
                    _log.warning("sandbox %s did not confirm its end; its lease ends it", owned.sandbox.id)
                    closing.push_async_callback(self._owned.forget, owned)

    async def start(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Start a sandbox. Cancelled or failed, it leaves nothing behind.

        Raises:
            ConfigError: The spec asks for what cannot be (see `SandboxSpec`).
            SandboxStartError: It did not come up; the evidence says what its launcher said.
        """
        self._opened()
        check_value("spec", spec, SandboxSpec | None)
        with self._arrivals.one():
            with self._stalls.looking():
                handle, launcher = await self._backend.start(spec or SandboxSpec())
            sandbox = self._owned.add(Sandbox(self, handle, launcher, owned=True))
        self.stats.started += 1
        return sandbox

    async def start_many(
        self, specs: Sequence[SandboxSpec], *, progress: Callable[[StartProgress], object] | None = None
    ) -> builtins.list[Sandbox | SandboxError]:
        """Start many sandboxes, as many at once as the cluster takes well (`ClientStats.start_limit`).

        Args:
            specs: One for each.
            progress: Told whenever a start has ended, for a progress bar; `ClientStats` says how many are
                under way and how many wait.

        Returns:
            In the order of the specs, for each the sandbox or why it did not come up. If the call is
            cancelled, those that are up are stopped.
        """
        self._opened()
        return await start_many(self, specs, progress)

    def warm_pool(self, spec: SandboxSpec | None = None, *, size: int) -> WarmPool:
        """Sandboxes that are ready before they are needed.

        Args:
            spec: Of all of them; None is `SandboxSpec()`.
            size: How many are kept ready.

        Raises:
            ConfigError: The size is not positive.
        """
        check_value("spec", spec, SandboxSpec | None)
        check_value("size", size, int)
        return WarmPool(self, spec or SandboxSpec(), size)

    async def prefetch(
        self,
        images: Sequence[str],
        nodes: Sequence[str] | Mapping[str, str] | None = None,
        *,
        progress: "Progress | None" = None,
    ) -> "tuple[PrefetchedImage, ...]":
        """Bring images to nodes before sandboxes need them, by pods that end at once.

        Args:
            images: Names as in `SandboxSpec.image`.
            nodes: Names of nodes; or labels that they must have, beside those of the settings; None is all
                that sandboxes of these settings may use. Anything but names needs to list nodes, which a
                Role of one namespace does not allow.
            progress: Told of each image of each node, with how many are done, and of how many.

        Returns:
            Each image on each node, with why it is not there. Nothing is raised for a single image.

        Raises:
            ClusterError: The nodes could not be listed.
            ConfigError: The back end has no images.
        """
        self._opened()
        check_value("images", images, Sequence[str])
        check_value("nodes", nodes, Sequence[str] | Mapping[str, str] | None)
        return await self._backend.prefetch(images, nodes, progress)

    async def attach(self, handle: SandboxHandle, *, take_ownership: bool = True) -> Sandbox:
        """Find a running sandbox again, from any process that has the run key, shells and all.

        Args:
            handle: From `Sandbox.detach`, `Sandbox.handle` or `list`; an old one is good.
            take_ownership: The caller becomes the owner and renews it; whoever owned it gets `FencedError`,
                and what they were running ends. False is for a command on the side: the owner stays.

        Raises:
            SandboxNotFoundError: It has ended.
            FencedError: Another worker is attaching at this moment.
            AccessError: This client's run key is another one than the handle's.
            ConfigError: The handle belongs to another root, cluster or namespace.
        """
        self._opened()
        check_value("handle (read JSON with SandboxHandle.from_json)", handle, SandboxHandle)
        if not take_ownership:
            held, launcher = await self._backend.guest(handle)
            guest = Sandbox(self, held, launcher, owned=False)
            self._guests = [*(one for one in self._guests if not one.launcher.closed), guest]
            return guest
        taken, launcher = await self._backend.take(handle)
        self.stats.attached += 1
        return self._owned.add(Sandbox(self, taken, launcher, owned=True))

    async def detach(self, sandbox: Sandbox) -> SandboxHandle:
        """See `Sandbox.detach`. If it fails, the sandbox is still this client's, and stopped with it."""
        self._opened()
        owned = self._owned.find(sandbox)
        if owned is None:
            raise FencedError(f"sandbox {sandbox.id} is not this client's (any more)")
        handle = sandbox.handle
        async with owned.changing:
            try:
                await sandbox.launcher.call("/sbx/lease", {"lease_s": handle.detached_lease_s})
                expires_ns = self._clock.now_ns() + int(handle.detached_lease_s * 1e9)
                with anyio.CancelScope(shield=True):
                    await self._backend.detached(handle, expires_ns)
                    await self._owned.forget(owned)
            except BaseException:
                owned.length_lost = True
                raise
        self.stats.detached += 1
        return handle

    async def stop(self, sandbox: Sandbox) -> None:
        """See `Sandbox.stop`.

        Raises:
            FencedError: Another worker owns it.
            SandboxLostError: Its end was not confirmed. It is renewed no more, so that its lease ends it.
        """
        self._opened()
        if not sandbox.owned:
            raise FencedError(f"sandbox {sandbox.id} is not yours to stop: attached without ownership")
        owned = self._owned.find(sandbox)
        if owned is None:
            if self._owned.successor(sandbox) is not None:
                raise FencedError(
                    f"sandbox {sandbox.id} lives on as another object, the one that reset or attach "
                    "returned; stop that one"
                )
            return
        owned.stopping = True
        try:
            await self._backend.stop(owned.sandbox.handle)
        except FencedError:
            await self._owned.forget(owned)
            raise
        except SandboxError:
            owned.end_renewals()
            raise
        finally:
            owned.stopping = False
        await self._owned.forget(owned)
        self.stats.stopped += 1

    async def leave(self, sandbox: Sandbox) -> None:
        """Stop a sandbox at the end of its block, unless it lives on there as what `reset` returned."""
        self._opened()
        if self._owned.successor(sandbox) is None:
            await self.stop(sandbox)

    async def reset(self, sandbox: Sandbox) -> Sandbox:
        """Bring a sandbox back to what it was at `Sandbox.mark_clean`, and prove it; or stop it.

        The next epoch is won first, so that whoever used it is fenced and what they were running ends. Then
        everything in it is killed, files and folders that are new are removed, git's own files (settings,
        hooks, refs, stashes, index) and small files of the home are put back, tracked files are checked out,
        and all that can be written to is compared: tracked files by content, everything else by inode and
        change time, which no command can set back.

        It refuses what it cannot bring back: a file outside the working tree that was changed or removed,
        files that cannot be removed, a repacked repository, shared memory. What it cannot see is what is not
        in the sandbox: traces in the kernel or on the network, and whatever happened outside.

        Returns:
            The same sandbox with the next epoch; the old object is fenced.

        Raises:
            ResetRefusedError: It was never marked and is left as it is, or it is not clean and was stopped
                (`stopped`).
            FencedError: It is not this client's any more.
        """
        if self._owned.find(sandbox) is None:
            raise FencedError(f"sandbox {sandbox.id} is not this client's (any more)")
        return await reset(sandbox, partial(self.attach, sandbox.handle), self.stats)

    async def list(self) -> tuple[SandboxInfo, ...]:
        """All sandboxes of this root, or of this run of the cluster's namespace, of any client, by id."""
        self._opened()
        return await self._backend.list()

    async def reap(self, *, dry_run: bool = False) -> tuple[ReapedSandbox, ...]:
        """Remove what killed keepers left behind, or pods that ended or outlived their leases.

        Args:
            dry_run: Only say what would be removed.
        """
        self._opened()
        return await self._backend.reap(dry_run=dry_run)

    def _opened(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise ConfigError("the client is not open; use: async with SandboxClient.local() as client: ...")
        return self._tasks

    async def _stop_at_exit(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.stop()
        except FencedError:
            _log.info("sandbox %s belongs to another worker now; left alone", sandbox.id)
        except SandboxError as problem:
            _log.warning("stopping sandbox %s: %s", sandbox.id, problem)
