"""Starting, finding and ending sandboxes."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from . import bubblewrap
from .clock import Clock, SystemClock
from .config import LocalConfig
from .errors import (
    AccessError,
    BackendUnavailableError,
    ConfigError,
    FencedError,
    SandboxError,
    SandboxNotFoundError,
)
from .handle import Isolation, SandboxHandle
from .launcher import archive
from .launcher.keeper import SOCKET
from .local import PYTHON_PREFIX, KeeperProcess, ask_to_stop, order_for, start_keeper
from .owned import OwnedSandboxes
from .sandbox import Sandbox
from .spec import SandboxSpec
from .stats import ClientStats, SandboxInfo
from .store import RunKey, SandboxState, Store
from .sweep import ReapedSandbox, sweep
from .transport import LauncherClient

_log = logging.getLogger("sandbox_k8s")
_CLEAN_UP_S = 20.0


class SandboxClient:
    """Sandboxes of one back end, as ``async with SandboxClient.local() as client:``.

    Leaving the block stops what this client started or attached and did not detach, also when the block is
    cancelled. An open client renews the leases of its sandboxes. Use it from one event loop.
    """

    def __init__(self, config: LocalConfig, clock: Clock) -> None:
        self.config = config
        self.stats = ClientStats()
        self._clock = clock
        self._tasks: anyio.abc.TaskGroup | None = None

    @classmethod
    def local(cls, config: LocalConfig | None = None, *, clock: Clock | None = None) -> "SandboxClient":
        """Sandboxes on this machine: bubblewrap where it works, else plain processes.

        Args:
            config: None is `LocalConfig()`.
            clock: Where wall time and ids come from; None is the system.
        """
        return cls(config or LocalConfig(), clock or SystemClock())

    @classmethod
    def kubernetes(cls, *args: object, **settings: object) -> NoReturn:
        """Sandboxes as pods; not in this release.

        Raises:
            BackendUnavailableError: Always.
        """
        raise BackendUnavailableError(
            "this release has no Kubernetes back end yet; use SandboxClient.local()"
        )

    async def __aenter__(self) -> "SandboxClient":
        """Open the root folder and choose the isolation.

        Raises:
            ConfigError: The root or the run key file is not safe to use.
            BackendUnavailableError: bubblewrap was insisted on and does not work.
        """
        root = self.config.resolved_root()
        self._store = Store(root)
        self._key = RunKey(self.config.run_key_file or root / "run.key")
        self._isolation: Isolation = await self._choose_isolation()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._owned = OwnedSandboxes(self._tasks, self.stats)
        self._guests: list[Sandbox] = []
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._opened()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self.config.stop_timeout_s):
                async with anyio.create_task_group() as stopping:
                    for owned in self._owned:
                        stopping.start_soon(self._stop_at_exit, owned.sandbox)
            for owned in self._owned:
                self.stats.stop_failures += 1
                _log.warning(
                    "sandbox %s did not confirm its end; its keeper goes on with it", owned.sandbox.id
                )
                await self._owned.forget(owned)
            for guest in self._guests:
                await guest.launcher.close()
        self._tasks = None
        tasks.cancel_scope.cancel()
        # Not the block's exception: the group would wrap it, and callers catch SandboxError, not groups.
        await tasks.__aexit__(None, None, None)

    async def start(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Start a sandbox. Cancelled or failed, it leaves nothing behind.

        Raises:
            ConfigError: The spec asks for what cannot be (see `SandboxSpec`).
            SandboxStartError: It did not come up; the evidence says what its launcher said.
        """
        self._opened()
        spec = spec or SandboxSpec()
        self._owned.collect_keepers()
        bubblewrap.check_read_only(spec.read_only_paths, self._store.root)
        sandbox_id = self._clock.new_id()[:16]
        folder = self._store.create(sandbox_id)
        keeper: KeeperProcess | None = None
        launcher: LauncherClient | None = None
        try:
            # The lock keeps reap away from a sandbox that has no keeper yet.
            with self._store.locked(sandbox_id):
                order = order_for(
                    folder,
                    self._isolation,
                    spec,
                    sandbox_id=sandbox_id,
                    token=self._key.token(sandbox_id),
                    start_timeout_s=self.config.start_timeout_s,
                )
                keeper = start_keeper(order)
                await keeper.ready(folder, self.config.start_timeout_s + 1.0)
                handle = self._handle(sandbox_id, spec, order["settings"]["workdir"])
                launcher = self._launcher(handle, handle.epoch)
                await launcher.call("/sbx/fence", {"epoch": handle.epoch})
                self._store.write(SandboxState(handle=handle))
        except BaseException:
            await self._undo_start(sandbox_id, keeper, launcher)
            raise
        finally:
            if keeper is not None:
                keeper.close()
        self.stats.started += 1
        self.stats.unisolated += self._isolation == "process" and self.config.isolation == "auto"
        return self._owned.add(Sandbox(self, handle, launcher, owned=True), keeper)

    async def attach(self, handle: SandboxHandle, *, take_ownership: bool = True) -> Sandbox:
        """Find a running sandbox again, from any process on this machine, shells and all.

        Args:
            handle: From `Sandbox.detach`, `Sandbox.handle` or `list`; an old one is good.
            take_ownership: The caller becomes the owner and renews it; whoever owned it gets `FencedError`,
                and what they were running ends. False is for a command on the side: the owner stays.

        Raises:
            SandboxNotFoundError: It has ended.
            FencedError: Another worker is attaching at this moment.
            AccessError: This root's run key is another one than the handle's.
            ConfigError: The handle belongs to another root.
        """
        self._opened()
        self._check_handle(handle)
        if not take_ownership:
            held = self._store.read(handle.sandbox_id).handle
            guest = Sandbox(self, held, self._launcher(held, None), owned=False)
            self._guests.append(guest)
            return guest
        taken, launcher = await self._take(handle.sandbox_id)
        self.stats.attached += 1
        return self._owned.add(Sandbox(self, taken, launcher, owned=True), None)

    async def detach(self, sandbox: Sandbox) -> SandboxHandle:
        """See `Sandbox.detach`. If it fails, the sandbox is still this client's, and stopped with it."""
        self._opened()
        owned = self._owned.find(sandbox)
        if owned is None:
            raise FencedError(f"sandbox {sandbox.id} is not this client's (any more)")
        handle = sandbox.handle
        await sandbox.launcher.call("/sbx/lease", {"lease_s": handle.detached_lease_s})
        expires_ns = self._clock.now_ns() + int(handle.detached_lease_s * 1e9)
        with anyio.CancelScope(shield=True):
            with self._store.locked(sandbox.id, wait=False) as free:
                if free and self._store.read(sandbox.id).handle.epoch == handle.epoch:
                    self._store.write(SandboxState(handle=handle, detached=True, expires_ns=expires_ns))
            await self._owned.forget(owned)
        self.stats.detached += 1
        return handle

    async def stop(self, sandbox: Sandbox) -> None:
        """See `Sandbox.stop`.

        Raises:
            FencedError: Another worker owns it.
            SandboxLostError: Its end was not confirmed.
        """
        self._opened()
        if not sandbox.owned:
            raise FencedError(f"sandbox {sandbox.id} is not yours to stop: attached without ownership")
        owned = self._owned.find(sandbox)
        if owned is None:
            return
        try:
            held = self._store.read(sandbox.id).handle.epoch
        except SandboxNotFoundError:
            held = sandbox.handle.epoch  # it ended by itself
        if held != sandbox.handle.epoch:
            await self._owned.forget(owned)
            raise FencedError(f"sandbox {sandbox.id} belongs to epoch {held}, you are {sandbox.handle.epoch}")
        await ask_to_stop(self._store.folder(sandbox.id))
        if owned.keeper is not None:
            await owned.keeper.ended()
        await self._remove_leftovers(sandbox.id)
        await self._owned.forget(owned)
        self.stats.stopped += 1

    async def list(self) -> tuple[SandboxInfo, ...]:
        """All sandboxes of this root, of any client, by id."""
        self._opened()
        found: list[SandboxInfo] = []
        for sandbox_id in self._store.ids():
            try:
                held = self._store.read(sandbox_id)
            except SandboxNotFoundError:
                continue  # it is just starting or just ending
            alive: Literal["running", "detached"] = "detached" if held.detached else "running"
            state = alive if self._store.kept(sandbox_id) else "dead"
            found.append(SandboxInfo(handle=held.handle, state=state, expires_ns=held.expires_ns))
        return tuple(found)

    async def reap(self, *, dry_run: bool = False) -> tuple[ReapedSandbox, ...]:
        """Remove what killed keepers left behind. Living sandboxes end by their leases, not by this.

        Args:
            dry_run: Only say what would be removed.
        """
        self._opened()
        return await anyio.to_thread.run_sync(sweep, self._store, self._clock.now_ns(), dry_run)

    async def _choose_isolation(self) -> Isolation:
        if self.config.isolation == "process":
            return "process"
        why = await anyio.to_thread.run_sync(bubblewrap.why_unusable, PYTHON_PREFIX)
        if not why:
            return "bubblewrap"
        if self.config.isolation == "bubblewrap":
            raise BackendUnavailableError(f"LocalConfig.isolation is 'bubblewrap', but {why}")
        _log.warning(
            "sandboxes run as plain processes WITHOUT isolation: they can see this user's files, other "
            "processes and the network, because %s. LocalConfig(isolation='process') accepts this silently.",
            why,
        )
        return "process"

    def _opened(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise ConfigError("the client is not open; use: async with SandboxClient.local() as client: ...")
        return self._tasks

    def _check_handle(self, handle: SandboxHandle) -> None:
        if Path(handle.root) != self._store.root:
            raise ConfigError(
                f"sandbox {handle.sandbox_id} lives in {handle.root}, this client in {self._store.root}; "
                f"use LocalConfig(root={handle.root!r})"
            )
        if handle.key_id != self._key.key_id:
            raise AccessError(
                f"sandbox {handle.sandbox_id} was made with run key {handle.key_id}, "
                f"this client has {self._key.key_id}"
            )

    async def _take(self, sandbox_id: str) -> tuple[SandboxHandle, LauncherClient]:
        with self._store.locked(sandbox_id, wait=False) as free:
            if not free:
                raise FencedError(f"sandbox {sandbox_id} is being attached by another worker at this moment")
            if not self._store.kept(sandbox_id):
                raise SandboxNotFoundError(f"sandbox {sandbox_id} has ended; run: sandbox-k8s reap")
            held = self._store.read(sandbox_id)
            taken = msgspec.structs.replace(held.handle, epoch=held.handle.epoch + 1)
            # The number is used up first: if the launcher does not answer, the next try counts on from it.
            self._store.write(msgspec.structs.replace(held, handle=taken))
            launcher = self._launcher(taken, taken.epoch)
            try:
                await launcher.call("/sbx/fence", {"epoch": taken.epoch})
                await launcher.call("/sbx/lease", {"lease_s": taken.lease_s})
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await launcher.close()
                raise
            self._store.write(SandboxState(handle=taken))
        return taken, launcher

    def _handle(self, sandbox_id: str, spec: SandboxSpec, workdir: str) -> SandboxHandle:
        return SandboxHandle(
            isolation=self._isolation,
            root=str(self._store.root),
            sandbox_id=sandbox_id,
            epoch=1,
            key_id=self._key.key_id,
            workdir=workdir,
            lease_s=spec.lease_s,
            detached_lease_s=spec.detached_lease_s,
            created_ns=self._clock.now_ns(),
            labels=spec.labels,
        )

    def _launcher(self, handle: SandboxHandle, epoch: int | None) -> LauncherClient:
        return LauncherClient(
            self._store.folder(handle.sandbox_id) / SOCKET,
            self._key.token(handle.sandbox_id),
            epoch,
            margin_s=self.config.answer_margin_s,
            where=f"sandbox {handle.sandbox_id}",
        )

    async def _stop_at_exit(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.stop()
        except FencedError:
            _log.info("sandbox %s belongs to another worker now; left alone", sandbox.id)
        except SandboxError as problem:
            _log.warning("stopping sandbox %s: %s", sandbox.id, problem)

    async def _undo_start(
        self, sandbox_id: str, keeper: KeeperProcess | None, launcher: LauncherClient | None
    ) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLEAN_UP_S):
            if launcher is not None:
                await launcher.close()
            if keeper is not None:
                keeper.terminate()
                await keeper.ended()
            await self._remove_leftovers(sandbox_id)

    async def _remove_leftovers(self, sandbox_id: str) -> None:
        """Remove the folder if its keeper was killed before it could."""
        if not self._store.kept(sandbox_id):
            await anyio.to_thread.run_sync(archive.remove_tree, self._store.folder(sandbox_id))
